"""Advantages: what a completion's reward is worth, beside the others of its prompt. Pure.

Each word takes the rewards of one optimizer batch as ``float64 [N, G]`` (N prompts, G samples
each) and returns advantages of the same shape, one number per completion.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Float64
from pydantic import Field
from torch import Tensor

from posttrain.registry import register

Rewards = Float64[Tensor, "N G"]


@register("advantage", min_group=1)
def raw(rewards: Rewards) -> Rewards:
    """``A_i = r_i``: REINFORCE without a baseline (Williams 1992, "Simple statistical gradient-following")."""
    return rewards.clone()


@register("advantage", min_group=2)
def centered(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean(r)`` over the group.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2): no division by the
    standard deviation. The other half of Dr. GRPO is ``aggregate: constant``.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


@register("advantage", min_group=2)
def leave_one_out(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean of the other G − 1 rewards``, which is ``G / (G − 1)`` × ``centered``.

    RLOO (Ahmadian et al. 2024, "Back to basics"; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!").
    """
    group = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (group / (group - 1))


@register("advantage", min_group=2)
def normalized(rewards: Rewards, *, epsilon: Annotated[float, Field(ge=0)] = 1e-4) -> Rewards:
    """``A_i = (r_i − mean(r)) / (std(r) + ε)`` over the group, std with ddof = 1.

    GRPO (Shao et al. 2024, section 4.1.2). A group of equal rewards gets zeros. The paper leaves ε
    and the ddof open; both are as in the common implementations.

    Args:
        epsilon: ε, in units of the reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=1)
    # not `std > 0`: the mean of equal rewards may differ from them in the last bit
    varies = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return torch.where(varies, centred / (std + epsilon), torch.zeros_like(centred))


@register("advantage", min_group=2, wants_positive=True)
def mean_scaled(rewards: Rewards) -> Rewards:
    """``A_i = (r_i − mean(r)) / mean(r)`` over the group; 0 where no sample is rewarded.

    MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning"): for rewards in {0, 1}
    the mean of the score function over the K right samples of G (eq. 9), minus its mean over all G as
    a control variate (eq. 10): weights ``1/K − 1/G`` and ``−1/G``, which are ``A_i / G`` here. Where
    nothing was right both are dropped (algorithm 1). With success probability p the expected gradient
    is ``∇p · Σ_{k<G} (1 − p)^(k − 1)``, which approaches ``∇ log p`` as the group grows. Rewards must
    not be negative.

    Raises:
        ValueError: a negative reward.
    """
    if bool((rewards < 0).any()):
        raise ValueError("advantage mean_scaled divides by the mean reward and needs rewards that are not negative")
    mean = rewards.mean(dim=1, keepdim=True)
    return torch.where(
        mean > 0, (rewards - mean) / mean.clamp(min=torch.finfo(mean.dtype).tiny), torch.zeros_like(mean)
    )


@register("advantage", min_group=1)
def batch_normalized(
    rewards: Rewards, *, center: Literal["batch", "group"] = "batch", epsilon: float = 1e-8
) -> Rewards:
    """``A_i = (r_i − baseline) / (std of all r − baseline in the batch + ε)``.

    REINFORCE++ (Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global
    normalization"): one mean and one standard deviation (ddof = 0) over the whole rollout batch.
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
