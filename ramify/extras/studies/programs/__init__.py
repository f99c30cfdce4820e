"""A task with small programs of named operations, on which policies with under a million parameters
can learn to use a tool."""
