"""Balances: recompute logged updates from their records, using code independent of training."""
