"""AdamW once more, whole tensors in float64, from its formulas (Loshchilov & Hutter 2019).

The gradient that an update used is in the moments behind it: ``g = (m' − β1 m) / (1 − β1)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The settings of one tensor: ``lr`` with the tensor's multiple, ``decay`` of its weights, β1 and β2, ε."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Adam's state of one tensor, float64 of its shape; ``count``: updates so far."""

    first: Tensor
    second: Tensor
    count: float

    @classmethod
    def none(cls, like: Tensor) -> Moments:
        """Return the state before the first update."""
        zeros = torch.zeros(like.shape, dtype=torch.float64)
        return cls(zeros, zeros.clone(), 0.0)


def read_moments(stored: Mapping[str, Tensor], name: str) -> Moments | None:
    """Return the state of the tensor ``name`` from ``optimizer.safetensors``; None where it has none.

    Raises:
        KeyError: a part of the state is missing.
    """
    if f"{name}.exp_avg" not in stored:
        return None
    first, second = (stored[f"{name}.{key}"].double() for key in ("exp_avg", "exp_avg_sq"))
    return Moments(first, second, float(stored[f"{name}.step"]))


def next_moments(before: Moments, gradient: Tensor, settings: AdamSettings) -> Moments:
    """Return ``m' = β1 m + (1 − β1) g`` and ``v' = β2 v + (1 − β2) g²``."""
    one, two = settings.betas
    first = one * before.first + (1.0 - one) * gradient
    second = two * before.second + (1.0 - two) * gradient * gradient
    return Moments(first, second, before.count + 1.0)


def next_weights(weights: Tensor, after: Moments, settings: AdamSettings) -> Tensor:
    """Return ``w − lr (decay w + m̂ / (√v̂ + ε))`` with ``m̂ = m' / (1 − β1^t)`` and ``v̂ = v' / (1 − β2^t)``."""
    one, two = settings.betas
    mean = after.first / (1.0 - one**after.count)
    spread = (after.second / (1.0 - two**after.count)).sqrt()
    return weights - settings.lr * (settings.decay * weights + mean / (spread + settings.eps))


def gradient_behind(before: Moments, after: Moments, settings: AdamSettings) -> Tensor:
    """Return the gradient that led from one state to the next."""
    one = settings.betas[0]
    return (after.first - one * before.first) / (1.0 - one)


def ratio_of(patterns: Mapping[str, float], name: str) -> float:
    """Return the multiple of the learning rate that the first pattern gives which fits a name; 0 freezes a tensor."""
    for pattern, ratio in patterns.items():
        if fnmatchcase(name, pattern):
            return ratio
    return 1.0
