"""The ledger tasks: questions about rows of users, labels and quantities, from hundreds to millions
of characters long.
"""
