"""Runs in this process: one file for each kind of sandbox, with what only that kind needs."""
