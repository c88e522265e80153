"""What the options of commands are read as; what cannot be read is refused with what would work."""

from __future__ import annotations

import argparse


def names(text: str) -> list[str]:
    """``a,b``: the names between the commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return value


def positives(text: str) -> list[int]:
    """``1,4,8``: whole numbers of at least 1."""
    return [positive(part) for part in names(text)]


def natural(text: str) -> int:
    """A whole number of at least 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a whole number of at least 0 is needed, not {text!r}")
    return value


def naturals(text: str) -> list[int]:
    """``0,1``: whole numbers of at least 0."""
    return [natural(part) for part in names(text)]


def nonnegative_float(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, not {text!r}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value = nonnegative_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most 1 is needed, not {text!r}")
    return value
