"""Advantages per completion, relative to the others of its prompt, per turn or per token. Pure.

Per completion: from rewards of one optimizer batch ``float64 [N, G]`` (N prompts, G samples each) to the same shape.

Per turn (``level="turn"``): from the rewards of one group by turn, ``float64 [G, K]`` (K turns at most; a KL penalty
included), with the mask ``bool [G, K]`` of turns that were taken, to ``[G, K]``.

Per token (``level="token"``): from one optimizer batch in float64: rewards ``[B, T]`` (at each token, a KL penalty
included), mask ``bool [B, T]``, values ``[B, T]`` (of the state *before* each token) and final_values ``[B]`` (of the
state after the last trained token where the completion was cut off and not rewarded, else 0). The result is
``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask. Trained tokens need not be contiguous: a step leads
from one trained token to the next of its row; tokens between (such as a tool's answer) have no step, discount or
reward.

Per part (``level="parts"``): from the unweighted parts of the rewards of one batch ``float64 [B, K]`` (NaN where a part
has no value), their weights ``[K]`` and the number of each answer's prompt ``int64 [B]``, to ``[B]``.
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

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783), section 3.2): no division by
    the standard deviation. The other half of Dr. GRPO is ``aggregate: constant``.

    What goes wrong: Groups in which all answers have the same reward give no gradient. Watch ``uniform_groups``;
    take larger groups or easier problems.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


@register("advantage", min_group=2)
def leave_one_out(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean of the other G − 1 rewards``, which is ``G / (G − 1)`` × ``centered``.

    RLOO (Ahmadian et al. 2024, "Back to basics" (arXiv 2402.14740); Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!").

    What goes wrong: A group of one has no others to compare with and is refused. With several updates a batch there
    is no importance ratio; use ``grpo`` for those.
    """
    group = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (group / (group - 1))


@register("advantage", min_group=2)
def normalized(rewards: Rewards, *, epsilon: Annotated[float, Range(ge=0)] = 1e-4) -> Rewards:
    """``A_i = (r_i − mean(r)) / (std(r) + ε)`` over the group, std with ddof = 1.

    GRPO (Shao et al. 2024, section 4.1.2). A group of equal rewards gets zeros. The paper leaves ε
    and the ddof open; both are as in the common implementations.

    What goes wrong: In groups without a correct answer small differences, such as format, are scaled up to full
    size. ``centered`` does not scale them.

    Args:
        epsilon: ε, in units of the reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=1)
    # not `std > 0`: the mean of equal rewards may differ from them in the last bit
    varies = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return torch.where(varies, centred / (std + epsilon), torch.zeros_like(centred))


@register("advantage", min_group=2, wants_positive=True, scale_free=True)
def mean_scaled(rewards: Rewards) -> Rewards:
    """``A_i = (r_i − mean(r)) / mean(r)`` over the group; 0 where no sample is rewarded.

    MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning", arXiv 2602.02710): for rewards in {0, 1}
    the mean of the score function over the K right samples of G (eq. 9), minus its mean over all G as
    a control variate (eq. 10): weights ``1/K − 1/G`` and ``−1/G``, which are ``A_i / G`` here. Where
    nothing was right both are dropped (algorithm 1). With success probability p the expected gradient
    is ``∇p · Σ_{k<G} (1 − p)^(k − 1)``, which approaches ``∇ log p`` as the group grows. Rewards must
    not be negative.

    What goes wrong: The scale is derived for rewards of 0 and 1. Partial credit makes every group weigh alike.

    Raises:
        ValueError: a negative reward.
    """
    if bool((rewards < 0).any()):
        raise ValueError("advantage mean_scaled divides by the mean reward and needs rewards that are not negative")
    mean = rewards.mean(dim=1, keepdim=True)
    return torch.where(
        mean > 0, (rewards - mean) / mean.clamp(min=torch.finfo(mean.dtype).tiny), torch.zeros_like(mean)
    )


@register("advantage", min_group=1, min_group_if={"center": {"group": 2}}, scale_free=True)
def batch_normalized(
    rewards: Rewards,
    *,
    center: Annotated[Literal["batch", "group"], IF_SEVERAL_PROMPTS] = "batch",
    epsilon: float = 1e-8,
) -> Rewards:
    """``A_i = (r_i − baseline) / (std of all r − baseline in the batch + ε)``.

    REINFORCE++ (Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global
    normalization", arXiv 2501.03262): one mean and one standard deviation (ddof = 0) over the whole rollout batch.
    ``center: group`` subtracts each group's mean first (the paper's variant with baseline). The paper
    subtracts a k1 penalty per token before normalizing; ``return_to_go`` with ``kl_in_reward`` does.

    Args:
        center: what the baseline is the mean of.
        epsilon: ε, in units of the reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True) if center == "group" else rewards.clone()
    centred = centred - centred.mean()
    std = centred.std(correction=0)
    return centred / (std + epsilon) if bool(std > 0) else torch.zeros_like(centred)


@register("advantage", level="parts", min_group=2, scale_free=True)
def gdpo(
    parts: RewardParts, weights: PartWeights, group: Tensor, *, epsilon: Annotated[float, Range(ge=0)] = 1e-4
) -> Rows:
    """Each part of the reward is normalized within its group, then their weighted sum over the whole batch.

    ``A_{i,k} = (r_{i,k} − mean_k) / (std_k + ε)`` over the group, ``S_i = Σ_k w_k A_{i,k}``, and
    ``A_i = (S_i − mean(S)) / (std(S) + ε)`` over the answers of the batch.

    GDPO (Liu et al. 2026, "GDPO: group reward-decoupled normalization policy optimization", arXiv 2601.05242, section
    3). The sum of rewards hides which of them an answer has: (1, 0) and (0, 1) are equal for ``normalized``. Both
    standard deviations have ddof = 1, and each answer counts once, whatever its length.

    Where a part has no value (NaN), the answer takes no part in its mean and std, and the part adds nothing to S. An
    answer without any value has A = 0 and does not count in the batch. Parts that are equal within a group add exactly
    0, and an answer with S = 0 keeps A = 0: the mean of S is 0 but for rounding.

    What goes wrong: In a group where a part differs by very little, the difference is scaled up to full size. Watch
    ``reward/NAME`` of each part; a part with a small weight may decide the update once the others are learned.

    Args:
        epsilon: ε, in units of a part and of S.
    """
    scores = torch.zeros_like(parts)
    for number in group.unique():
        rows = group == number
        scores[rows] = _normalized_columns(parts[rows], epsilon)
    sums = (scores * weights).sum(dim=1)
    counted = ~parts.isnan().all(dim=1)
    if int(counted.sum()) < 2:
        return torch.zeros_like(sums)
    scaled = (sums - sums[counted].mean()) / (sums[counted].std(correction=1) + epsilon)
    return torch.where(counted & (sums != 0), scaled, torch.zeros_like(sums))


def _normalized_columns(parts: RewardParts, epsilon: float) -> RewardParts:
    """``(r − mean) / (std + ε)`` of each column over its values; 0 without a value, or where all values are equal."""
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
    """Return from a turn on, normalized over the completions of the group that have this turn.

    ``R_{i,k} = Σ_{j ≥ k} γ^(j − k) r_{i,j}`` and ``A_{i,k} = (R_{i,k} − mean_k) / (std_k + ε)``, with mean and std
    (ddof = 1) over the completions i that have a turn k; 0 where that is one alone, or all have the same. A turn is not
    paid for what was before it, as in GRPO with process supervision (Shao et al. 2024, section 4.1.3), where rewards
    are normalized before they are summed. Returns are normalized instead, as over the steps of one anchor state in
    GiGPO (Feng et al. 2025, "Group-in-group policy optimization for LLM agent training", arXiv 2505.10978); here the
    turn's number stands for the state. With one turn it is ``normalized``.

    Args:
        gamma: γ, per turn.
        epsilon: ε, in units of the reward.
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
    """Generalized advantage estimation: TD errors, summed with weights that fall off.

    ``δ_t = r_t + γ V_{t+1} − V_t`` and ``A_t = δ_t + γ λ A_{t+1}``; the return is ``A_t + V_t`` before
    whitening. After the last token V is 0: an answer that was scored is over, also one that was cut off.

    Schulman et al. (2016), "High-dimensional continuous control using generalized advantage
    estimation" (arXiv 1506.02438), eq. 16; with a finite horizon as in PPO (2017), eq. 11–12. λ = 1 is return − V,
    λ = 0 the TD error.

    What goes wrong: A critic that starts from nothing gives advantages that are noise. Watch
    ``value_explained_variance``; give the head a larger learning rate (``head.lr_ratio``).

    Args:
        gamma: γ, per trained token.
        gae_lambda: λ.
        whiten: advantages with mean 0 and standard deviation 1 over all trained tokens of the batch.
        bootstrap: an answer that was cut off is not paid its score (its KL penalty it still pays): the value of the
            state behind it stands for that. For rewards that mean nothing at a cut; with every answer cut off nothing
            but the critic says what an answer is worth.

    Raises:
        ValueError: a reward at a token that is not trained.
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
    """Return from this token on: ``A_t = Σ_{i ≥ t} γ^(i − t) r_i``; no value function.

    REINFORCE++ (Hu et al. 2025) with γ = 1: the reward minus β times the k1 penalties of this token and
    all later ones (``kl_in_reward``), normalized over the whole batch. A completion that was cut off is
    not bootstrapped: there is no value to do it with.

    Args:
        gamma: γ, per trained token.
        whiten: advantages with mean 0 and standard deviation 1 over all trained tokens of the batch.

    Raises:
        ValueError: a reward at a token that is not trained.
    """
    zeros = torch.zeros_like(rewards)  # without values, and with λ = 1, gae sums the rewards
    return gae(rewards, mask, zeros, torch.zeros_like(final_values), gamma=gamma, gae_lambda=1.0, whiten=whiten)


def whitened(values: Tokens, mask: Mask) -> Tokens:
    """``(x − mean) / (std + 1e-8)`` over all trained tokens of the batch together, 0 elsewhere.

    The standard deviation is that of these tokens (ddof = 0), so that the result has standard deviation
    1. Equal values give 0, also where rounding makes their mean another number.
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
