"""Named-operation programs: tool-use problems for policies with a few hundred thousand parameters."""
