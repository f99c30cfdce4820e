"""Named-operation programs: problems that need a tool, for policies of a few hundred thousand
parameters."""
