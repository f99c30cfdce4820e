"""The fork server, a trusted process.

It forks sessions and sets up their processes.
"""
