"""Tasks with questions about generated ledgers.

Their questions are about ledgers, which are rows of users, labels and quantities. A ledger is
hundreds to millions of characters long.
"""
