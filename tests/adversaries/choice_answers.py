"""Answers about letters that hedge, take back, deny or join: none of them is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def letter_hedges(gold: str, other: str) -> Iterator[str]:
    """Responses that do not choose the gold letter and nothing else: {g} of the file, where {o} is another."""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        yield line.replace("\\n", "\n").format(g=gold, o=other)
