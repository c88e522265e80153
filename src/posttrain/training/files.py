"""The files of a run that trains, and the type of its observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Called with an event name ("start", "step", "evaluation", "checkpoint", "notice", "finish") and its facts.
Observer = Callable[[str, dict[str, Any]], None]


class NoRecords:
    """Metrics and rollouts of a process that is not the main one: nothing is written."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: None


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths inside a run directory that the loop writes to."""

    folder: Path
    checkpoints: Path
    metrics: Path
    rollouts: Path

    @classmethod
    def within(cls, folder: str | Path) -> RunFiles:
        """The paths under ``folder``; makes the directories."""
        root = Path(folder)
        for name in ("checkpoints", "evaluation"):
            (root / name).mkdir(parents=True, exist_ok=True)
        return cls(root, root / "checkpoints", root / "metrics.jsonl", root / "rollouts.db")
