"""A reward that every text earns a different amount of."""

from __future__ import annotations


def share_of_vowels(text: str) -> float:
    """The share of characters that are vowels."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def begins_with_a_vowel(text: str) -> float:
    """1 or 0, so that the answers to one prompt often get the same."""
    return float(text.removeprefix("<think>").strip()[:1].lower() in "aeiou0123456789")
