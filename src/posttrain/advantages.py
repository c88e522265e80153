"""Advantages: what a completion's reward is worth, beside the others of its prompt. Pure.

Each word takes the rewards of one optimizer batch as ``float64 [N, G]`` (N prompts, G samples
each) and returns advantages of the same shape, one number per completion.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.registry import register

Rewards = Float64[Tensor, "N G"]


@register("advantage", min_group=1)
def raw(rewards: Rewards) -> Rewards:
    """``A_i = r_i``: REINFORCE without a baseline (Williams 1992)."""
    return rewards.clone()


@register("advantage", min_group=2)
def centered(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean(r)`` over the group.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training", eq. 4): no division by the
    standard deviation.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


@register("advantage", min_group=2)
def leave_one_out(rewards: Rewards) -> Rewards:
    """``A_i = r_i − mean of the other G − 1 rewards``, which is ``G / (G − 1)`` × ``centered``.

    RLOO (Ahmadian et al. 2024, "Back to basics", eq. 8; Kool et al. 2019).
    """
    group = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (group / (group - 1))


@register("advantage", min_group=2)
def normalized(rewards: Rewards, *, epsilon: float = 1e-4) -> Rewards:
    """``A_i = (r_i − mean(r)) / (std(r) + ε)`` over the group, std with ddof = 1.

    GRPO (Shao et al. 2024, section 4.1.2). A group of equal rewards gets zeros. The paper leaves ε
    and the ddof open; both are as in the common implementations.

    Args:
        epsilon: ε, in units of the reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=1)
    return torch.where(std > 0, centred / (std + epsilon), torch.zeros_like(centred))
