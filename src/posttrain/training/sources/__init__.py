"""Sources of batches: a data set or rollouts. Rows and random numbers are functions of (seed, step)."""

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
    """The batch of one step, None where nothing is to be trained on, with rollouts to record, metrics and timing.

    ``fresh``: the batch was made for this step, not kept from an earlier one. ``whole``: all rows of the rollout batch
    that it is a part of. ``given``: what the data say of each row. ``is_changed``: by an intervention.
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
    """A source of batches, called with a step; by default it has no state between two steps.

    ``intervention``: a change of one batch, of a future that is played to see what it does (``runs/what_if``).
    """

    intervention: Intervention | None = None

    def _is_changed(self, step: int) -> bool:
        return self.intervention is not None and self.intervention.step == step

    def rollout_buffer(self, step: int) -> dict[str, Tensor] | None:
        """Return the tensors that updates after ``step`` still need, to be saved."""
        return None

    def state(self) -> dict[str, float]:
        """Return the state in addition to the step, as plain data."""
        return {}

    def restore(self, rollout_buffer: dict[str, Tensor] | None, state: dict[str, float], vocabulary: int = 0) -> None:
        """Take back what ``rollout_buffer`` and ``state`` gave, of a model with so large a vocabulary.

        Raises:
            CheckpointError: it is something else.
        """

    def take_warnings(self) -> list[str]:
        """Return warnings that were not shown yet."""
        return []

    def wait(self) -> None:
        """Wait until nothing is being sampled."""

    def close(self) -> None:
        """Stop background work."""


def num_batches(epochs: float, num_examples: int, batch: int) -> int:
    """Return the number of batches of ``batch`` examples for ``epochs`` of ``num_examples``, rounded up."""
    return math.ceil(Fraction(epochs).limit_denominator(10**6) * num_examples / batch)


@dataclass(frozen=True, slots=True)
class DrawnRound:
    """The rows of one round: their places in the source, and the epoch of each."""

    places: list[int]
    epochs: list[int]


class RowOrder:
    """Rows of a source in a new order for every epoch; the parts of a mixture take turns by weight, each in its order.

    Every batch has its share of each part (``data/mixture.next_turn``). Further rounds of a batch, which replace
    dropped groups, have the same shares and orders of their own.

    Args:
        purpose: of the random numbers.
        size: rows of a batch.
        parts: those of a mixture, or none.
        rows: of the source; of a mixture the name of each row's part.
        further: the number of further rounds of a batch.

    Raises:
        UsageError: a part has no row.
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
                    f"task.parts: not one example of part {name!r} can be used here: each is too long, or has nothing "
                    "to learn from. Leave the part out, or make room for it (data.max_length, prompt.max_prompt_tokens)"
                )
        self._batch = 0  # the last one that was asked for
        self._given = [0] * len(self.names)  # how many rows each part gave before it

    def round_of(self, batch: int, attempt: int = 0) -> DrawnRound:
        """Return the rows of round ``attempt`` of a batch, both from 0."""
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
        """Return how many rows each part gives before a batch, counted on from the last one that was asked for."""
        if batch < self._batch:
            self._batch = 0
            self._given = [0] * len(self.names)
        for _ in range(self._batch, batch):
            self._parts(self._given)
        self._batch = batch
        return list(self._given)

    def _parts(self, turns: list[int]) -> list[int]:
        """Return the parts of a batch's rows in order; adds them to the ``turns`` that each had before."""
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
