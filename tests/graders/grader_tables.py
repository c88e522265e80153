"""Tables of claims in files next to the tests: sections of lines, each JSON or a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(file: str, section: str) -> list[str]:
    """The lines of a section."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return text.partition(f"=== {section}\n")[2].partition("\n===")[0].splitlines()


def read_cases(file: str, section: str) -> list[Any]:
    """The values of a section, each as JSON; lists become tuples."""
    found = map(json.loads, read_lines(file, section))
    return [tuple(one) if isinstance(one, list) else one for one in found]


def math_pairs(section: str) -> list[tuple[str, str]]:
    """(gold, answer) of each line of a section of ``math_pairs.txt``."""
    return [(gold, answer) for gold, answer in (line.split(" ~~ ") for line in read_lines("math_pairs.txt", section))]
