"""Exact futures of a run with one thing changed."""
