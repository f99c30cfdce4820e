"""Mathematical problems for an agent with a Python tool: public datasets in their own formats, and
ReTool's demonstrations.
"""
