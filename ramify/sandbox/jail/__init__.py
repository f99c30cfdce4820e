"""Confines sessions in the jail, the sandbox that the kernel enforces.

This code runs in the fork server, and in each session's process before any user code.
"""
