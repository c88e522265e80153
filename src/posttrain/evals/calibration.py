"""Whether probabilities mean what they say: reliability, Brier score, log loss, and the temperature that would help.

Pure functions of numbers. An outcome is 1 or 0, or a share between them (a tie is one half).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 10
# Temperatures outside of 1/MAX_SHARPNESS to MAX_SHARPNESS are no temperature but a sign of separable data.
MAX_SHARPNESS = 1e4
MAX_LOGIT = 40.0


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions between ``low`` and ``high``: how many, their mean, and the share that came true."""

    low: float
    high: float
    n: int
    predicted: float
    observed: float


def sigmoid(logit: float) -> float:
    """``1 / (1 + e^(−x))``, without overflow."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1.0 + math.exp(logit))


def logit(probability: float) -> float:
    """``log(p / (1 − p))``, at most ±``MAX_LOGIT``: a probability that was rounded to 0 or 1 is no certainty."""
    if not 0.0 < probability < 1.0:
        return math.copysign(MAX_LOGIT, probability - 0.5)
    return max(-MAX_LOGIT, min(MAX_LOGIT, math.log(probability) - math.log1p(-probability)))


def reliability_bins(
    probabilities: Sequence[float], outcomes: Sequence[float], *, num_bins: int = NUM_BINS, start: float = 0.0
) -> list[Bin]:
    """Equal-width bins between ``start`` and 1, those without a prediction left out; a bin holds its lower edge."""
    members: list[list[tuple[float, float]]] = [[] for _ in range(num_bins)]
    width = (1.0 - start) / num_bins
    for p, outcome in zip(probabilities, outcomes, strict=True):
        assert start <= p <= 1.0, f"{p} is no probability from {start} to 1"
        members[min(int((p - start) / width), num_bins - 1)].append((p, outcome))
    return [
        Bin(
            low=start + index * width,
            high=start + (index + 1) * width,
            n=len(pairs),
            predicted=statistics.fmean(p for p, _ in pairs),
            observed=statistics.fmean(outcome for _, outcome in pairs),
        )
        for index, pairs in enumerate(members)
        if pairs
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: ``Σ n_b/n · |observed − predicted|`` (Naeini et al. 2015; Guo et al. 2017, eq. 3).

    Raises:
        ValueError: no prediction.
    """
    total = sum(b.n for b in bins)
    if not total:
        raise ValueError("no prediction to calibrate")
    return sum(b.n * abs(b.observed - b.predicted) for b in bins) / total


def brier_score(probabilities: Sequence[float], outcomes: Sequence[float]) -> float:
    """Mean of ``(p − outcome)²`` (Brier 1950, over one of the two classes): 0.25 for always saying one half."""
    return statistics.fmean((p - outcome) ** 2 for p, outcome in zip(probabilities, outcomes, strict=True))


def log_loss(logits: Sequence[float], outcomes: Sequence[float], temperature: float = 1.0) -> float:
    """Mean of ``−z log σ(x/T) − (1 − z) log σ(−x/T)`` in nats: 0.693 for always saying one half."""
    scaled = [logit / temperature for logit in logits]
    return statistics.fmean(z * _softplus(-x) + (1.0 - z) * _softplus(x) for x, z in zip(scaled, outcomes, strict=True))


def fit_temperature(logits: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """The T > 0 with the least log loss of ``σ(x / T)`` (Guo et al. 2017, section 4.2): above 1, x is overconfident.

    The loss is convex in 1/T; its derivative's zero is found by bisection. None where there is no such T:
    scores that say nothing (or the opposite), or that make no mistake at all. Fitted and judged on the same
    data it is a diagnosis, not a promise.
    """

    def slope(sharpness: float) -> float:
        return math.fsum(x * (sigmoid(sharpness * x) - z) for x, z in zip(logits, outcomes, strict=True))

    low, high = 1.0 / MAX_SHARPNESS, MAX_SHARPNESS
    if slope(low) >= 0.0 or slope(high) <= 0.0:
        return None
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return 1.0 / low


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
