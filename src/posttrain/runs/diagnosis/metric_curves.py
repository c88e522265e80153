"""The metrics of a run by step: first and last values of each, and whether they are apart."""

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
    """The mean of some values of a metric with its standard error; ``step``: of the first of them."""

    mean: float
    error: float
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """The loss of the first update of a batch, and the mean size of its rows' advantages."""

    step: int
    loss: float
    advantage: float


@dataclass(frozen=True, slots=True)
class UpdateCurves:
    """The records of a run's updates, in order; ``measured``: by name ``(step, value)``.

    per_batch: updates of a batch; None where that is not recorded. first_losses: of batches with advantages.
    """

    per_batch: int | None = None
    num_records: int = 0
    max_grad_norm: float | None = None
    first_losses: Sequence[FirstLoss] = ()
    measured: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricCurves:
    """The metrics of a run by name, as ``(step, value)`` with finite values; evaluations by task in ``points``."""

    series: Mapping[str, Sequence[tuple[int, float]]]
    points: Mapping[str, Sequence[EvaluationPoint]]
    updates: UpdateCurves = field(default_factory=UpdateCurves)
    num_steps: int = 0

    def has(self, *names: str) -> bool:
        """Return whether all of these were measured at least once."""
        return all(self.series.get(name) for name in names)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric in the order of their steps."""
        return [value for _, value in self.series.get(name, ())]

    def early(self, name: str) -> MeanOver | None:
        """Return the mean of the first quarter of the values (3 to 20); None of less than 6 values."""
        window = self._window(name)
        if window is None:
            return None
        return _mean_over(self.series[name][:window])

    def late(self, name: str) -> MeanOver | None:
        """Return the mean of the last quarter of the values (3 to 20); None of less than 6 values."""
        window = self._window(name)
        if window is None:
            return None
        return _mean_over(self.series[name][-window:])

    def change(self, name: str) -> tuple[MeanOver, MeanOver] | None:
        """Return both ends of a metric if they are apart by more than two standard errors; else None."""
        early, late = self.early(name), self.late(name)
        if early is None or late is None:
            return None
        if abs(late.mean - early.mean) <= APART * math.hypot(early.error, late.error):
            return None
        return early, late

    def rises(self, name: str) -> bool:
        """Return whether the last values are higher than the first, by more than their scatter."""
        ends = self.change(name)
        return ends is not None and ends[1].mean > ends[0].mean

    def falls(self, name: str) -> bool:
        """Return whether the last values are lower than the first, by more than their scatter."""
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
    """Return the metrics of a run by name, from the lines of ``metrics.jsonl``."""
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
