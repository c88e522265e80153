"""What the answers of other programs are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_TOKENS = 40


@dataclass(frozen=True)
class Answered:
    """An evaluation: its items as they are on disk, and the greedy answer to each question."""

    items: Path
    answers: dict[str, str]
