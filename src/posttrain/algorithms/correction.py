"""Corrections for sampler-trainer mismatch: importance weights. Pure.

With identical weights, the sampling engine (μ) and the trainer (π_old) still assign different probabilities:
different kernels, precision, or older weights. Corrections take ``log_ratio = log π_old(a_t) − log μ(a_t)`` and the
mask, both ``[B, T]``, and return weights ``[B, T]`` that multiply any token objective: detached, nonnegative, and 1
where the mask is False. Log-ratios are clamped to ±20 per token and per sum before exponentiating. NaN stays NaN and
is refused by the training loop.

Weight 0 drops a token or row, but keeps it in the aggregation's denominator. Weights multiply everything the objective
computes for a token: with PPO also its value loss, with regularizers also KL and entropy bonus.
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

    Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training". The published text
    leaves C open; verl and TRL's recipe default to 2. Low variance but biased: states still follow the sampler's
    distribution.

    Args:
        cap: C.
    """
    return _token_ratio(log_ratio, mask).clamp(max=cap)


@register("correction")
def sequence_tis(log_ratio: Tokens, mask: Mask, *, cap: Annotated[Positive, IF_SAMPLER_REACHES_CAP] = 2.0) -> Tokens:
    """Truncated importance sampling per sequence: ``w = min(Π_t π_old(a_t) / μ(a_t), C)`` at every token.

    Liu et al. (2025), "When speed kills stability"; verl's "Seq-TIS", whose default C is 2. Unbiased without cap, but
    variance grows with length, and long sequences end up at 0 or at the cap.

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
    """Token ratio if within [α, β], else 0: ``w_t = k · 1[α ≤ k ≤ β]``, k = π_old / μ.

    IcePop (Ling Team 2025, "Every step evolves", the Ring-1T report). Default range follows public reimplementations
    (0.5 and 5.0); accepted tokens keep their ratio.

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
    """Drop rows that are unlikely under the trainer: 1 if ``low ≤ exp(mean_t log ratio) ≤ high``, else 0.

    A geometric mean of token ratios is independent of length, so long answers are not penalized. Liu et al. (2025),
    "When speed kills stability", part 3; verl's "Geo-RS". Default range follows verl's example scripts; its presets
    use 0.999 to 1.001.

    Args:
        low, high: accepted range for the geometric mean. Sampled tokens are likelier under the sampler, so this mean
            is usually below 1: the lower bound matters.
        weigh: additional weight for accepted rows: none, ``token_tis`` or ``sequence_tis``.
        cap: C for these.
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
    """Log-ratio at trained tokens, clamped to ±20; 0 elsewhere."""
    detached = log_ratio.detach()
    return primitives.log_ratio(detached, torch.zeros_like(detached), mask)


def _token_ratio(log_ratio: Tokens, mask: Mask) -> Tokens:
    return _clamped(log_ratio, mask).exp()  # exp(0) = 1 outside of the mask


def _sequence_ratio(log_ratio: Tokens, mask: Mask) -> Tokens:
    total = primitives.row_sum(_clamped(log_ratio, mask), mask)
    ratio = total.clamp(-primitives.MAX_LOG_RATIO, primitives.MAX_LOG_RATIO).exp()[:, None]
    return torch.where(mask, ratio, torch.ones_like(ratio))
