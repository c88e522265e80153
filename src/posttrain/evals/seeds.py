"""Means over seeds with their intervals; Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_TERMS = 2000  # of the continued fraction; 200 are more than any number of degrees of freedom asks for


@dataclass(frozen=True, slots=True)
class Summary:
    """A mean over ``n`` seeds; ``half_width`` of its 95 % interval, None for one seed."""

    mean: float
    half_width: float | None
    n: int


def student_t_tail(t: ArrayLike, freedom: ArrayLike) -> NDArray[np.float64]:
    """P(|T| > |t|) of Student's t, entry by entry, to 12 digits at any number of degrees of freedom from 1 on.

    ``I_x(ν/2, 1/2)`` with x = ν/(ν + t²), the incomplete beta function (Abramowitz and Stegun, "Handbook of
    Mathematical Functions", 26.5.2 and 26.7.1). The tail is computed itself, not as what is missing from 1, so that
    a p of 1e-30 is right as well.
    """
    size, nu = np.broadcast_arrays(np.abs(np.asarray(t, dtype=np.float64)), np.asarray(freedom, dtype=np.float64))
    assert bool(np.all(nu >= 1)), "an interval needs two values"
    u = size / np.sqrt(nu)  # x = 1/(1 + u²), with its logarithm right for small u and for huge ones
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_x = np.where(u < 1.0, -np.log1p(u * u), -2.0 * np.log(np.hypot(1.0, u)))
        x, y = np.exp(log_x), 1.0 / (1.0 + 1.0 / (u * u))
        front = np.exp(nu / 2 * log_x + np.log(y) / 2) * _gamma_ratio(nu / 2) / math.sqrt(math.pi)
        excess = (nu / 2 + 0.5) * y - 0.5  # how far x stands below the mean of the beta distribution
        far = excess >= 0.0
        a, b = np.where(far, nu / 2, 0.5), np.where(far, 0.5, nu / 2)
        part = front * _beta_fraction(a, b, np.where(far, x, y), np.abs(excess))
    return np.where(np.isnan(size), np.nan, np.clip(np.where(far, part, 1.0 - part), 0.0, 1.0))


def _gamma_ratio(a: NDArray[np.float64]) -> NDArray[np.float64]:
    """Γ(a + 1/2) / Γ(a): Stirling's series for large a, carried down by Γ(a + 1) = a Γ(a) to small ones."""
    carried, factor = a.copy(), np.ones_like(a)
    while bool((small := carried < 24.0).any()):
        factor = np.where(small, factor * carried / (carried + 0.5), factor)
        carried = np.where(small, carried + 1.0, carried)
    series = -1 / 8 / carried + 1 / 192 / carried**3 - 1 / 640 / carried**5 + 17 / 14336 / carried**7
    return factor * np.sqrt(carried) * np.exp(series)


def _beta_fraction(
    a: NDArray[np.float64], b: NDArray[np.float64], x: NDArray[np.float64], excess: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The continued fraction ``I_x(a, b) · B(a, b) / (x^a (1 − x)^b)``; ``excess`` = a − (a + b) x, not negative.

    Didonato and Morris (1992), "Algorithm 708", equation 9, evaluated from the front (Lentz). It never takes the
    difference of large numbers, as the plain fraction does where a is large.
    """
    value = c = a * (excess + 1.0) / (a + 1.0)
    d = np.zeros_like(a)
    for n in range(1, MAX_TERMS):
        top = (a + n - 1) * (a + b + n - 1) * n * (b - n) * x * x / (a + 2 * n - 1) ** 2
        bottom = n + n * (b - n) * x / (a + 2 * n - 1) + (a + n) / (a + 2 * n + 1) * (excess + 1.0 + n * (2.0 - x))
        c, d = bottom + top / c, 1.0 / (bottom + top * d)
        last, value = value, value * c * d
        if not bool((np.abs(value - last) > 2**-50 * np.abs(value)).any()):
            return 1.0 / value
    raise AssertionError("the continued fraction converges")


@lru_cache(maxsize=4096)
def student_t_quantile(freedom: int, share: float = 0.95) -> float:
    """The t with P(|T| < t) = ``share``; 4.303 for 2 degrees of freedom and 95 %."""
    low, high = 0.0, 1.0
    while float(student_t_tail(high, freedom)) > 1.0 - share:
        high *= 2.0
    while (middle := (low + high) / 2.0) not in (low, high):
        if float(student_t_tail(middle, freedom)) > 1.0 - share:
            low = middle
        else:
            high = middle
    return middle


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % Student-t interval of a mean: ``t · s / √n`` with s² over n − 1; 0 for one value.

    With several samples per item and their mean as the value, ``s / √n`` is the clustered standard error.

    Source: Miller (2024), "Adding Error Bars to Evals", sections 2.1 and 2.2, with t in the place of 1.96.
    """
    n = len(values)
    return student_t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0


def summarize_seeds(values: Sequence[float]) -> Summary | None:
    """Mean and 95 % Student-t interval of the mean: ``t · s / √n`` with s² over n − 1; None for no value."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Summary(mean, None, 1)
    return Summary(mean, half_width(values), len(values))
