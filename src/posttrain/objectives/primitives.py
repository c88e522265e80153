"""The pieces that objectives are made of: log-ratios, KL estimators, clipping. Pure, per token.

Shapes: B rows, T tokens. Nothing here reduces over tokens or rows.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

# exp(20) ≈ 5e8: beyond it a ratio is a numerical accident and only its sign matters.
MAX_LOG_RATIO = 20.0

Tokens = Float[Tensor, "B T"]


def log_ratio(logprobs: Tokens, old_logprobs: Tokens, mask: Tensor) -> Tokens:
    """``log π(a) − log μ(a)`` at trained tokens, 0 elsewhere; clamped to ±20.

    A behaviour log-probability of −inf (a token that the behaviour policy could not have drawn)
    would give an infinite ratio; the clamp keeps value and gradient finite. NaN stays NaN: the loop
    refuses it, and hiding it here would train on nothing.
    """
    difference = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    return difference.nan_to_num(nan=math.nan, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def row_mean(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """The mean of each row over its trained tokens; 0 for a row without any (it has no weight either)."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def kl_k1(log_ratio_to_reference: Tokens) -> Tokens:
    """k1 = r with r = log π − log π_ref, samples from π: unbiased for KL(π‖π_ref), can be negative.

    Schulman (2020), "Approximating KL divergence".
    """
    return log_ratio_to_reference


def kl_k2(log_ratio_to_reference: Tokens) -> Tokens:
    """k2 = r²/2 with r = log π − log π_ref: biased, low variance; its gradient is that of the KL.

    Schulman (2020), "Approximating KL divergence".
    """
    return 0.5 * log_ratio_to_reference.square()


def kl_k3(log_ratio_to_reference: Tokens) -> Tokens:
    """k3 = e^(−r) − 1 + r with r = log π − log π_ref: unbiased for KL(π‖π_ref) and never negative.

    Schulman (2020), "Approximating KL divergence"; the form in DeepSeekMath (2024), eq. 4.
    """
    return torch.expm1(-log_ratio_to_reference) + log_ratio_to_reference


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
