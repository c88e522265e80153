"""The order in which the rows of a mixture are drawn: parts take turns by weight, each in an order of its own.

Whose turn it is follows from the weights alone (``tasks/mixture.next_turn``), so that every batch has its share of each
part; which row a part gives is a function of (seed, part, how many it gave before). Under a curriculum the weights
change from batch to batch, and turns are counted anew from there. Without one, or with one that reads no history,
everything is a function of (seed, batch); else what was recorded belongs to the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from posttrain.algorithms.curricula import History, Mix, Tried, choose_mix
from posttrain.errors import CheckpointError, UsageError
from posttrain.randomness import permutation
from posttrain.tasks.base import TaskPart
from posttrain.tasks.mixture import next_turn
from posttrain.train.sources import Turn
from posttrain.types import Rollout

MAX_RECORDED = 1000  # batches of a part; the longest window of a curriculum
NUM_KNOWN = 128  # batches whose standing is kept, more than anybody samples ahead


@dataclass(frozen=True)
class Curriculum:
    """A curriculum word with its options.

    ``function``: the ``Mix`` of (step, history). ``reads``: what of the history it reads (``parts``, ``prompts``).
    ``by``: what success is. ``steps_per_batch``: updates that one batch serves.
    """

    function: Callable[[int, History], Mix]
    reads: frozenset[str] = frozenset()
    by: str = "correct"
    steps_per_batch: int = 1


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the order stands before a batch is drawn, one number for each part.

    ``turns``: that it had since the ``weights`` last changed. ``given``: rows that it gave, ever. ``passed``: places of
    its order that it went over, those that rested included. ``resting``: see ``Mix``.
    """

    weights: tuple[float, ...]
    turns: tuple[int, ...]
    given: tuple[int, ...]
    passed: tuple[int, ...]
    resting: Mapping[int, int] = field(default_factory=dict)


_KEPT = ("weights", "turns", "given", "passed")  # of a standing, in a checkpoint


class MixedOrder:
    """See the module.

    Args:
        purpose: of the random numbers.
        size: rows of a batch.
        parts: the mixture's.
        part_of: the name of each row's part.
        further: rounds after the first that a batch may have.

    Raises:
        UsageError: a part has no row.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        size: int,
        parts: Sequence[TaskPart],
        part_of: Sequence[str],
        *,
        further: int = 0,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.seed, self.purpose, self.size, self.further = seed, purpose, size, further
        self.names = tuple(part.name for part in parts)
        self.part_of = part_of
        self.rows = [[place for place, name in enumerate(part_of) if name == part] for part in self.names]
        for name, rows in zip(self.names, self.rows, strict=True):
            if not rows:
                raise UsageError(
                    f"task.parts: not one example of part {name!r} can be used here: each is too long, or has nothing "
                    "to learn from. Leave the part out, or make room for it (data.max_tokens, prompt.max_prompt_tokens)"
                )
        self.own_weights = tuple(part.weight for part in parts)
        self.curriculum = curriculum or Curriculum(lambda step, history: Mix())
        self.history = History(self.names)
        nothing = (0,) * len(self.names)
        self._first, self._start = 0, Standing((), nothing, nothing, nothing)  # before batch ``_first``
        self._known: dict[int, Standing] = {}
        self._lock = threading.Lock()  # a run that samples ahead asks from two threads

    def turn(self, batch: int, attempt: int = 0) -> Turn:
        """The rows of round ``attempt`` of a batch; every round has as many of each part as the first."""
        return self._turn(self._standing(batch), attempt)[0]

    def record(self, batch: int, groups: Sequence[Sequence[Rollout]]) -> None:
        """Enter the success of all that was sampled for a batch, in the order in which it was."""
        if not self.curriculum.reads:
            return
        standing = self._standing(batch)
        sums = {name: [0.0, 0] for name in self.names}
        for start in range(0, len(groups), self.size):
            attempt, turn = start // self.size, self.turn(batch, start // self.size)
            for place, in_pass, group in zip(turn.places, turn.passes, groups[start : start + self.size], strict=True):
                part = self.names.index(self.part_of[place])
                success = [value for r in group if (value := self._success(r)) is not None]
                sums[self.names[part]][0] += sum(success)
                sums[self.names[part]][1] += len(success)
                if success and "prompts" in self.curriculum.reads:
                    main = in_pass if attempt == 0 else standing.passed[part] // len(self.rows[part])
                    self.history.prompts[place] = Tried(main, sum(success) / len(success))
        if not any(number for _, number in sums.values()):
            raise UsageError(
                f"curriculum: it goes by success ({self.curriculum.by}), and no answer of this batch could be graded. "
                "Name the part of the reward that is success as curriculum.by, or use stages"
            )
        for name, (total, number) in sums.items():
            if number:
                self.history.batches.setdefault(name, []).append((float(total), int(number)))
                del self.history.batches[name][:-MAX_RECORDED]
        self._first, self._start = batch + 1, self._after(standing)
        self._known.clear()

    def state(self) -> dict[str, Any]:
        """Where the order stands and what was recorded; nothing where it follows from the step."""
        if not self.curriculum.reads:
            return {}
        prompts = {str(place): [tried.in_pass, tried.success] for place, tried in self.history.prompts.items()}
        batches = {name: [list(row) for row in rows] for name, rows in self.history.batches.items()}
        return {
            "batch": self._first,
            **{name: list(getattr(self._start, name)) for name in _KEPT},
            "batches": batches,
            "prompts": prompts,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what ``state`` gave."""
        if not state:
            return
        weights, turns, given, passed = (tuple(state[name]) for name in _KEPT)
        numbers = {len(weights), len(turns), len(given), len(passed)}
        if numbers != {len(self.names)} or not set(state["batches"]) <= set(self.names):
            parts = ", ".join(self.names)
            raise CheckpointError(f"state.json: source.order is not one of the parts {parts}; restore it from a copy")
        self._first, self._start = state["batch"], Standing(weights, turns, given, passed)
        batches = {name: [(total, number) for total, number in rows] for name, rows in state["batches"].items()}
        prompts = {int(place): Tried(*tried) for place, tried in state["prompts"].items()}
        self.history = History(self.names, batches, prompts)
        self._known.clear()

    def _standing(self, batch: int) -> Standing:
        """Before a batch, with the weights that hold for it."""
        with self._lock:
            if batch not in self._known:
                nearest = max((b for b in self._known if b < batch), default=None)
                at, standing = (self._first, self._start) if nearest is None else (nearest + 1, self._next(nearest))
                while at < batch:
                    standing = self._after(self._chosen(standing, at))
                    at += 1
                self._known[batch] = self._chosen(standing, batch)
                self._known = {b: known for b, known in self._known.items() if b > batch - NUM_KNOWN}
            return self._known[batch]

    def _next(self, batch: int) -> Standing:
        return self._after(self._known[batch])

    def _chosen(self, before: Standing, batch: int) -> Standing:
        """With what the curriculum says before a batch."""
        mix = choose_mix(self.curriculum.function, batch * self.curriculum.steps_per_batch + 1, self.history)
        weights = tuple(w * mix.factors.get(name, 1.0) for name, w in zip(self.names, self.own_weights, strict=True))
        turns = before.turns if weights == before.weights else (0,) * len(weights)
        return Standing(weights, turns, before.given, before.passed, mix.resting)

    def _after(self, standing: Standing) -> Standing:
        """Behind the first round of a batch."""
        _, parts, passed = self._turn(standing, 0)
        counts = [parts.count(part) for part in range(len(self.names))]
        turns = tuple(a + b for a, b in zip(standing.turns, counts, strict=True))
        given = tuple(a + b for a, b in zip(standing.given, counts, strict=True))
        return Standing(standing.weights, turns, given, tuple(passed))

    def _turn(self, standing: Standing, attempt: int) -> tuple[Turn, list[int], list[int]]:
        """The rows of a round, their parts, and how far each part's order has come."""
        parts, turns = list[int](), list(standing.turns)
        for _ in range(self.size):
            parts.append(next_turn(standing.weights, turns))
            turns[parts[-1]] += 1
        at = list(standing.passed)
        if attempt:
            each = [parts.count(part) for part in range(len(self.names))]
            at = [g * self.further + (attempt - 1) * n for g, n in zip(standing.given, each, strict=True)]
        places, passes, skipped = list[int](), list[int](), dict.fromkeys(self.names, 0)
        for part in parts:
            held = standing.passed[part] // len(self.rows[part]) if attempt else None
            position = next(self._eligible(part, at[part], standing.resting, attempt, held))
            skipped[self.names[part]] += position - at[part]
            at[part] = position + 1
            places.append(self._place(part, position, attempt))
            passes.append(position // len(self.rows[part]))
        return Turn(places, passes, skipped), parts, at

    def _eligible(
        self, part: int, start: int, resting: Mapping[int, int], attempt: int, in_pass: int | None
    ) -> Iterator[int]:
        """Positions of a part's order from ``start`` on whose rows do not rest; ``start``, if all of a pass do."""
        there = len(self.rows[part])
        for position in range(start, start + there if resting else start):
            now = position // there if in_pass is None else in_pass
            if now >= resting.get(self._place(part, position, attempt), 0):
                yield position
        yield start

    def _place(self, part: int, position: int, attempt: int) -> int:
        rows = self.rows[part]
        order = f"{'further ' if attempt else ''}{self.purpose} {self.names[part]}"
        in_pass, offset = divmod(position, len(rows))
        return rows[int(_permuted(self.seed, order, in_pass, len(rows))[offset])]

    def _success(self, rollout: Rollout) -> float | None:
        """Of one answer; None where it cannot be told."""
        by = self.curriculum.by
        if rollout.has_failed or (by == "correct" and rollout.outcome == "ungraded"):
            return None
        return rollout.reward if by == "reward" else rollout.parts[by]


@lru_cache(maxsize=64)
def _permuted(seed: int, order: str, in_pass: int, size: int) -> np.ndarray:
    return permutation(seed, order, in_pass, size)
