"""Math problems from public datasets for an agent with a Python tool, and ReTool's demonstrations.

The datasets are read in their own formats.
"""
