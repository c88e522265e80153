"""Where one run's training writes, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Called with an event name ("start", "step", "evaluation", "checkpoint", "notice", "finish") and its facts.
Observer = Callable[[str, dict[str, Any]], None]


LEDGER = "ledger.jsonl"  # of runs that sample ahead


class NoRecords:
    """In place of metrics and rollouts, in a process that is not the main one: what it is given, that one writes."""

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Nothing."""

    def record(self, rollouts: Sequence[Any], *, evaluation: str | None = None) -> None:
        """Nothing."""

    def trim(self, after_step: int, unevaluated: Sequence[int] = ()) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def num_rows(self, *up_to_step: int) -> Any:
        """Nobody asks."""
        raise AssertionError("checkpoints are written by the main process")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths inside a run directory that the loop writes to."""

    folder: Path
    checkpoints: Path
    metrics: Path
    rollouts: Path
    evaluation: Path

    @classmethod
    def within(cls, folder: str | Path) -> RunFiles:
        """The paths under ``folder``; makes the directories."""
        root = Path(folder)
        for name in ("checkpoints", "evaluation"):
            (root / name).mkdir(parents=True, exist_ok=True)
        return cls(root, root / "checkpoints", root / "metrics.jsonl", root / "rollouts.db", root / "evaluation")
