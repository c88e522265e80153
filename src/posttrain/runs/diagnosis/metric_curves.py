"""Metrics by step: early and late means, and significant changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points, is_evaluation

LARGEST_WINDOW = 20  # values
LEAST_WINDOW = 3
LEAST_LENGTH = 2 * LEAST_WINDOW
APART = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class MeanOver:
    """Mean and standard error over consecutive values. ``step``: step at the first value."""

    mean: float
    error: float
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """Loss at the first update on a batch, with the mean absolute advantage."""

    step: int
    loss: float
    advantage: float


@dataclass(frozen=True, slots=True)
class UpdateCurves:
    """Measurements from update records, in order. ``measured``: ``(step, value)`` pairs by name.

    per_batch: updates per batch; None if unknown. first_losses: for batches with advantages.
    """

    per_batch: int | None = None
    num_records: int = 0
    max_grad_norm: float | None = None
    first_losses: Sequence[FirstLoss] = ()
    measured: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricCurves:
    """Finite training metrics by name as ``(step, value)``, and evaluations by task in ``points``."""

    series: Mapping[str, Sequence[tuple[int, float]]]
    points: Mapping[str, Sequence[EvaluationPoint]]
    updates: UpdateCurves = field(default_factory=UpdateCurves)
    num_steps: int = 0

    def has(self, *names: str) -> bool:
        """Check if every named metric was measured at least once."""
        return all(self.series.get(name) for name in names)

    def values(self, name: str) -> list[float]:
        """List values of a metric in step order."""
        return [value for _, value in self.series.get(name, ())]

    def late(self, name: str) -> MeanOver | None:
        """Average the last quarter of the values (3 to 20); None below 6 values."""
        ends = self.ends(name)
        if ends is None:
            return None
        return ends[1]

    def ends(self, name: str) -> tuple[MeanOver, MeanOver] | None:
        """Average the first and the last quarter of the values; None below 6 values."""
        window = self._window(name)
        if window is None:
            return None
        return _mean_over(self.series[name][:window]), _mean_over(self.series[name][-window:])

    def change(self, name: str) -> tuple[MeanOver, MeanOver] | None:
        """Compare early and late means; None unless they differ by more than two standard errors."""
        ends = self.ends(name)
        if ends is None:
            return None
        early, late = ends
        if abs(late.mean - early.mean) <= APART * math.hypot(early.error, late.error):
            return None
        return early, late

    def rises(self, name: str) -> bool:
        """Check if the late mean is significantly above the early mean."""
        ends = self.change(name)
        return ends is not None and ends[1].mean > ends[0].mean

    def falls(self, name: str) -> bool:
        """Check if the late mean is significantly below the early mean."""
        ends = self.change(name)
        return ends is not None and ends[1].mean < ends[0].mean

    def _window(self, name: str) -> int | None:
        count = len(self.series.get(name, ()))
        if count < LEAST_LENGTH:
            return None
        return min(LARGEST_WINDOW, max(LEAST_WINDOW, count // 4))


def _mean_over(values: Sequence[tuple[int, float]]) -> MeanOver:
    numbers = [value for _, value in values]
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return MeanOver(mean, math.sqrt(variance / len(numbers)), values[0][0], len(values))


def curves_of(rows: Sequence[MetricsRow], updates: UpdateCurves | None = None) -> MetricCurves:
    """Group the lines of ``metrics.jsonl`` by metric name."""
    series: dict[str, list[tuple[int, float]]] = {}
    num_steps = 0
    for row in rows:
        if is_evaluation(row):
            continue
        num_steps += 1
        for name, value in row.metrics.items():
            if math.isfinite(value):
                series.setdefault(name, []).append((row.step, value))
    points: dict[str, list[EvaluationPoint]] = {}
    for point in evaluation_points(rows):
        points.setdefault(point.name, []).append(point)
    if updates is None:
        updates = UpdateCurves()
    return MetricCurves(series, points, updates, num_steps)
