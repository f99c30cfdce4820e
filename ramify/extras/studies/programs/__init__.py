"""Named-operation programs: tool-use problems for policies with under a million parameters."""
