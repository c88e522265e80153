"""Sparse dictionaries: what they are, how they are trained, measured and exchanged."""
