"""Runs in the fork server, which is trusted: forks sessions, and sets their processes up."""
