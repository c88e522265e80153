"""Supervised data source: task rows in an order that depends only on (seed, epoch)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from posttrain.balances.record import GivenRow
from posttrain.data.base import num_repeated
from posttrain.recipes.sections import DataSection, TrainSection
from posttrain.training.batch_fields import BatchFields
from posttrain.training.sources import RowOrder, Source, TrainBatch, num_batches
from posttrain.training.sources.unit_batches import UnitBatches
from posttrain.training.sources.units import UNIT_NAMES, TaskUnits

# Positions where a reward model's loss applies.
ScoredPlaces = Literal["steps", "tokens", "last tokens"]


class SupervisedSource(Source):
    """Task units, ``data.batch_size`` per step, in an order that depends only on (seed, epoch).

    Args:
        data: batch size.
        train: seed and run length.
        units: training units to draw from.
        fields: batch fields to compute, if any.
        cache: folder for fields that are computed once.
        scored: positions scored by a reward model; None for policies.

    Raises:
        RecipeError: ratings without a threshold, identical labels, or a mixture part without usable units.
    """

    def __init__(
        self,
        data: DataSection,
        train: TrainSection,
        units: TaskUnits,
        fields: BatchFields | None = None,
        cache: Path | None = None,
        scored: ScoredPlaces | None = None,
    ) -> None:
        units.check_labels(needs_both=True)
        self.batch = data.batch_size
        self.units = units
        self.dropped = units.dropped
        self.num_repeated = num_repeated(units.task.examples)
        self.origin = units.task.origin
        self.num_examples = len(units)
        self.size = units.size
        self.trained = describe_trained(units, scored)
        self.order = RowOrder(train.seed, "data", self.batch, units.task.parts, units.parts)
        self.batches = UnitBatches(units, fields)
        self.batches.fill_fixed(self._seen_units(train), cache)
        self._shown = set[str]()  # warnings

    def __call__(self, step: int) -> TrainBatch:
        """Build the batch for update ``step`` (1-based)."""
        turn = self.order.round_of(step - 1)
        numbers = list(range(len(turn.places)))
        if self.intervention is not None:
            numbers = self.intervention.keep_units(step, numbers)
        given: list[GivenRow] = []
        for number in numbers:
            place = turn.places[number]
            epoch = turn.epochs[number]
            for row in self.units[place]:
                given.append(GivenRow(place, epoch, self.units.encoder.trained_places(row), row.score))
        batch = self.batches.batch_of([turn.places[number] for number in numbers])
        return TrainBatch(batch, given=given, is_changed=self._is_changed(step))

    def length_of(self, epochs: float) -> tuple[int, str]:
        """Compute the number of steps in ``epochs``, rounded up, with a description."""
        steps = num_batches(epochs, self.num_examples, self.batch)
        passes = "pass" if epochs == 1 else "passes"
        over = f"{epochs:g} {passes} over {self.num_examples:,} {UNIT_NAMES[self.units.shape]}"
        return steps, f"{over} = {steps:,} steps of {self.batch}"

    def take_warnings(self) -> list[str]:
        warning = self.units.describe_replaced()
        if warning is None or warning in self._shown:
            return []
        self._shown.add(warning)
        return [warning]

    def _seen_units(self, train: TrainSection) -> list[int]:
        """List units used by the run's steps, in ascending order."""
        steps = train.steps
        if train.num_epochs is not None:
            steps, _ = self.length_of(train.num_epochs)
        assert steps is not None, "a recipe says steps or num_epochs"
        seen: set[int] = set()
        for batch in range(steps):
            seen.update(self.order.round_of(batch).places)
            if len(seen) == len(self.units):
                break
        return sorted(seen)


def describe_trained(units: TaskUnits, scored: ScoredPlaces | None) -> str:
    """Describe what is trained: positions scored by a reward model, or the fraction of trained tokens.

    For units encoded when drawn, counts cover the units encoded at startup.
    """
    rows = [row for unit in units.encoded for row in unit]
    num_trained = sum(len(units.encoder.trained_places(row)) for row in rows)
    which = f"{len(rows):,}"
    extent = ""
    if not units.is_complete:
        which = f"the first {len(rows):,}"
        extent = f", in the first {len(units.encoded):,} {UNIT_NAMES[units.shape]}"
    if scored == "steps":
        return f"{num_trained:,} labelled steps in {which} solutions are scored, one score each"
    if scored == "tokens":
        return f"{num_trained:,} tokens in {which} answers are scored, each with its answer's label"
    if scored == "last tokens":
        num_rows = len(units) * len(units.encoded[0])
        return f"{num_rows:,} answers are scored, each at its last token"
    total = sum(len(row.ids) for row in rows)
    share = f"{num_trained:,} of {total:,} tokens are trained, {num_trained / total:.1%}{extent}"
    if units.shape == "demonstration":
        share += f" (data.train_on {_trained_part(units)})"
    num_apart = sum(row.is_apart for row in rows)
    if num_apart:
        what = "examples are single conversation turns, because the template rewrites earlier turns"
        share += f"; {num_apart:,} {what}"
    return share


def _trained_part(units: TaskUnits) -> str:
    """Name the effective ``data.train_on``."""
    train_on = units.encoder.data.train_on
    if train_on is not None:
        return train_on
    if units.has_conversations:
        return "assistant"
    return "response"
