"""Math problems for an agent with a Python tool, read from public datasets in their own formats,
and the demonstrations of ReTool."""
