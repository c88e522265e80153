"""Where batches come from: a data set or rollouts; each a function of the step.

A source owns no state that would have to be saved: rows and random numbers are functions of (seed, step), and under a
curriculum of what was recorded. That of rollouts keeps the batch that it is in the middle of. Which of its rows a
source takes for a batch says its ``RowOrder``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.randomness import draw_indices
from posttrain.tasks.base import Task
from posttrain.types import Batch, Rollout

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from posttrain.train.sources.mixed_order import Curriculum


@dataclass(slots=True)
class TrainBatch:
    """What a source gives for one step.

    ``batch`` is None where nothing is to be trained on. ``fresh``: the batch was made for this step
    (and not kept from an earlier one). ``rollouts`` are those to record, ``metrics`` facts about them,
    ``timing`` seconds by phase.
    """

    batch: Batch | None
    fresh: bool = True
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


def num_batches(passes: float, num_examples: int, batch: int) -> int:
    """Batches of ``batch`` examples that go ``passes`` times through ``num_examples``; the last may reach further."""
    return math.ceil(Fraction(passes).limit_denominator(10**6) * num_examples / batch)


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows of one round: their places among those that a source has, and in which pass over them each stands.

    ``skipped``: by part, how many rows were passed over because they rest.
    """

    places: list[int]
    passes: list[int]
    skipped: dict[str, int] = field(default_factory=dict)


class RowOrder(Protocol):
    """The order in which rows are drawn. Batches count from 0; rounds after the first replace what was dropped."""

    def turn(self, batch: int, attempt: int = 0) -> Turn:
        """The rows of round ``attempt`` of a batch."""

    def record(self, batch: int, groups: Sequence[Sequence[Rollout]]) -> None:
        """Take note of what came of all that was sampled for a batch, round by round."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the step, as plain data for JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what ``state`` gave."""


def row_order(
    seed: int,
    purpose: str,
    size: int,
    task: Task,
    rows: Sequence[Any],
    curriculum: Curriculum | None = None,
    *,
    further: int = 0,
) -> RowOrder:
    """The order of a source's ``rows``; of a mixture these are the names of their parts.

    Raises:
        UsageError: a part of a mixture has no row.
    """
    if not task.parts:
        return PlainOrder(seed, purpose, size, len(rows), further)
    from posttrain.train.sources.mixed_order import MixedOrder

    return MixedOrder(seed, purpose, size, task.parts, rows, further=further, curriculum=curriculum)


@dataclass(frozen=True)
class PlainOrder:
    """One row after the other, in a new order for every pass; ``further`` rounds of a batch follow an order of theirs.

    Args:
        purpose: of the random numbers.
        size: rows of a batch.
        there: rows that there are.
    """

    seed: int
    purpose: str
    size: int
    there: int
    further: int = 0

    def turn(self, batch: int, attempt: int = 0) -> Turn:
        # the first draw is that of every method; further ones follow an order of their own
        order = self.purpose if attempt == 0 else f"further {self.purpose}"
        start = (batch if attempt == 0 else batch * self.further + attempt - 1) * self.size
        places = draw_indices(self.seed, order, start, self.size, self.there)
        return Turn(places, [position // self.there for position in range(start, start + self.size)])

    def record(self, batch: int, groups: Sequence[Sequence[Rollout]]) -> None:
        """Nothing depends on it."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing beside the step."""
