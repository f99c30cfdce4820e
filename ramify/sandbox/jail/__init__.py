"""The confinement of sessions in the jail. This code runs in the fork server, and in a session
before user code.
"""
