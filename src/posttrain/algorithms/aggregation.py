"""Aggregations: weights for summing the loss over a whole optimizer batch. Pure.

Loss = ``(values * weights).sum()``; nothing else divides. Aggregations see the mask for the entire optimizer batch
before it is split into micro-batches, so splitting cannot change gradients.

mask ``bool [B, T]`` → weights ``float64 [B, T]``, 0 outside the mask (``unit_mean``: ``[U]``). Fully masked rows get
no weight and do not count; sources refuse and count such rows earlier, so nothing is hidden.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from posttrain.registry import register
from posttrain.signatures import Bool, Float64, Range

Mask = Bool[Tensor, "B T"]
Weights = Float64[Tensor, "B T"]
UnitWeights = Float64[Tensor, " U"]


def _check(mask: Mask) -> Tensor:
    counts = mask.sum(dim=1).to(torch.float64)
    if not bool(mask.any()):
        raise ValueError("an aggregation over a batch without trained tokens has no value")
    return counts


@register("aggregation", level="token")
def token_mean(mask: Mask) -> Weights:
    """``1 / (all trained tokens of the optimizer batch)``: SFT; DAPO (Yu et al. 2025, eq. 8)."""
    return mask.to(torch.float64) / _check(mask).sum()


@register("aggregation", level="token")
def sequence_mean(mask: Mask) -> Weights:
    """``1 / (B · |o_i|)``: mean over each sequence, then over sequences.

    GRPO as published (Shao et al. 2024, arXiv 2402.03300, eq. 3). Short wrong answers weigh more per token than long
    ones: the length bias that ``constant`` and ``token_mean`` avoid.

    What goes wrong: Long wrong answers cost less per token. ``constant`` and ``token_mean`` avoid this.
    """
    counts = _check(mask)
    return mask.to(torch.float64) / (counts.clamp(min=1)[:, None] * (counts > 0).sum())


@register("aggregation", level="token")
def constant(mask: Mask, *, length: Annotated[int, Range(ge=1)]) -> Weights:
    """``1 / (B · L)`` with a constant length L: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2).

    What goes wrong: L scales the gradient. If you change ``rollout.max_tokens`` without adjusting L, the effective
    learning rate changes.

    Args:
        length: L in tokens, usually the generation limit.
    """
    return mask.to(torch.float64) / ((_check(mask) > 0).sum() * length)


@register("aggregation", level="unit")
def unit_mean(mask: Mask) -> UnitWeights:
    """``1 / U`` per unit: pairs or rows, for objectives returning one value per unit.

    ``mask`` has one row per unit; each unit has at least one trained token.
    """
    counts = _check(mask)
    if not bool((counts > 0).all()):
        raise ValueError("unit_mean over a unit without trained tokens has no value")
    return torch.full((mask.shape[0],), 1.0 / mask.shape[0], dtype=torch.float64)
