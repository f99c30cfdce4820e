"""Runs in this process: the host's end of one session, whichever provider opened it."""
