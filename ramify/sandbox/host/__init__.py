"""The host's end of one session, whichever provider opened it. Runs in the host's process."""
