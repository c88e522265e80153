"""Advantages: per completion (relative to other samples of the same prompt), per turn, per token, or per reward part.
Pure.

Per completion: maps rewards from one optimizer batch, ``float64 [N, G]`` (N prompts, G samples each), to the same
shape.

Per turn (``level="turn"``): maps one group's rewards by turn, ``float64 [G, K]`` (up to K turns, KL penalty included),
and a mask of completed turns, ``bool [G, K]``, to ``[G, K]``.

Per token (``level="token"``): takes one optimizer batch in float64: rewards ``[B, T]`` (per token, KL penalty
included), mask ``bool [B, T]``, values ``[B, T]`` (of the state *before* each token) and final_values ``[B]`` (of the
state after the last trained token if the completion was truncated and unrewarded, else 0). Returns ``(advantages,
returns)``, both ``[B, T]`` and 0 outside the mask. Trained tokens may be non-contiguous: a time step leads from one
trained token to the next. Tokens in between, such as tool output, have no step, discount or reward.

Per part (``level="parts"``): maps unweighted reward parts ``float64 [B, K]`` (NaN if missing), weights ``[K]`` and
prompt numbers ``int64 [B]`` to ``[B]``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.acting.methods import IF_SEVERAL_PROMPTS, IF_SEVERAL_TURNS
from posttrain.registry import register
from posttrain.signatures import Bool, Float64, Range

Rewards = Float64[Tensor, "N G"]
Turns = Float64[Tensor, "G K"]
TurnMask = Bool[Tensor, "G K"]
Tokens = Float64[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
Rows = Float64[Tensor, " B"]
RewardParts = Float64[Tensor, "B K"]
PartWeights = Float64[Tensor, " K"]
Share = Annotated[float, Range(ge=0, le=1)]

WHITEN_EPSILON = 1e-8


@register("advantage", min_group=1)
def raw(rewards: Rewards) -> Rewards:
    """``A_i = r_i``: REINFORCE without a baseline (Williams 1992, "Simple statistical gradient-following").

    What goes wrong: All advantages are positive if all rewards are. Learning is slow and noisy. Use a baseline
    (``centered``, ``leave_one_out``).
    """
    return rewards.clone()


@register("advantage", min_group=2)
def centered(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean(r)`` over the group.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783, section 3.2): no division by
    standard deviation. Dr. GRPO also uses ``aggregate: constant``.

    What goes wrong: Groups with identical rewards give no gradient. Watch ``uniform_groups``; use larger groups or
    easier problems.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


@register("advantage", min_group=2)
def leave_one_out(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean of the other G − 1 rewards``, which equals ``G / (G − 1)`` × ``centered``.

    RLOO (Ahmadian et al. 2024, "Back to basics", arXiv 2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!").

    What goes wrong: Groups of one have no baseline and are refused. There is no importance ratio for multiple updates
    per batch; use ``grpo`` for those.
    """
    group = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (group / (group - 1))


@register("advantage", min_group=2)
def normalized(rewards: Rewards, *, epsilon: Annotated[float, Range(ge=0)] = 1e-4) -> Rewards:
    """``A_i = (r_i − mean(r)) / (std(r) + ε)`` over the group, std with ddof = 1.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). Groups with identical rewards get zeros. The paper
    specifies neither ε nor ddof; both follow common implementations.

    What goes wrong: In groups without a correct answer, small differences such as format are scaled up to full size.
    ``centered`` avoids this.

    Args:
        epsilon: ε, in reward units.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=1)
    # not `std > 0`: the mean of equal rewards may differ from them by rounding
    varies = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return torch.where(varies, centred / (std + epsilon), torch.zeros_like(centred))


@register("advantage", min_group=2, wants_positive=True, scale_free=True)
def mean_scaled(rewards: Rewards) -> Rewards:
    """``A_i = (r_i − mean(r)) / mean(r)`` over the group; 0 if no sample is rewarded.

    MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning", arXiv 2602.02710). For rewards in {0, 1}:
    mean score function over K correct samples out of G (eq. 9), minus its mean over all G as a control variate (eq.
    10). The weights ``1/K − 1/G`` and ``−1/G`` equal ``A_i / G`` here. Groups without correct samples are dropped
    (algorithm 1). With success probability p, the expected gradient is ``∇p · Σ_{k<G} (1 − p)^(k − 1)``, which
    approaches ``∇ log p`` as G grows. Rewards must not be negative.

    What goes wrong: Scaling assumes rewards of 0 and 1. Partial credit makes all groups weigh alike.

    Raises:
        ValueError: a negative reward.
    """
    if bool((rewards < 0).any()):
        raise ValueError("advantage mean_scaled divides by the mean reward and needs rewards that are not negative")
    mean = rewards.mean(dim=1, keepdim=True)
    return torch.where(
        mean > 0, (rewards - mean) / mean.clamp(min=torch.finfo(mean.dtype).tiny), torch.zeros_like(mean)
    )


@register("advantage", min_group=1, min_group_if={"center": {"group": 2}}, scale_free=True, spans_groups=True)
def batch_normalized(
    rewards: Rewards,
    *,
    center: Annotated[Literal["batch", "group"], IF_SEVERAL_PROMPTS] = "batch",
    epsilon: Annotated[float, Range(ge=0)] = 1e-8,
) -> Rewards:
    """``A_i = (r_i − baseline) / (std of all r − baseline in the batch + ε)``.

    REINFORCE++ (Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global normalization",
    arXiv 2501.03262): a single mean and standard deviation (ddof = 0) over the whole rollout batch. ``center: group``
    subtracts group means first (the paper's variant with baseline). The paper also subtracts a k1 penalty per token
    before normalizing; for that, use ``return_to_go`` with ``kl_in_reward``.

    NaN marks places without an answer, in groups of unequal size; they are 0 in the result.

    Args:
        center: what the baseline averages over.
        epsilon: ε, in reward units.
    """
    known = ~rewards.isnan()
    centred = rewards.clone()
    if center == "group":
        # not the difference: the mean of equal rewards may differ from them by rounding
        varies = rewards.nan_to_num(nan=-torch.inf).amax(dim=1) > rewards.nan_to_num(nan=torch.inf).amin(dim=1)
        centred = torch.where(varies[:, None], rewards - rewards.nanmean(dim=1, keepdim=True), 0.0)
    if not bool(known.any()) or bool(centred[known].amax() == centred[known].amin()):
        return torch.zeros_like(centred)
    centred = centred - centred[known].mean()
    std = centred[known].std(correction=0)
    return torch.where(known, centred / (std + epsilon), torch.zeros_like(centred))


@register("advantage", level="parts", min_group=2, scale_free=True)
def gdpo(
    parts: RewardParts, weights: PartWeights, group: Tensor, *, epsilon: Annotated[float, Range(ge=0)] = 1e-4
) -> Rows:
    """Normalize each reward part within its group, then whiten their weighted sum over the batch.

    ``A_{i,k} = (r_{i,k} − mean_k) / (std_k + ε)`` over the group, ``S_i = Σ_k w_k A_{i,k}``, and
    ``A_i = (S_i − mean(S)) / (std(S) + ε)`` over all answers in the batch.

    GDPO (Liu et al. 2026, "GDPO: group reward-decoupled normalization policy optimization", arXiv 2601.05242, section
    3). Summed rewards hide which parts were earned: ``normalized`` treats (1, 0) and (0, 1) alike. Both standard
    deviations use ddof = 1, and each answer counts once regardless of length.

    Missing parts (NaN) are excluded from group mean and std and add nothing to S. Answers without any part that has a
    weight get A = 0 and do not count in batch statistics. Parts that are constant within a group add exactly 0, and
    answers with S = 0 keep A = 0, since mean(S) is 0 up to rounding.

    What goes wrong: If a part varies only slightly within a group, the difference is scaled up to full size. Watch
    ``reward/NAME`` for each part; once others are learned, a low-weight part may dominate updates.

    Args:
        epsilon: ε, in units of a part and of S.
    """
    scores = torch.zeros_like(parts)
    for number in group.unique():
        rows = group == number
        scores[rows] = _normalized_columns(parts[rows], epsilon)
    sums = (scores * weights).sum(dim=1)
    counted = (~parts.isnan() & (weights != 0)).any(dim=1)
    if int(counted.sum()) < 2:
        return torch.zeros_like(sums)
    scaled = (sums - sums[counted].mean()) / (sums[counted].std(correction=1) + epsilon)
    return torch.where(counted & (sums != 0), scaled, torch.zeros_like(sums))


def _normalized_columns(parts: RewardParts, epsilon: float) -> RewardParts:
    """Column-wise ``(r − mean) / (std + ε)`` over available values. 0 if missing or if all values are equal."""
    known = ~parts.isnan()
    counts = known.sum(dim=0)
    centred = parts - parts.nanmean(dim=0)
    squares = torch.where(known, centred.square(), torch.zeros_like(parts)).sum(dim=0)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    highest = torch.where(known, parts, torch.full_like(parts, -torch.inf)).amax(dim=0)
    lowest = torch.where(known, parts, torch.full_like(parts, torch.inf)).amin(dim=0)
    return torch.where(known & (highest > lowest), centred / (std + epsilon), torch.zeros_like(parts))


@register("advantage", level="turn", min_group=2)
def turn_normalized(
    rewards: Turns,
    taken: TurnMask,
    *,
    gamma: Annotated[Share, IF_SEVERAL_TURNS] = 1.0,
    epsilon: Annotated[float, Range(ge=0)] = 1e-4,
) -> Turns:
    """Return from a turn on, normalized over group members that reached this turn.

    ``R_{i,k} = Σ_{j ≥ k} γ^(j − k) r_{i,j}`` and ``A_{i,k} = (R_{i,k} − mean_k) / (std_k + ε)``, with mean and std
    (ddof = 1) over completions i that have a turn k; 0 if only one does, or all returns are equal. Turns get no
    credit for earlier rewards, as in GRPO with process supervision (Shao et al. 2024, section 4.1.3), which
    normalizes rewards before summing. Here returns are normalized instead, as for steps sharing an anchor state in
    GiGPO (Feng et al. 2025, "Group-in-group policy optimization for LLM agent training", arXiv 2505.10978), with turn
    numbers as states. With a single turn this equals ``normalized``.

    Args:
        gamma: γ, per turn.
        epsilon: ε, in reward units.
    """
    advantages, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for k in range(rewards.shape[1] - 1, -1, -1):
        following = torch.where(taken[:, k], rewards[:, k] + gamma * following, following)
        if int(taken[:, k].sum()) > 1:
            advantages[taken[:, k], k] = normalized(following[taken[:, k]][None], epsilon=epsilon)[0]
    return advantages


@register("advantage", level="token", needs=("old_values",))
def gae(
    rewards: Tokens,
    mask: Mask,
    values: Tokens,
    final_values: Rows,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 0.95,
    whiten: bool = True,
    bootstrap: bool = False,
) -> tuple[Tokens, Tokens]:
    """Generalized advantage estimation: exponentially weighted sum of TD errors.

    ``δ_t = r_t + γ V_{t+1} − V_t`` and ``A_t = δ_t + γ λ A_{t+1}``; the return is ``A_t + V_t``, before whitening. V
    is 0 after the final token: scored answers are terminal, even if truncated.

    Schulman et al. (2016), "High-dimensional continuous control using generalized advantage estimation" (arXiv
    1506.02438), eq. 16; with finite horizon as in PPO (2017), eq. 11–12. λ = 1 gives return − V, λ = 0 the TD error.

    What goes wrong: An untrained critic produces noisy advantages. Watch ``value_explained_variance``; raise the
    head's learning rate (``head.lr_ratio``).

    Args:
        gamma: γ, per trained token.
        gae_lambda: λ.
        whiten: normalize advantages to mean 0 and standard deviation 1 over all trained tokens in the batch.
        bootstrap: replace a truncated answer's score with the critic's value of the state following it (KL penalties
            still apply). Use it for rewards that are meaningless when truncated. If every answer is truncated, only
            the critic judges answers.

    Raises:
        ValueError: a reward at an untrained token.
    """
    _check(rewards, mask)
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(final_values)
    next_values = final_values if bootstrap else following
    for t in range(rewards.shape[1] - 1, -1, -1):
        trained = mask[:, t]
        error = rewards[:, t] + gamma * next_values - values[:, t]
        current = error + gamma * gae_lambda * following
        advantages[:, t] = torch.where(trained, current, advantages[:, t])
        following = torch.where(trained, current, following)
        next_values = torch.where(trained, values[:, t], next_values)
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return (whitened(advantages, mask) if whiten else advantages), returns


@register("advantage", level="token")
def return_to_go(
    rewards: Tokens, mask: Mask, values: Tokens, final_values: Rows, *, gamma: Share = 1.0, whiten: bool = True
) -> tuple[Tokens, Tokens]:
    """Return from this token on: ``A_t = Σ_{i ≥ t} γ^(i − t) r_i``, without value function.

    REINFORCE++ (Hu et al. 2025) with γ = 1: reward minus β times k1 penalties from this token on (``kl_in_reward``),
    normalized over the whole batch. Truncated completions are not bootstrapped, since no value exists.

    Args:
        gamma: γ, per trained token.
        whiten: normalize advantages to mean 0 and standard deviation 1 over all trained tokens in the batch.

    Raises:
        ValueError: a reward at an untrained token.
    """
    zeros = torch.zeros_like(rewards)  # with zero values and λ = 1, gae sums rewards
    return gae(rewards, mask, zeros, torch.zeros_like(final_values), gamma=gamma, gae_lambda=1.0, whiten=whiten)


def whitened(values: Tokens, mask: Mask) -> Tokens:
    """``(x − mean) / (std + 1e-8)`` over all trained tokens in the batch, 0 elsewhere.

    Uses ddof = 0, so that the result has standard deviation 1. Constant inputs give exactly 0, even if their mean is
    rounded.
    """
    trained = values[mask]
    if trained.numel() == 0 or bool(trained.amax() - trained.amin() == 0):
        return torch.zeros_like(values)
    scaled = (values - trained.mean()) / (trained.std(correction=0) + WHITEN_EPSILON)
    return torch.where(mask, scaled, torch.zeros_like(values))


def _check(rewards: Tokens, mask: Mask) -> None:
    stray = (rewards != 0) & ~mask
    if bool(stray.any()):
        b, t = (int(i) for i in stray.nonzero()[0])
        raise ValueError(f"a reward is paid at row {b}, token {t}, which is not trained; pay it at a trained token")
