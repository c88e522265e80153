"""Batch sources: datasets or rollouts. Rows and random numbers depend only on (seed, step)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from posttrain.balances.record import GivenRow
from posttrain.data.base import TaskPart
from posttrain.errors import UsageError
from posttrain.randomness import permutation
from posttrain.types import Batch, Rollout

if TYPE_CHECKING:
    from posttrain.training.sources.interventions import Intervention


@dataclass(slots=True)
class TrainBatch:
    """Batch for one step (None if empty), with rollouts to record, metrics and timing.

    ``fresh``: created for this step instead of reused. ``whole``: full rollout batch containing these rows.
    ``given``: data for each row. ``is_changed``: modified by an intervention.
    """

    batch: Batch | None
    fresh: bool = True
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    whole: Batch | None = None
    given: list[GivenRow] = field(default_factory=list)
    is_changed: bool = False


class Source:
    """Batch source, called with a step. Stateless between steps by default.

    ``intervention``: modifies a single batch in a what-if run (``runs/what_if``).
    """

    intervention: Intervention | None = None

    def _is_changed(self, step: int) -> bool:
        return self.intervention is not None and self.intervention.step == step

    def rollout_buffer(self, step: int) -> dict[str, Tensor] | None:
        """Collect tensors needed by updates after ``step``, for checkpoints."""
        return None

    def state(self) -> dict[str, float]:
        """Collect additional state besides the step, as plain data."""
        return {}

    def restore(self, rollout_buffer: dict[str, Tensor] | None, state: dict[str, float], vocabulary: int = 0) -> None:
        """Restore ``rollout_buffer`` and ``state``, for a model with the given vocabulary size.

        Raises:
            CheckpointError: invalid data.
        """

    def take_warnings(self) -> list[str]:
        """Return pending warnings."""
        return []

    def wait(self) -> None:
        """Wait for background sampling."""

    def close(self) -> None:
        """Stop background work."""


def num_batches(epochs: float, num_examples: int, batch: int) -> int:
    """Compute the number of batches with ``batch`` examples in ``epochs`` passes over ``num_examples``, rounded up."""
    return math.ceil(Fraction(epochs).limit_denominator(10**6) * num_examples / batch)


@dataclass(frozen=True, slots=True)
class DrawnRound:
    """Rows for one round: positions in the source, and epochs."""

    places: list[int]
    epochs: list[int]


class RowOrder:
    """Row order, reshuffled every epoch. Mixture parts alternate by weight, each with a separate order.

    Every batch contains a fixed proportion from each part (``data/mixture.next_turn``). Additional rounds, which
    replace dropped groups, have the same proportions but separate orders.

    Args:
        purpose: purpose string for random numbers.
        size: rows per batch.
        parts: mixture parts, or empty.
        rows: source rows; for mixtures, part names per row.
        further: number of additional rounds per batch.

    Raises:
        UsageError: a part has no rows.
    """

    def __init__(
        self, seed: int, purpose: str, size: int, parts: Sequence[TaskPart], rows: Sequence[object], further: int = 0
    ) -> None:
        self.seed = seed
        self.purpose = purpose
        self.size = size
        self.further = further
        self.names = [""]
        self.weights = [1.0]
        self.rows = [list(range(len(rows)))]
        if parts:
            self.names = [part.name for part in parts]
            self.weights = [part.weight for part in parts]
            self.rows = [[place for place, row in enumerate(rows) if row == name] for name in self.names]
        for name, own in zip(self.names, self.rows, strict=True):
            if not own:
                raise UsageError(
                    f"task.parts: no usable examples in part {name!r}: all are too long, or have nothing "
                    "to learn from. Remove this part, or raise the limits (data.max_length, prompt.max_prompt_tokens)"
                )
        self._batch = 0  # last requested batch
        self._given = [0] * len(self.names)  # rows drawn from each part before this batch

    def round_of(self, batch: int, attempt: int = 0) -> DrawnRound:
        """List rows for round ``attempt`` in a batch, both counted from 0."""
        given = self._given_before(batch)
        parts = self._parts(list(given))
        purpose = self.purpose
        at = given
        if attempt:
            purpose = f"further {self.purpose}"
            each = [parts.count(part) for part in range(len(self.names))]
            at = [g * self.further + (attempt - 1) * n for g, n in zip(given, each, strict=True)]
        drawn = DrawnRound([], [])
        for part in parts:
            epoch, offset = divmod(at[part], len(self.rows[part]))
            order = f"{purpose} {self.names[part]}".rstrip()
            place = int(_permutation(self.seed, order, epoch, len(self.rows[part]))[offset])
            drawn.places.append(self.rows[part][place])
            drawn.epochs.append(epoch)
            at[part] += 1
        return drawn

    def _given_before(self, batch: int) -> list[int]:
        """Count rows drawn from each part before a batch, continuing from the last request."""
        if batch < self._batch:
            self._batch = 0
            self._given = [0] * len(self.names)
        for _ in range(self._batch, batch):
            self._parts(self._given)
        self._batch = batch
        return list(self._given)

    def _parts(self, turns: list[int]) -> list[int]:
        """List parts for a batch's rows in order, and update ``turns`` (rows drawn per part)."""
        if len(turns) == 1:
            turns[0] += self.size
            return [0] * self.size
        from posttrain.data.mixture import next_turn

        parts = []
        for _ in range(self.size):
            parts.append(next_turn(self.weights, turns))
            turns[parts[-1]] += 1
        return parts


_permutation = lru_cache(maxsize=64)(permutation)
