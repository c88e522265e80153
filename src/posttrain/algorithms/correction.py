"""Corrections for a sampler that is not the trainer: weights from their probabilities. Pure.

The engine that drew the tokens (μ) and the trainer that learns from them (π_old) give the same weights
other probabilities: other kernels, other precision, older weights. Each correction takes
``log_ratio = log π_old(a_t) − log μ(a_t)`` and the mask, both ``[B, T]``, and returns weights ``[B, T]``
that multiply the values of any token objective: detached, 0 or more, and 1 where the mask is False.
Log-ratios are clamped to ±20 per token and per sum before the exponential; NaN stays NaN, and the loop
refuses it.

A weight of 0 drops a token or a row, but it stays in the denominator of the aggregation. The weight multiplies all that
the objective says about a token: with PPO its value loss, with regularizers the KL and the entropy bonus, too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.acting.methods import IF_SAMPLER_DIFFERS, IF_SAMPLER_IS_WEIGHED, IF_SAMPLER_REACHES_CAP
from posttrain.algorithms.objectives import primitives
from posttrain.algorithms.objectives.surrogate import Positive
from posttrain.registry import register
from posttrain.signatures import Bool, Float, Range

Tokens = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]


@register("correction")
def token_tis(log_ratio: Tokens, mask: Mask, *, cap: Annotated[Positive, IF_SAMPLER_REACHES_CAP] = 2.0) -> Tokens:
    """Truncated importance sampling per token: ``w_t = min(π_old(a_t) / μ(a_t), C)``.

    Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training". The
    published text leaves C open; 2 is the default of verl and of TRL's recipe. Low variance, but
    biased: the states are still the sampler's.

    Args:
        cap: C.
    """
    return _token_ratio(log_ratio, mask).clamp(max=cap)


@register("correction")
def sequence_tis(log_ratio: Tokens, mask: Mask, *, cap: Annotated[Positive, IF_SAMPLER_REACHES_CAP] = 2.0) -> Tokens:
    """Truncated importance sampling per sequence: ``w = min(Π_t π_old(a_t) / μ(a_t), C)`` at every token.

    Liu et al. (2025), "When speed kills stability"; verl's "Seq-TIS", whose default C is 2. Unbiased
    without the cap, but the variance grows with the length, and long sequences fall to 0 or to the cap.

    Args:
        cap: C.
    """
    return _sequence_ratio(log_ratio, mask).clamp(max=cap)


@register("correction")
def icepop(
    log_ratio: Tokens,
    mask: Mask,
    *,
    low: Annotated[float, Range(ge=0), IF_SAMPLER_DIFFERS] = 0.5,
    high: Annotated[Positive, IF_SAMPLER_DIFFERS] = 5.0,
) -> Tokens:
    """The token's ratio where it lies in [α, β], else 0: ``w_t = k · 1[α ≤ k ≤ β]``, k = π_old / μ.

    IcePop (Ling Team 2025, "Every step evolves"; the Ring-1T report). The range is the one in use in
    public reimplementations (0.5 and 5.0); the accepted tokens keep their ratio.

    Args:
        low, high: α and β.
    """
    ratio = _token_ratio(log_ratio, mask)
    refused = mask & ((ratio < low) | (ratio > high))  # so written, NaN is not refused but stays
    return torch.where(refused, torch.zeros_like(ratio), ratio)


@register("correction")
def geometric_mask(
    log_ratio: Tokens,
    mask: Mask,
    *,
    low: Annotated[float, Range(ge=0), IF_SAMPLER_DIFFERS] = 0.99,
    high: Annotated[Positive, IF_SAMPLER_DIFFERS] = 1.001,
    weigh: Annotated[Literal["none", "token", "sequence"], IF_SAMPLER_IS_WEIGHED] = "none",
    cap: Annotated[Positive, IF_SAMPLER_REACHES_CAP] = 2.0,
) -> Tokens:
    """Drops rows that are unlikely under the trainer: 1 where ``low ≤ exp(mean_t log ratio) ≤ high``, else 0.

    The geometric mean of the token ratios does not depend on the length, so that long answers are not
    dropped for being long. Liu et al. (2025), "When speed kills stability", part 3; verl's "Geo-RS". The
    range is that of verl's example scripts; its presets have 0.999 to 1.001.

    Args:
        low, high: the accepted range of the geometric mean. The sampler's own tokens are likelier under
            the sampler, so the mean lies below 1: the lower bound is the one that acts.
        weigh: what the accepted rows are weighed by: nothing, ``token_tis`` or ``sequence_tis``.
        cap: C of these.
    """
    mean = primitives.row_mean(_clamped(log_ratio, mask), mask).exp()[:, None]
    weights = torch.ones_like(log_ratio)
    if weigh == "token":
        weights = _token_ratio(log_ratio, mask).clamp(max=cap)
    elif weigh == "sequence":
        weights = _sequence_ratio(log_ratio, mask).clamp(max=cap)
    refused = mask & ((mean < low) | (mean > high))
    kept = torch.where(mask & mean.isnan(), mean, weights)  # NaN stays NaN
    return torch.where(refused, torch.zeros_like(kept), kept).detach()


def _clamped(log_ratio: Tokens, mask: Mask) -> Tokens:
    """The log-ratio at trained tokens, within ±20; 0 elsewhere."""
    detached = log_ratio.detach()
    return primitives.log_ratio(detached, torch.zeros_like(detached), mask)


def _token_ratio(log_ratio: Tokens, mask: Mask) -> Tokens:
    return _clamped(log_ratio, mask).exp()  # exp(0) = 1 outside of the mask


def _sequence_ratio(log_ratio: Tokens, mask: Mask) -> Tokens:
    total = primitives.row_sum(_clamped(log_ratio, mask), mask)
    ratio = total.clamp(-primitives.MAX_LOG_RATIO, primitives.MAX_LOG_RATIO).exp()[:, None]
    return torch.where(mask, ratio, torch.ones_like(ratio))
