"""The files of a run that trains, the type of its observer, and how its engines are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.registry import Entry
from posttrain.world import ONE, Within, World

if TYPE_CHECKING:
    from posttrain.engines.base import Engine
    from posttrain.models.load import LoadedModel

# Called with an event name ("start", "step", "evaluation", "checkpoint", "notice", "finish") and its facts.
Observer = Callable[[str, dict[str, Any]], None]


class NoRecords:
    """Metrics and rollouts of a process that is not the main one: nothing is written."""

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Nothing."""

    def record(self, rollouts: Sequence[Any], *, evaluation: str | None = None) -> None:
        """Nothing."""

    def trim(self, after_step: int, unevaluated: Sequence[int] = ()) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def num_rows(self, *up_to_step: int) -> Any:
        """Not called."""
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


@dataclass(frozen=True)
class EngineSite:
    """The folder for an engine's files, the processes that train, and what gathers a sharded model (``within``)."""

    folder: Path | None = None
    world: World = ONE
    within: Within | None = None

    def build(self, loaded: LoadedModel, entry: Entry, options: dict[str, Any], where: str) -> Engine:
        """Build the engine that samples with a trained model's weights."""
        engine: Engine = entry.bind(options, where)(loaded.model, loaded.tokenizer)
        engine = engine.settle(self.folder, self.world)
        if self.within is not None and entry.traits.get("takes_weights"):
            engine.take_parts(self.within)
        return engine
