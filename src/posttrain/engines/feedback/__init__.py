"""Preference pairs from a model's own answers and a list of principles: revised by it, labelled by it, or by rules."""
