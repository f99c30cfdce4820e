"""The sandbox providers: one file for each kind of sandbox, with only the code that this kind
needs. They run in the host's process.
"""
