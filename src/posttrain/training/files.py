"""Run files used by training, and the observer type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Callback with an event name ("start", "step", "evaluation", "checkpoint", "notice", "finish") and event data.
Observer = Callable[[str, dict[str, Any]], None]


class NoRecords:
    """Discards metrics and rollouts in processes other than the main one."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: None


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths inside a run directory used by training."""

    folder: Path
    checkpoints: Path
    metrics: Path
    rollouts: Path

    @classmethod
    def within(cls, folder: str | Path) -> RunFiles:
        """List paths under ``folder``, creating directories."""
        root = Path(folder)
        for name in ("checkpoints", "evaluation"):
            (root / name).mkdir(parents=True, exist_ok=True)
        return cls(root, root / "checkpoints", root / "metrics.jsonl", root / "rollouts.db")
