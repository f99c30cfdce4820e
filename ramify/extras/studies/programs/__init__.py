"""A task of writing small programs from named operations.

Policies with under a million parameters can learn tool use on it.
"""
