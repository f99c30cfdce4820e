"""The host's end of a session, which is the same for all sandbox providers. This code runs in the
process that opened the session.
"""
