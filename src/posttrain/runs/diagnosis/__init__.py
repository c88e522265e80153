"""Findings about a run, from its files alone: faults that its balances prove, levels, and what is no fault."""
