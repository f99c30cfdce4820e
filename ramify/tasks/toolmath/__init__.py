"""Mathematical problems for an agent with a Python tool: public sets in their own formats, ReTool's
demonstrations."""
