"""The fork server, a trusted process from which sessions are forked.

It forks sessions and sets up their processes.
"""
