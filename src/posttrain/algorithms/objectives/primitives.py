"""The pieces that objectives are made of: log-ratios, KL estimators, clipping. Pure, per token.

Shapes: B rows, T tokens. Nothing here reduces over tokens or rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.signatures import Float

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


def is_clamped(logprobs: Tokens, old_logprobs: Tokens, mask: Tensor) -> Float[Tensor, "B T"]:
    """1 at trained tokens whose log-ratio ``log_ratio`` clamps, 0 elsewhere."""
    return (mask & ((logprobs - old_logprobs).abs() > MAX_LOG_RATIO)).to(logprobs.dtype)


def row_sum(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """The sum of each row over its trained tokens; what lies elsewhere (NaN too) does not count."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1)


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


def row_last(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """The value at the last trained token of each row; NaN for a row without any."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, torch.full_like(positions, -1)).amax(dim=1)
    picked = values.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(last >= 0, picked, torch.full_like(picked, math.nan))


def nan_unless_finite(values: Tensor) -> Tensor:
    """Return the values with NaN, which the loop refuses, in place of infinity.

    A bounded or one-sided loss of an infinite reward is finite, so that a broken row (a token of
    probability 0, an overflow) would pass as a row that has nothing left to learn.
    """
    return torch.where(values.isfinite(), values, torch.full_like(values, math.nan))


# Log-probabilities of one answer from two forward passes differ by rounding, relative to their size, by less.
TIE = 1e-6


def wins(margin: Tensor, size: Tensor | None = None) -> Tensor:
    """1 where the margin is positive, 0 where it is negative, 1/2 at a tie; NaN stays NaN. Detached.

    ``size``: that of the numbers whose difference the margin is, in its unit. A margin below a millionth of it is
    rounding and counts as a tie, so that a policy that is its own reference is right half the time.
    """
    margin = margin.detach()
    tie = torch.zeros_like(margin, dtype=torch.bool) if size is None else margin.abs() <= TIE * size.detach()
    return torch.where(margin.isnan(), margin, 0.5 + 0.5 * margin.masked_fill(tie, 0.0).sign())


# The largest argument of log1mexp: a log-probability closer to 0 than this is rounding (1 − p ≈ 1e-6).
MAX_LOGPROB = -1e-6


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 − e^x)`` for x < 0: the log-probability of "not this"; x is clamped to at most −1e-6.

    Mächler (2012), "Accurately computing log(1 − exp(−|a|))": expm1 near 0, log1p far from it. The
    clamp keeps the branch that is not taken finite too (in fp32 as well), and with it the gradient.
    """
    x = x.clamp(max=MAX_LOGPROB)
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x))
    return torch.where(x > -math.log(2.0), near, far)


def categorical_kl(p: Tensor, q: Tensor) -> Tensor:
    """``Σ_k p (log p − log q)`` of log-probabilities ``[B, T, K]`` → ``[B, T]``."""
    return (p.exp() * (p - q)).sum(dim=-1)


def with_tail(logprobs: Tensor) -> Tensor:
    """``[B, T, K]`` → ``[B, T, K + 1]``: the last is the log-probability of any other token.

    ``log(1 − Σ)`` as ``log(−expm1(log Σ))``. Where the candidates are the whole vocabulary, the rest is 0
    up to rounding, of either sign: it is then set to the smallest that the precision can tell from 0, as
    a constant, so that it adds nothing and has no gradient.
    """
    smallest = torch.finfo(logprobs.dtype).eps
    total = logprobs.logsumexp(dim=-1, keepdim=True).clamp(max=-smallest)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], dim=-1)
