"""Math problems from public datasets for an agent with a Python tool, and ReTool's demos.

The datasets are read in their own formats.
"""
