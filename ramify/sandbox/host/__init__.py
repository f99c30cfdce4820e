"""The host's end of a session.

All sandbox providers share this code, which runs in the process that opened the session.
"""
