"""Exercises about token losses: policy gradients, KL estimators, importance correction."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import advantages, aggregation, correction
from posttrain.algorithms.objectives import policy_gradient, primitives, surrogate
from posttrain.commands.exercises.exercise import Exercise, batch_of, bits, numbers
from posttrain.types import Outputs


def _policy_gradient_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    values = policy_gradient.reinforce(Outputs(logprobs), batch_of(mask, advantages=advantages)).values
    return (values * aggregation.token_mean(mask)).sum()


POLICY_GRADIENT_LOSS = Exercise(
    "6",
    "REINFORCE's loss over a padded batch",
    "posttrain.algorithms.objectives.policy_gradient.reinforce, with aggregation.token_mean",
    "policy_gradient_loss(logprobs, advantages, mask)",
    """\
Policy-gradient loss (chapter 6): REINFORCE, averaged over all trained tokens.

loss = - sum(mask * A * log pi) / sum(mask)

logprobs, advantages: [B, T]; mask: bool [B, T]. Return a scalar to MINIMIZE.
""",
    _policy_gradient_loss,
    {
        "rows of unequal length, numbers in the padding": (
            numbers([[-0.5, -2.0, -1.0, -9.0], [-0.25, -7.0, -7.0, -7.0]]),
            numbers([[1.0, 1.0, 1.0, 3.0], [-2.0, -2.0, -2.0, -2.0]]),
            bits("1110", "1000"),
        ),
        "one token": (numbers([[-1.5, -4.0]]), numbers([[2.0, 2.0]]), bits("01")),
    },
    {
        "wrong sign: optimizers minimize, so a good token's log-probability needs a negative factor": (
            lambda logprobs, advantages, mask: -_policy_gradient_loss(logprobs, advantages, mask)
        ),
        "you averaged over every position, including untrained ones": lambda logprobs, advantages, mask: (
            -(logprobs * advantages).mean()
        ),
        "you excluded untrained tokens from the sum, but counted them in the divisor": (
            lambda logprobs, advantages, mask: -(logprobs * advantages * mask).mean()
        ),
        "you averaged within rows, then across rows (GRPO's sequence_mean): tokens in short rows weigh more": (
            lambda logprobs, advantages, mask: (-logprobs * advantages * aggregation.sequence_mean(mask)).sum()
        ),
        "you took the sum: divide by the number of trained tokens": lambda logprobs, advantages, mask: (
            -(logprobs * advantages * mask).sum()
        ),
    },
)

GROUP_ADVANTAGE = Exercise(
    "6",
    "GRPO advantage per sample in a group",
    "posttrain.algorithms.advantages.normalized",
    "group_advantage(rewards)",
    """\
Group advantage (chapter 6): GRPO.

A_i = (r_i - mean(r)) / (std(r) + 1e-4), over the G samples for a prompt; std with ddof = 1.
If all rewards in a group are equal, return zeros.

rewards: [N, G] (N prompts, G samples). Return [N, G].
""",
    advantages.normalized,
    {
        "three groups": (numbers([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.5, 2.0]]),),
        "a group of equal rewards": (numbers([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),),
    },
    {
        "you divided by the standard deviation with ddof = 0; ddof = 1 is asked for": lambda rewards: (
            (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
        ),
        "you normalized over the whole batch; compare samples only within a prompt": lambda rewards: (
            (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ),
        "you did not divide by the standard deviation: this is Dr. GRPO's advantage": advantages.centered,
        "a group of equal rewards divides by 0; add 1e-4 to the standard deviation": lambda rewards: (
            (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        ),
        "you normalized over prompts (dim 0); samples are in dim 1": lambda rewards: (
            (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-4)
        ),
    },
)


def _gae(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    final = torch.zeros(len(rewards), dtype=torch.float64)
    return advantages.gae(rewards, mask, values, final, gamma=gamma, gae_lambda=gae_lambda, whiten=False)[0]


def _gae_bootstrapped(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    last = primitives.row_last(values, mask)
    options = {"gamma": gamma, "gae_lambda": gae_lambda}
    return advantages.gae(rewards, mask, values, last, whiten=False, bootstrap=True, **options)[0]


GAE = Exercise(
    "6",
    "generalized advantage estimation over trained tokens",
    "posttrain.algorithms.advantages.gae",
    "gae(rewards, mask, values, gamma, gae_lambda)",
    """\
Generalized advantage estimation (chapter 6): PPO's advantage.

delta_t = r_t + gamma * V_{t+1} - V_t     and     A_t = delta_t + gamma * gae_lambda * A_{t+1}

After the last trained token, V and A are 0 because the episode ended. The next step after a trained
token is the next TRAINED token in this row: tool output between turns is skipped.

rewards, values: [B, T]; mask: bool [B, T]; V_t is the state value before generating token t.
Return advantages [B, T], 0 where the mask is False. No whitening.
""",
    _gae,
    {
        "one row, final reward": (
            numbers([[0.0, 0.0, 0.0, 1.0]]), bits("0111"), numbers([[0.9, 0.2, 0.5, 0.7]]), 1.0, 0.95,
        ),
        "tool output in between, final padding": (
            numbers([[0.1, 0.0, 0.0, 2.0, 0.0], [0.0, 0.3, 0.0, 0.0, 0.0]]), bits("10010", "01000"),
            numbers([[0.4, 5.0, 5.0, 0.6, 5.0], [5.0, 0.2, 5.0, 5.0, 5.0]]), 0.9, 0.8,
        ),
    },
    {
        "you stepped through untrained tokens; skip to the next trained token": (
            lambda rewards, mask, values, gamma, gae_lambda: (
                _gae(rewards, torch.ones_like(mask), values, gamma, gae_lambda) * mask
            )
        ),
        "you left gae_lambda out of the sum: A_t = delta_t + gamma * gae_lambda * A_{t+1}": (
            lambda rewards, mask, values, gamma, gae_lambda: _gae(rewards, mask, values, gamma, 1.0)
        ),
        "you returned the TD errors delta_t; the advantage sums the later ones, too": (
            lambda rewards, mask, values, gamma, gae_lambda: _gae(rewards, mask, values, gamma, 0.0)
        ),
        "you returned A_t + V_t, which is the critic's target; the advantage is A_t": (
            lambda rewards, mask, values, gamma, gae_lambda: (
                _gae(rewards, mask, values, gamma, gae_lambda) + values * mask
            )
        ),
        "you bootstrapped with the last value; after the end, the value is 0": (
            _gae_bootstrapped
        ),
    },
)  # fmt: skip


def _clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    return surrogate.clipped_surrogate((logprobs - old_logprobs).exp(), advantages, clip_low, clip_high).values


CLIPPED_SURROGATE = Exercise(
    "6",
    "PPO and GRPO loss per token",
    "posttrain.algorithms.objectives.surrogate.clipped_surrogate",
    "clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)",
    """\
Clipped surrogate (chapter 6): per-token loss in PPO and GRPO.

rho = pi(a) / pi_old(a)     and     loss = - min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)

logprobs, old_logprobs, advantages: [B, T]. Return [B, T], without a mean.
""",
    _clipped_surrogate,
    {
        "inside, above and below the range": (
            numbers([[-1.0, -0.5, -2.0]]), numbers([[-1.1, -1.5, -1.0]]), numbers([[1.0, 1.0, 1.0]]), 0.2, 0.28,
        ),
        "negative advantages": (
            numbers([[-1.0, -0.5, -2.0]]), numbers([[-1.1, -1.5, -1.0]]), numbers([[-2.0, -2.0, -2.0]]), 0.2, 0.2,
        ),
    },
    {
        "your ratio is inverted: use pi / pi_old, exp(logprobs - old_logprobs)": (
            lambda new, old, advantages, low, high: _clipped_surrogate(old, new, advantages, low, high)
        ),
        "you took the larger product; the pessimistic bound is the smaller": (
            lambda new, old, advantages, low, high: -torch.maximum(
                (new - old).exp() * advantages, (new - old).exp().clamp(1 - low, 1 + high) * advantages
            )
        ),
        "you clipped without the min: tokens moving in the wrong direction must keep a gradient": (
            lambda new, old, advantages, low, high: -(new - old).exp().clamp(1 - low, 1 + high) * advantages
        ),
        "wrong sign: this is the objective, but optimizers minimize": (
            lambda new, old, advantages, low, high: -_clipped_surrogate(new, old, advantages, low, high)
        ),
        "you did not clip": lambda new, old, advantages, low, high: -(new - old).exp() * advantages,
    },
)  # fmt: skip


def _kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, ...]:
    return tuple(estimator(logprobs - ref_logprobs) for estimator in primitives.KL_ESTIMATORS.values())


KL_ESTIMATORS = Exercise(
    "12, 15",
    "three estimators for KL to a reference",
    "posttrain.algorithms.objectives.primitives.kl_k1, kl_k2 and kl_k3",
    "kl_estimators(logprobs, ref_logprobs)",
    """\
KL estimators (chapter 15): three estimates of KL(pi || pi_ref) from a single sampled token.

With r = log pi - log pi_ref:     k1 = r     k2 = r^2 / 2     k3 = exp(-r) - 1 + r

logprobs, ref_logprobs: [B, T]. Return (k1, k2, k3), each [B, T].
""",
    _kl_estimators,
    {"both signs of r": (numbers([[-1.0, -0.5, -2.0]]), numbers([[-1.5, -1.5, -1.0]]))},
    {
        "your r is upside down: r = logprobs - ref_logprobs": lambda new, ref: _kl_estimators(ref, new),
        "k2 lacks its half": lambda new, ref: (new - ref, (new - ref) ** 2, primitives.kl_k3(new - ref)),
        "wrong sign for r in k3: exp(r) - 1 - r is for samples from pi_ref": (
            lambda new, ref: (*_kl_estimators(new, ref)[:2], primitives.kl_k3(ref - new))
        ),
        "k3 lacks its -1: at r = 0 it must be 0": (
            lambda new, ref: (*_kl_estimators(new, ref)[:2], primitives.kl_k3(new - ref) + 1)
        ),
    },
)


def _token_tis(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    return correction.token_tis(logprobs - sampler_logprobs, mask, cap=cap)


TOKEN_TIS = Exercise(
    "7",
    "importance weights for tokens sampled by another engine",
    "posttrain.algorithms.correction.token_tis",
    "token_tis(logprobs, sampler_logprobs, mask, cap)",
    """\
Importance correction (chapter 7): truncated importance sampling per token.

The sampling engine and the trainer assign different probabilities to the same token.
w_t = min(pi_trainer(a_t) / pi_sampler(a_t), cap), and 1 outside the mask.

logprobs (the trainer's), sampler_logprobs: [B, T]; mask: bool [B, T]. Return weights [B, T].
""",
    _token_tis,
    {
        "ratios below 1, above 1 and above the cap; padding": (
            numbers([[-1.0, -0.5, -3.0, -0.1]]), numbers([[-1.2, -4.0, -2.0, -4.0]]), bits("1110"), 2.0,
        ),
    },
    {
        "your ratio is inverted: use pi_trainer / pi_sampler": lambda new, sampler, mask, cap: (
            _token_tis(sampler, new, mask, cap)
        ),
        "you capped the logarithm; the cap is for the ratio": lambda new, sampler, mask, cap: torch.where(
            mask, (new - sampler).clamp(max=cap).exp(), 1.0
        ),
        "you gave weight 0 to tokens outside the mask; theirs is 1": lambda new, sampler, mask, cap: (
            _token_tis(new, sampler, mask, cap) * mask
        ),
        "you dropped tokens above the cap (as IcePop does); truncation keeps them, with the cap as weight": (
            lambda new, sampler, mask, cap: correction.icepop(new - sampler, mask, low=0.0, high=cap)
        ),
        "you did not cap the ratio": lambda new, sampler, mask, cap: _token_tis(new, sampler, mask, 1e9),
    },
)  # fmt: skip
