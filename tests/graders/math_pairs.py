"""The pairs of ``math_pairs.txt``."""

from __future__ import annotations

from pathlib import Path


def math_pairs(section: str) -> list[tuple[str, str]]:
    """Return (gold, answer) of each line of a section."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    lines = text.partition(f"=== {section}\n")[2].partition("\n===")[0].splitlines()
    return [(gold, answer) for gold, answer in (line.split(" ~~ ") for line in lines)]
