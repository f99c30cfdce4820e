"""The ledger tasks. Their questions are about rows of users, labels and quantities, which are
hundreds to millions of characters long.
"""
