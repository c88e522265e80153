"""Where batches come from: a data set or rollouts; each a function of the step.

A source owns no state that would have to be saved: rows and random numbers are functions of (seed, step). That of
rollouts keeps the batch that it is in the middle of. A ``RowOrder`` says which rows a batch takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from posttrain.errors import UsageError
from posttrain.randomness import draw_indices, permutation
from posttrain.tasks.base import Task, TaskPart
from posttrain.types import Batch, Rollout


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
    """The rows of one round: their places among those that a source has, and in which pass over them each stands."""

    places: list[int]
    passes: list[int]


class RowOrder(Protocol):
    """The order in which rows are drawn. Batches count from 0; rounds after the first replace what was dropped."""

    def turn(self, batch: int, attempt: int = 0) -> Turn:
        """The rows of round ``attempt`` of a batch."""


def row_order(seed: int, purpose: str, size: int, task: Task, rows: Sequence[Any], *, further: int = 0) -> RowOrder:
    """The order of a source's ``rows``; of a mixture these are the names of their parts.

    Raises:
        UsageError: a part of a mixture has no row.
    """
    if task.parts:
        return MixedOrder(seed, purpose, size, task.parts, rows, further)
    return PlainOrder(seed, purpose, size, len(rows), further)


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


class MixedOrder:
    """Parts of a mixture take turns by weight (``tasks/mixture.next_turn``), each in an order of its own.

    Every batch has its share of each part. The row that a part gives is a function of (seed, part, how many it gave
    before). Further rounds of a batch have the same shares and follow orders of their own.

    Args:
        size: rows of a batch. part_of: the name of each row's part.

    Raises:
        UsageError: a part has no row.
    """

    def __init__(
        self, seed: int, purpose: str, size: int, parts: Sequence[TaskPart], part_of: Sequence[str], further: int = 0
    ) -> None:
        self.seed, self.purpose, self.size, self.further = seed, purpose, size, further
        self.names, self.weights = [part.name for part in parts], [part.weight for part in parts]
        self.rows = [[place for place, name in enumerate(part_of) if name == part] for part in self.names]
        for name, rows in zip(self.names, self.rows, strict=True):
            if not rows:
                raise UsageError(
                    f"task.parts: not one example of part {name!r} can be used here: each is too long, or has nothing "
                    "to learn from. Leave the part out, or make room for it (data.max_tokens, prompt.max_prompt_tokens)"
                )
        self._at = 0, [0] * len(parts)  # a batch, and how many rows each part gave before it

    def turn(self, batch: int, attempt: int = 0) -> Turn:
        given = self._given(batch)
        parts = self._parts(list(given))
        at = list(given)
        if attempt:
            each = [parts.count(part) for part in range(len(self.names))]
            at = [g * self.further + (attempt - 1) * n for g, n in zip(given, each, strict=True)]
        turn = Turn([], [])
        for part in parts:
            rows = self.rows[part]
            in_pass, offset = divmod(at[part], len(rows))
            order = f"{'further ' if attempt else ''}{self.purpose} {self.names[part]}"
            turn.places.append(rows[int(_permuted(self.seed, order, in_pass, len(rows))[offset])])
            turn.passes.append(in_pass)
            at[part] += 1
        return turn

    def _given(self, batch: int) -> list[int]:
        at, given = self._at if self._at[0] <= batch else (0, [0] * len(self.names))
        given = list(given)
        for _ in range(at, batch):
            self._parts(given)
        self._at = batch, given
        return given

    def _parts(self, turns: list[int]) -> list[int]:
        """Return the parts of a batch's rows in order; ``turns`` that each had before go on with them."""
        from posttrain.tasks.mixture import next_turn

        parts = []
        for _ in range(self.size):
            parts.append(next_turn(self.weights, turns))
            turns[parts[-1]] += 1
        return parts


@lru_cache(maxsize=64)
def _permuted(seed: int, order: str, in_pass: int, size: int) -> np.ndarray:
    return permutation(seed, order, in_pass, size)
