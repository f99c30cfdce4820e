"""The confinement of sessions in the jail.

This code runs in the fork server, and in each session's process before any user code.
"""
