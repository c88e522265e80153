"""Synthetic problems for the built-in tiny model, and prompts for environments."""
