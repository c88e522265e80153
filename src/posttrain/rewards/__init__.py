"""Rewards: plain functions of (prompt, text, answer, ...), asked for by parameter name."""
