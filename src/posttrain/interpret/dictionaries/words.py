"""The kinds of sparse dictionaries: how pre-activations become features, and what is paid for them.

A kind is a pure, differentiable function of the pre-activations; the matrix products around it, their gradients and
the loss are the same for every kind (``dictionary_loss``). The loss that all of them share, on inputs scaled to
E‖x‖ = √d and decoder rows of norm 1, is

    loss = mean over rows of [ mean over the d coordinates of (x − x̂)² + penalty ]

so a penalty is per row, and is weighed against a squared error that is *averaged* over d. That convention decides
what a coefficient means: an error that is summed over d wants one that is d times as large.

``needs_rank``: the features of a row compete for a place, so the losers have something to learn from (AuxK).
``architecture``: what the trained dictionary is called in SAELens's layout, which is also how it is used: ``standard``
relu(pre), ``jumprelu`` relu(pre)·(pre > threshold), ``topk`` the k largest of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from posttrain.registry import register

Rows = Float[Tensor, "n F"]

# Fewer rows do not tell where the threshold of a batch is.
MIN_SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Codes:
    """What a kind makes of a batch.

    ``features`` [n, F], none negative. ``penalty``: mean over the rows, differentiable; None where sparsity is by
    construction. ``threshold`` [F]: the new value of the running threshold; None where it stays or is a parameter.
    """

    features: Tensor
    penalty: Tensor | None = None
    threshold: Tensor | None = None


@register("dictionary", architecture="standard", needs_rank=False)
def l1(pre: Rows, threshold: Tensor, progress: float, *, coefficient: float = 3e-4, warmup: float = 0.05) -> Codes:
    """f = relu(pre), penalty = coefficient · Σⱼ fⱼ‖dⱼ‖ (Bricken et al. 2023; ‖dⱼ‖ = 1 here).

    The original recipe's 3e-4 belongs to an error averaged over d = 5120, as here; it equals 1.54 with a summed error.
    At another d, the same sparsity wants coefficient · d unchanged.

    Args:
        coefficient: of the sum of a row's features.
        warmup: the coefficient rises from 0 over this share of the training.
    """
    features = torch.relu(pre)
    scale = coefficient * min(1.0, progress / warmup if warmup else 1.0)
    return Codes(features, features.sum(dtype=torch.float32) * (scale / len(pre)))


@register("dictionary", architecture="topk", needs_rank=True)
def topk(pre: Rows, threshold: Tensor, progress: float, *, k: int = 32) -> Codes:
    """The k largest pre-activations of each row, where positive (Gao et al. 2024).

    Args:
        k: features per row.
    """
    return Codes(keep_largest(pre, k))


@register("dictionary", architecture="jumprelu", needs_rank=True)
def batchtopk(
    pre: Rows, threshold: Tensor, progress: float, *, k: float = 32, sample: float = 1 / 16, average: float = 0.05
) -> Codes:
    """The n·k largest positive pre-activations of a batch of n rows (Bussmann, Leask & Nanda 2024).

    The value that the last of them exceeds is found among a share of the rows, which are in random order: to select
    among all of them takes longer than the matrix products. Its running average is the threshold that the trained
    dictionary uses, where a row stands alone.

    Args:
        k: features per row, on average.
        sample: share of the rows in which the threshold is found, at least 256 rows; 1 for the exact selection.
        average: weight of a batch in the running average.
    """
    rows = pre.detach()[: max(MIN_SAMPLE_ROWS, math.ceil(len(pre) * sample))].reshape(-1)
    count = min(max(1, round(len(rows) * k / pre.shape[1])), len(rows) - 1)
    bound = rows.topk(count + 1, sorted=False).values.amin().clamp_min(0.0)  # the first that is not kept
    running = torch.where(threshold > 0, threshold.lerp(bound.to(threshold), average), bound.to(threshold))
    return Codes(keep_above(pre, bound), threshold=running)


@register("dictionary", architecture="jumprelu", needs_rank=False, learns_threshold=True)
def jumprelu(
    pre: Rows,
    threshold: Tensor,
    progress: float,
    *,
    coefficient: float = 0.1,
    target: float | None = 32.0,
    bandwidth: float = 0.1,
    initial_threshold: float = 0.1,
    warmup: float = 0.05,
) -> Codes:
    """f = pre · 1[pre > θ] with a learned θ per feature (Rajamanoharan et al. 2024).

    Penalty: coefficient · L0, or with a ``target`` coefficient · (L0/target − 1)² (their appendix), L0 the mean
    number of active features. The derivatives of the jump with respect to θ are estimated by a rectangular kernel:
    ∂f/∂θ ≈ −(θ/ε)·1[|pre − θ| < ε/2], ∂L0/∂θ ≈ −(1/ε)·1[|pre − θ| < ε/2].
    Departure: ε and the first θ are in units of pre-activations at E‖x‖ = √d (the paper has E‖x‖² = 1).

    Args:
        coefficient: of the penalty.
        target: the L0 that is aimed at; null for a penalty that grows with L0.
        bandwidth: ε.
        initial_threshold: θ at the beginning.
        warmup: the coefficient rises from 0 over this share of the training.
    """
    theta = threshold.to(pre.dtype)
    features: Tensor = _Jump.apply(pre, theta, bandwidth)
    active: Tensor = _Count.apply(pre, theta, bandwidth)
    amount = active if target is None else (active / target - 1).square()
    return Codes(features, amount * (coefficient * min(1.0, progress / warmup if warmup else 1.0)))


def keep_largest(pre: Rows, k: int) -> Tensor:
    """The k largest entries of each row where positive, zero elsewhere."""
    values, places = pre.topk(min(k, pre.shape[1]), dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))


def keep_above(pre: Rows, bound: Tensor) -> Tensor:
    """``pre`` where it exceeds the number ``bound`` >= 0, zero elsewhere: one pass, and one for its gradient."""
    return torch.nn.functional.threshold(pre, float(bound), 0.0)


class _Jump(torch.autograd.Function):
    """pre · 1[pre > θ] and its estimated derivative with respect to θ [F]."""

    @staticmethod
    def forward(ctx: FunctionCtx, pre: Tensor, theta: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, theta)
        ctx.bandwidth = bandwidth  # type: ignore[attr-defined]
        return pre * (pre > theta)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        pre, theta = ctx.saved_tensors
        near = (pre - theta).abs() < ctx.bandwidth / 2
        on_theta = (gradients[0] * near).sum(0, dtype=torch.float32) * (-theta.float() / ctx.bandwidth)
        return gradients[0] * (pre > theta), on_theta.to(theta.dtype), None


class _Count(torch.autograd.Function):
    """Mean number of entries above θ in a row, and its estimated derivative with respect to θ [F]."""

    @staticmethod
    def forward(ctx: FunctionCtx, pre: Tensor, theta: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, theta)
        ctx.bandwidth = bandwidth  # type: ignore[attr-defined]
        return (pre > theta).sum(dtype=torch.float32) / len(pre)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        pre, theta = ctx.saved_tensors
        near = ((pre - theta).abs() < ctx.bandwidth / 2).sum(0, dtype=torch.float32)
        return None, (near * (-gradients[0] / (ctx.bandwidth * len(pre)))).to(theta.dtype), None
