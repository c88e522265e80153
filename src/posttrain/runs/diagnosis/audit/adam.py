"""Reference AdamW on whole tensors in float64 (Loshchilov & Hutter 2019).

The gradient used by an update can be recovered from the moments after it: ``g = (m' − β1 m) / (1 − β1)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings per tensor: ``lr`` including the tensor's ratio, weight ``decay``, β1 and β2, ε."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Adam's state per tensor, float64 with the tensor's shape. ``count``: updates so far."""

    first: Tensor
    second: Tensor
    count: float

    @classmethod
    def none(cls, like: Tensor) -> Moments:
        """Create the initial state."""
        zeros = torch.zeros(like.shape, dtype=torch.float64)
        return cls(zeros, zeros.clone(), 0.0)


def read_moments(stored: Mapping[str, Tensor], name: str) -> Moments | None:
    """Read the state for the tensor ``name`` from ``optimizer.safetensors``; None if absent.

    Raises:
        KeyError: part of the state is missing.
    """
    if f"{name}.exp_avg" not in stored:
        return None
    first, second = (stored[f"{name}.{key}"].double() for key in ("exp_avg", "exp_avg_sq"))
    return Moments(first, second, float(stored[f"{name}.step"]))


def next_moments(before: Moments, gradient: Tensor, settings: AdamSettings) -> Moments:
    """Compute ``m' = β1 m + (1 − β1) g`` and ``v' = β2 v + (1 − β2) g²``."""
    one, two = settings.betas
    first = one * before.first + (1.0 - one) * gradient
    second = two * before.second + (1.0 - two) * gradient * gradient
    return Moments(first, second, before.count + 1.0)


def next_weights(weights: Tensor, after: Moments, settings: AdamSettings) -> Tensor:
    """Compute ``w − lr (decay w + m̂ / (√v̂ + ε))`` with ``m̂ = m' / (1 − β1^t)`` and ``v̂ = v' / (1 − β2^t)``."""
    one, two = settings.betas
    mean = after.first / (1.0 - one**after.count)
    spread = (after.second / (1.0 - two**after.count)).sqrt()
    return weights - settings.lr * (settings.decay * weights + mean / (spread + settings.eps))


def gradient_behind(before: Moments, after: Moments, settings: AdamSettings) -> Tensor:
    """Recover the gradient from two consecutive states."""
    one = settings.betas[0]
    return (after.first - one * before.first) / (1.0 - one)


def ratio_of(patterns: Mapping[str, float], name: str) -> float:
    """Look up the learning rate ratio: the first matching pattern, else 1. A ratio of 0 freezes a tensor."""
    for pattern, ratio in patterns.items():
        if fnmatchcase(name, pattern):
            return ratio
    return 1.0
