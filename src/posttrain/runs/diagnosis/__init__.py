"""Findings about a run, read from its files: faults proven by balances, levels, and harmless oddities."""
