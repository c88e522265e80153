"""The files of a run that trains, and the type of its observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialize

from posttrain.errors import StorageError
from posttrain.store.durable import replace_file
from posttrain.types import Batch

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


def save_batch(files: RunFiles, batch: Batch, step: int, *, is_main: bool) -> str:
    """Save the batch of a failed step for inspection; return where, or why it could not be saved."""
    path = files.folder / f"nonfinite-step-{step:06d}.safetensors"
    if not is_main:
        return "Rank 0 saves the batch"
    tensors = {"tokens": batch.tokens, "lengths": batch.lengths, "mask": batch.mask}
    tensors |= {f"stream.{name}": x for name, x in batch.fields.items()}
    try:
        replace_file(path, serialize({name: x.clone() for name, x in tensors.items()}))  # fields may share memory
    except StorageError as failure:
        return f"The batch could not be kept: {failure}"
    return f"The batch is saved in {path}"
