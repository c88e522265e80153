"""Building blocks for objectives: log-ratios, KL estimators, clipping. Pure, per token.

Shapes: B rows, T tokens. Nothing here reduces over tokens or rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.signatures import Float

# exp(20) ≈ 5e8: larger ratios are numerical accidents; only the sign matters
MAX_LOG_RATIO = 20.0

Tokens = Float[Tensor, "B T"]


def log_ratio(logprobs: Tokens, old_logprobs: Tokens, mask: Tensor) -> Tokens:
    """Compute ``log π(a) − log μ(a)`` at trained tokens, clamped to ±20; 0 elsewhere.

    Behavior log-probabilities of −inf (tokens the behavior policy cannot sample) would give infinite ratios. Clamping
    keeps values and gradients finite. NaN is passed on for the loop to reject; replacing it would silently skip the
    token.
    """
    difference = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    return difference.nan_to_num(nan=math.nan, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def is_clamped(logprobs: Tokens, old_logprobs: Tokens, mask: Tensor) -> Float[Tensor, "B T"]:
    """Mark trained tokens with clamped log-ratios (see ``log_ratio``) by 1, others by 0."""
    return (mask & ((logprobs - old_logprobs).abs() > MAX_LOG_RATIO)).to(logprobs.dtype)


def row_sum(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """Sum each row over its trained tokens, ignoring other positions even if NaN."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1)


def row_mean(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """Average each row over its trained tokens; 0 for rows without any, which have no weight either."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def kl_k1(log_ratio_to_reference: Tokens) -> Tokens:
    """k1 = r with r = log π − log π_ref, samples from π: unbiased for KL(π‖π_ref), can be negative.

    Schulman (2020), "Approximating KL divergence".
    """
    return log_ratio_to_reference


def kl_k2(log_ratio_to_reference: Tokens) -> Tokens:
    """k2 = r²/2 with r = log π − log π_ref: biased, low variance; its gradient equals the KL gradient.

    Schulman (2020), "Approximating KL divergence".
    """
    return 0.5 * log_ratio_to_reference.square()


def kl_k3(log_ratio_to_reference: Tokens) -> Tokens:
    """k3 = e^(−r) − 1 + r with r = log π − log π_ref: unbiased for KL(π‖π_ref), never negative.

    Schulman (2020), "Approximating KL divergence"; used in DeepSeekMath (2024), eq. 4.
    """
    return torch.expm1(-log_ratio_to_reference) + log_ratio_to_reference


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def row_last(values: Tokens, mask: Tensor) -> Float[Tensor, " B"]:
    """Pick each row's value at its last trained token; NaN for rows without any."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, torch.full_like(positions, -1)).amax(dim=1)
    picked = values.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(last >= 0, picked, torch.full_like(picked, math.nan))


def nan_unless_finite(values: Tensor) -> Tensor:
    """Replace infinities with NaN, which the loop rejects.

    Bounded or one-sided losses map infinite rewards to finite values, so broken rows (zero probability, overflow) would
    look like rows with nothing left to learn.
    """
    return torch.where(values.isfinite(), values, torch.full_like(values, math.nan))


# Relative rounding between log-probabilities of one answer from two forward passes is smaller.
TIE = 1e-6


def wins(margin: Tensor, size: Tensor | None = None) -> Tensor:
    """Map positive margins to 1, negative margins to 0, ties to 1/2, and NaN to NaN. Detached.

    ``size``: magnitude of the terms whose difference is the margin, in equal units. Margins below a millionth of it are
    rounding and count as ties, so that a policy equal to its reference scores one half.
    """
    margin = margin.detach()
    tie = torch.zeros_like(margin, dtype=torch.bool) if size is None else margin.abs() <= TIE * size.detach()
    return torch.where(margin.isnan(), margin, 0.5 + 0.5 * margin.masked_fill(tie, 0.0).sign())


# Upper bound on log1mexp's argument: log-probabilities closer to 0 are rounding (1 − p ≈ 1e-6).
MAX_LOGPROB = -1e-6


def log1mexp(x: Tensor) -> Tensor:
    """Compute ``log(1 − e^x)`` for x < 0, the log-probability of the complement. x is clamped to at most −1e-6.

    Mächler (2012), "Accurately computing log(1 − exp(−|a|))": expm1 near 0, log1p elsewhere. Clamping also keeps the
    unused branch finite, and hence its gradient, in fp32 too.
    """
    x = x.clamp(max=MAX_LOGPROB)
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x))
    return torch.where(x > -math.log(2.0), near, far)


def categorical_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute ``Σ_k p (log p − log q)`` from log-probabilities, ``[B, T, K]`` → ``[B, T]``."""
    return (p.exp() * (p - q)).sum(dim=-1)


def with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, ``[B, T, K]`` → ``[B, T, K + 1]``.

    Computes ``log(1 − Σ)`` as ``log(−expm1(log Σ))``. If candidates cover the whole vocabulary, the rest is 0 up to
    rounding of either sign. It is then a constant, the machine epsilon, which contributes nothing and has no gradient.
    """
    smallest = torch.finfo(logprobs.dtype).eps
    total = logprobs.logsumexp(dim=-1, keepdim=True).clamp(max=-smallest)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], dim=-1)
