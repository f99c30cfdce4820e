"""The confinement of sessions in the jail. This code runs in the fork server, and in the process of
each session before any user code.
"""
