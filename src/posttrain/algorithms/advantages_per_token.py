"""Advantages per token: credit for a token from the rewards that follow it. Pure.

Each word takes one optimizer batch in float64: rewards ``[B, T]`` (what is paid at each token, a KL
penalty included), mask ``bool [B, T]``, values ``[B, T]`` (of the state *before* each token) and
final_values ``[B]`` (of the state after the last trained token where the completion was cut off and not
paid for, 0 where it ended or was paid). It returns ``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask.

Trained tokens need not be contiguous. A step leads from one trained token to the next trained one of
its row; what lies between (an answer of a tool, say) takes no step and no discount, and pays nothing.
"""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Bool, Float64
from pydantic import Field
from torch import Tensor

from posttrain.registry import register

Tokens = Float64[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
Rows = Float64[Tensor, " B"]
Share = Annotated[float, Field(ge=0, le=1)]

WHITEN_EPSILON = 1e-8


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
    estimation", eq. 16; with a finite horizon as in PPO (2017), eq. 11–12. λ = 1 is return − V, λ = 0
    the TD error.

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
    rewards: Tokens,
    mask: Mask,
    values: Tokens,
    final_values: Rows,
    *,
    gamma: Share = 1.0,
    whiten: bool = True,
) -> tuple[Tokens, Tokens]:
    """What is paid from this token on: ``A_t = Σ_{i ≥ t} γ^(i − t) r_i``; no value function.

    REINFORCE++ (Hu et al. 2025) with γ = 1: the reward minus β times the k1 penalties of this token and
    all later ones (``kl_in_reward``), normalized over the whole batch. A completion that was cut off is
    not bootstrapped: there is no value to do it with.

    Args:
        gamma: γ, per trained token.
        whiten: advantages with mean 0 and standard deviation 1 over all trained tokens of the batch.

    Raises:
        ValueError: a reward at a token that is not trained.
    """
    _check(rewards, mask)
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(final_values)
    for t in range(rewards.shape[1] - 1, -1, -1):
        current = rewards[:, t] + gamma * following
        returns[:, t] = torch.where(mask[:, t], current, returns[:, t])
        following = torch.where(mask[:, t], current, following)
    return (whitened(returns, mask) if whiten else returns.clone()), returns


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
