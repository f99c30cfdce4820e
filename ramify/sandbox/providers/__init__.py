"""The sandbox providers, one file for each kind of sandbox.

They run in the host's process.
"""
