"""Means over seeds with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """A mean over ``n`` seeds; ``half_width`` of its 95 % interval, None for one seed."""

    mean: float
    half_width: float | None
    n: int


def student_t_share(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t with a whole number of degrees of freedom.

    The finite sums of Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and
    26.7.4, with θ = arctan(t / √ν).
    """
    assert freedom >= 1, "an interval needs two values"
    angle = math.atan(t / math.sqrt(freedom))
    squared = math.cos(angle) ** 2
    is_odd = freedom % 2 == 1
    term, total = (math.cos(angle) if is_odd else 1.0), 0.0
    for k in range(1, freedom // 2 + 1):  # terms of cos θ, cos³ θ, ... or of 1, cos² θ, ...
        total += term
        term *= squared * (2 * k / (2 * k + 1) if is_odd else (2 * k - 1) / (2 * k))
    total *= math.sin(angle)
    return 2.0 / math.pi * (angle + total) if is_odd else total


def student_t_quantile(freedom: int, share: float = 0.95) -> float:
    """The t with P(|T| < t) = ``share``; 4.303 for 2 degrees of freedom and 95 %."""
    low, high = 0.0, 1.0
    while student_t_share(high, freedom) < share:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if student_t_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def summarize_seeds(values: Sequence[float]) -> Summary | None:
    """Mean and 95 % Student-t interval of the mean: ``t · s / √n`` with s² over n − 1; None for no value."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Summary(mean, None, 1)
    half = student_t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Summary(mean, half, len(values))
