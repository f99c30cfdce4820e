"""Sandbox providers: one file for each kind of sandbox, with what only that kind needs. They run in
the host's process."""
