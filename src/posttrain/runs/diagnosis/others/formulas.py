"""Group advantage formulas in other trainers.

TRL: reward minus group mean, divided by the group's standard deviation (unbiased, + 1e-4), by the batch's, or
unscaled. NeMo RL: reward minus the leave-one-out or full group mean, divided by the matching standard deviation (+
1e-6), or unscaled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

MOST_COLUMNS = 64
Groups = Sequence[Sequence[float]]
OfRewards = Callable[[Groups], list[list[float]]]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float], lost: int) -> float:
    if len(values) <= lost:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - lost))


def _centred(group: Sequence[float]) -> list[float]:
    mean = _mean(group)
    return [x - mean for x in group]


def _less_others(group: Sequence[float]) -> list[float]:
    total = math.fsum(group)
    return [x - (total - x) / (len(group) - 1) for x in group]


def _raw(groups: Groups) -> list[list[float]]:
    return [list(group) for group in groups]


def _of_each(centre: Callable[[Sequence[float]], list[float]]) -> OfRewards:
    return lambda groups: [centre(group) for group in groups]


def _over_own(lost: int, epsilon: float) -> OfRewards:
    """Center by the group mean, and divide by the group's standard deviation."""

    def scaled(group: Sequence[float]) -> list[float]:
        spread = _spread(group, lost) + epsilon
        return [x / spread for x in _centred(group)]

    return _of_each(scaled)


def _over_others(lost: int) -> OfRewards:
    """Center by the leave-one-out mean, and divide by the leave-one-out standard deviation unless 0."""

    def scaled(group: Sequence[float]) -> list[float]:
        values = _less_others(group)
        for place, spread in enumerate(_spreads_of_others(group, lost)):
            if spread > 0:
                values[place] /= spread + 1e-6
        return values

    return lambda groups: [scaled(group) for group in groups]


def _spreads_of_others(group: Sequence[float], lost: int) -> list[float]:
    """Compute each leave-one-out standard deviation, exactly 0 if all others are equal, in linear time.

    With y centered by the group's mean, ``Σ_{j≠i} (y_j − mean)² = Σ y² − y_i² − y_i² / (G − 1)``.
    """
    others = len(group) - 1
    if others <= lost:
        return [0.0] * len(group)
    centred = _centred(group)
    squares = math.fsum(y * y for y in centred)
    counts = Counter(group)
    spreads = []
    for x, y in zip(group, centred, strict=True):
        are_equal = len(counts) == 1 or (len(counts) == 2 and counts[x] == 1)
        variance = 0.0
        if not are_equal:
            variance = max(0.0, squares - y * y - y * y / others) / (others - lost)
        spreads.append(math.sqrt(variance))
    return spreads


def _over_batch(groups: Groups) -> list[list[float]]:
    spread = _spread([x for group in groups for x in group], 1) + 1e-4
    return [[x / spread for x in _centred(group)] for group in groups]


FORMULAS: dict[str, OfRewards] = {
    "minus group mean, divided by group standard deviation": _over_own(1, 1e-4),
    "minus group mean": _of_each(_centred),
    "minus group mean, divided by batch standard deviation": _over_batch,
    "minus group mean, divided by group standard deviation + 1e-6": _over_own(1, 1e-6),
    "minus group mean, divided by biased group standard deviation": _over_own(0, 1e-6),
    "minus leave-one-out mean": _of_each(_less_others),
    "minus leave-one-out mean, divided by leave-one-out standard deviation": _over_others(1),
    "minus leave-one-out mean, divided by biased leave-one-out standard deviation": _over_others(0),
    "unchanged": _raw,
}


def fitted_weights(columns: Sequence[Groups], advantages: Groups) -> list[list[float]]:
    """Fit weights for K reward columns so that advantages match centered weighted sums, up to a scale per group.

    Let D be the centered rewards of a group and A its advantages. If ``D w = t A``, then D w has no component
    orthogonal to A. The best w is the last singular vector of the orthogonal components, stacked over groups. Its
    length is undetermined, so two scalings are tried: largest weight 1, and median t equal to 1. Empty if there is
    nothing to fit, or more than ``MOST_COLUMNS`` columns.
    """
    import torch

    if len(columns) > MOST_COLUMNS:
        return []

    parts, along = [], []
    for place, group in enumerate(advantages):
        target = torch.tensor(list(group), dtype=torch.float64)
        size = float(target.square().sum())
        if size == 0.0:
            continue
        differences = torch.tensor([_centred(column[place]) for column in columns], dtype=torch.float64).T
        shares = target @ differences / size
        parts.append(differences - target[:, None] * shares)
        along.append(shares)
    if not parts:
        return []
    stacked = torch.cat(parts)
    stacked = torch.cat([stacked, torch.zeros(len(columns), len(columns), dtype=torch.float64)])  # at least K rows
    weights = torch.linalg.svd(stacked, full_matrices=False).Vh[-1]
    scales = torch.stack(along) @ weights
    scale = float(scales.median())
    if scale == 0.0:
        return []
    largest = math.copysign(float(weights.abs().max()), scale)
    return [[float(x) / size for x in weights] for size in (largest, scale)]
