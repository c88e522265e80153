"""A reward that differs between random completions, so that no group is uniform."""

from __future__ import annotations


def digits(text: str) -> float:
    """The share of digits among the characters."""
    return sum(c.isdigit() for c in text) / max(1, len(text))
