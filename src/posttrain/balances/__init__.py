"""Balances: what an update logged is computed again from its records, by code that shares nothing with the training."""
