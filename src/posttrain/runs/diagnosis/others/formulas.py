"""Advantages as other trainers compute them from the rewards of groups.

TRL: r − mean of the group, over its standard deviation (unbiased, + 1e-4), that of the batch, or as it is. NeMo RL: r −
mean of the others or of all, over the standard deviation of the same (+ 1e-6), or as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    """Centred by the group's mean, over its standard deviation."""
    return lambda groups: [[x / (_spread(group, lost) + epsilon) for x in _centred(group)] for group in groups]


def _over_others(lost: int) -> OfRewards:
    """Centred by the mean of the others, over their standard deviation, where that is not 0."""

    def scaled(group: Sequence[float]) -> list[float]:
        values = _less_others(group)
        for place in range(len(group)):
            spread = _spread([*group[:place], *group[place + 1 :]], lost)
            if spread > 0:
                values[place] /= spread + 1e-6
        return values

    return lambda groups: [scaled(group) for group in groups]


def _over_batch(groups: Groups) -> list[list[float]]:
    spread = _spread([x for group in groups for x in group], 1) + 1e-4
    return [[x / spread for x in _centred(group)] for group in groups]


FORMULAS: dict[str, OfRewards] = {
    "less the mean of the group, over its standard deviation": _over_own(1, 1e-4),
    "less the mean of the group": _of_each(_centred),
    "less the mean of the group, over the standard deviation of the batch": _over_batch,
    "less the mean of the group, over its standard deviation + 1e-6": _over_own(1, 1e-6),
    "less the mean of the group, over its standard deviation of N": _over_own(0, 1e-6),
    "less the mean of the others": _of_each(_less_others),
    "less the mean of the others, over their standard deviation": _over_others(1),
    "less the mean of the others, over their standard deviation of N": _over_others(0),
    "as they are": _raw,
}


def fitted_weights(columns: Sequence[Groups], advantages: Groups) -> list[list[float]]:
    """Return weights of K reward columns with which advantages are differences of their sum, up to a scale per group.

    With D the differences of a group's rewards from their means, ``D w = t A`` has no part of D w that is not along A.
    The vector w with the least of it is the last singular vector of these parts of all groups. Its length is not known:
    the largest weight is 1, or t is. Empty if there is nothing to fit. For a table that does not say its weights.
    """
    import torch

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
    weights = torch.linalg.svd(torch.cat(parts), full_matrices=True).Vh[-1]
    scales = torch.stack(along) @ weights
    scale = float(scales.median())
    if scale == 0.0:
        return []
    largest = math.copysign(float(weights.abs().max()), scale)
    return [[float(x) / size for x in weights] for size in (largest, scale)]
