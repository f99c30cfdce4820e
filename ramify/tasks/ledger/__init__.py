"""The ledger family: questions about rows of users, labels and quantities, from hundreds to
millions of characters."""
