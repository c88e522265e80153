"""Audit one update: recompute gradient and optimizer step in plain code with transformers' forward pass."""
