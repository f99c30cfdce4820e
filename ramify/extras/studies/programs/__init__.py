"""A task in which the policy writes small programs made of named operations.

Policies with under a million parameters can learn tool use on it.
"""
