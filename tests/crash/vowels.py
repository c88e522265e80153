"""A reward that every text earns a different amount of."""

from __future__ import annotations


def share_of_vowels(text: str) -> float:
    """The share of characters that are vowels."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
