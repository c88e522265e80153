"""The exercises: what to write, the library's own function, and mistakes that a check knows by name.

The stub is the file to begin with: its docstring is the task. Its function is called as the exercise and takes the
arguments of a case. Tensors are float64, masks bool. Shapes: B rows, T tokens, N prompts, G samples, P pairs.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms import advantages, aggregation, correction
from posttrain.algorithms.objectives import policy_gradient, preference, primitives, reward, surrogate
from posttrain.data.render import words
from posttrain.evaluation import statistics as measures
from posttrain.types import Batch, Outputs, Sample, collate

Answer: TypeAlias = Tensor | float | str | tuple[Tensor, ...] | None
Lists: TypeAlias = list[float] | list[list[float]]


@dataclass(frozen=True)
class Exercise:
    """A function to write.

    ``chapter``: of the RLHF book. ``library``: the place of the library's own function, which ``reference`` calls.
    ``cases``: arguments by what is particular about them. ``mistakes``: what is wrong, and a function that does it.
    """

    chapter: str
    about: str
    library: str
    stub: str
    reference: Callable[..., Answer]
    cases: Mapping[str, tuple[object, ...]]
    mistakes: Mapping[str, Callable[..., Answer]]


def _numbers(values: Lists) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _bits(*rows: str) -> Tensor:
    return torch.tensor([[char == "1" for char in row] for row in rows])


def _batch(mask: Tensor, rows_per_unit: int = 1, **streams: Tensor) -> Batch:
    zeros = torch.zeros(len(mask), dtype=torch.long)
    return Batch(torch.zeros_like(mask, dtype=torch.long), zeros + mask.shape[1], mask, zeros, zeros, streams,
                 rows_per_unit=rows_per_unit)  # fmt: skip


def _response_mask(prompt_lengths: list[int], own: list[list[bool]]) -> Tensor:
    rows = [[False] * length + written for length, written in zip(prompt_lengths, own, strict=True)]
    return collate([Sample(range(len(row)), row) for row in rows]).mask


def _from_prompt_on(prompt_lengths: list[int], own: list[list[bool]]) -> Tensor:
    positions = torch.arange(_response_mask(prompt_lengths, own).shape[1])
    return positions >= torch.tensor(prompt_lengths)[:, None]


def _without_last(mask: Tensor) -> Tensor:
    return mask & (mask.flip(1).cumsum(1).flip(1) > 1)


RESPONSE_MASK = Exercise(
    "4, 13",
    "which tokens are trained",
    "posttrain.types.collate",
    '''\
"""Response mask (chapter 4, instruction tuning; chapter 13, tools).

A row is a prompt, then a completion, then padding up to the longest row, T tokens.
Return bool [B, T]: True where the model wrote the token, its end token included.
False: the prompt, what a tool answered, padding. mask[b, t] describes the token AT t.

prompt_lengths: B numbers. own[b][i]: whether the model wrote token i of completion b.
"""

import torch


def response_mask(prompt_lengths, own):
    raise NotImplementedError
''',
    _response_mask,
    {
        "two rows of one turn": ([2, 4], [[True] * 3, [True] * 2]),
        "a tool answers in the first row": ([1, 3], [[True, True, False, False, True], [True]]),
    },
    {
        "you train the prompt, too; only what the model wrote has a loss": lambda prompt_lengths, own: _response_mask(
            [1] * len(own), [[True] * (n - 1) + row for n, row in zip(prompt_lengths, own, strict=True)]
        ),
        "you train what the tool answered; the model did not write it": lambda prompt_lengths, own: _response_mask(
            prompt_lengths, [[True] * len(row) for row in own]
        ),
        "you train the padding": _from_prompt_on,
        "your mask is shifted by one: here mask[b, t] describes the token at t, not the one that follows it": (
            lambda prompt_lengths, own: _response_mask(prompt_lengths, own).roll(-1, 1)
        ),
        "you leave out the last token of each completion; a model that is not trained on its end never stops": (
            lambda prompt_lengths, own: _without_last(_response_mask(prompt_lengths, own))
        ),
    },
)


def _policy_gradient_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    values = policy_gradient.reinforce(Outputs(logprobs), _batch(mask, advantages=advantages)).values
    return (values * aggregation.token_mean(mask)).sum()


POLICY_GRADIENT_LOSS = Exercise(
    "6",
    "REINFORCE's loss over a padded batch",
    "posttrain.algorithms.objectives.policy_gradient.reinforce, with aggregation.token_mean",
    '''\
"""Policy-gradient loss (chapter 6): REINFORCE, averaged over all trained tokens.

loss = - sum(mask * A * log pi) / sum(mask)

logprobs, advantages: [B, T]; mask: bool [B, T]. Return a scalar that an optimizer MINIMIZES.
"""

import torch


def policy_gradient_loss(logprobs, advantages, mask):
    raise NotImplementedError
''',
    _policy_gradient_loss,
    {
        "rows of unequal length, numbers in the padding": (
            _numbers([[-0.5, -2.0, -1.0, -9.0], [-0.25, -7.0, -7.0, -7.0]]),
            _numbers([[1.0, 1.0, 1.0, 3.0], [-2.0, -2.0, -2.0, -2.0]]),
            _bits("1110", "1000"),
        ),
        "one token": (_numbers([[-1.5, -4.0]]), _numbers([[2.0, 2.0]]), _bits("01")),
    },
    {
        "the sign: an optimizer minimizes, so a good token needs a negative factor on its log-probability": (
            lambda logprobs, advantages, mask: -_policy_gradient_loss(logprobs, advantages, mask)
        ),
        "you averaged over all positions, those that are not trained included": lambda logprobs, advantages, mask: (
            -(logprobs * advantages).mean()
        ),
        "you left out untrained tokens from the sum, but divided by their number, too": (
            lambda logprobs, advantages, mask: -(logprobs * advantages * mask).mean()
        ),
        "you averaged over each row and then over rows (GRPO's sequence_mean): tokens of short rows weigh more": (
            lambda logprobs, advantages, mask: (-logprobs * advantages * aggregation.sequence_mean(mask)).sum()
        ),
        "you took the sum: divide by the number of trained tokens": lambda logprobs, advantages, mask: (
            -(logprobs * advantages * mask).sum()
        ),
    },
)

GROUP_ADVANTAGE = Exercise(
    "6",
    "GRPO's advantage of each sample of a group",
    "posttrain.algorithms.advantages.normalized",
    '''\
"""Group advantage (chapter 6): GRPO.

A_i = (r_i - mean(r)) / (std(r) + 1e-4), over the G samples of one prompt; std with ddof = 1.
A group of equal rewards gets zeros.

rewards: [N, G] (N prompts, G samples). Return [N, G].
"""

import torch


def group_advantage(rewards):
    raise NotImplementedError
''',
    advantages.normalized,
    {
        "three groups": (_numbers([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.5, 2.0]]),),
        "a group of equal rewards": (_numbers([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),),
    },
    {
        "you divided by the standard deviation with ddof = 0; ddof = 1 is asked for": lambda rewards: (
            (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
        ),
        "you normalized over the whole batch; each prompt is compared with its own samples": lambda rewards: (
            (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ),
        "you did not divide by the standard deviation: this is Dr. GRPO's advantage": advantages.centered,
        "a group of equal rewards divides by 0; add 1e-4 to the standard deviation": lambda rewards: (
            (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        ),
        "you normalized over prompts (dim 0); the samples of a prompt are dim 1": lambda rewards: (
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
    '''\
"""Generalized advantage estimation (chapter 6): PPO's advantage.

delta_t = r_t + gamma * V_{t+1} - V_t     and     A_t = delta_t + gamma * gae_lambda * A_{t+1}

After the last trained token V and A are 0: the answer has ended. The next step after a trained
token is the next TRAINED token of its row: a tool's answer between two turns is no step.

rewards, values: [B, T]; mask: bool [B, T]; V_t is the value of the state before token t.
Return advantages [B, T], 0 where the mask is False. No whitening.
"""

import torch


def gae(rewards, mask, values, gamma, gae_lambda):
    raise NotImplementedError
''',
    _gae,
    {
        "one row, reward at the end": (
            _numbers([[0.0, 0.0, 0.0, 1.0]]), _bits("0111"), _numbers([[0.9, 0.2, 0.5, 0.7]]), 1.0, 0.95,
        ),
        "a tool's answer in the middle, padding at the end": (
            _numbers([[0.1, 0.0, 0.0, 2.0, 0.0], [0.0, 0.3, 0.0, 0.0, 0.0]]), _bits("10010", "01000"),
            _numbers([[0.4, 5.0, 5.0, 0.6, 5.0], [5.0, 0.2, 5.0, 5.0, 5.0]]), 0.9, 0.8,
        ),
    },
    {
        "you stepped through tokens that are not trained; the next step is the next trained token": (
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
        "you used the last value once more as the value after it; an answer that has ended is worth 0": (
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
    "PPO's and GRPO's loss of each token",
    "posttrain.algorithms.objectives.surrogate.clipped_surrogate",
    '''\
"""Clipped surrogate (chapter 6): the loss of PPO and GRPO for each token.

rho = pi(a) / pi_old(a)     and     loss = - min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)

logprobs, old_logprobs, advantages: [B, T]. Return [B, T], without a mean.
"""

import torch


def clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high):
    raise NotImplementedError
''',
    _clipped_surrogate,
    {
        "inside, above and below the range": (
            _numbers([[-1.0, -0.5, -2.0]]), _numbers([[-1.1, -1.5, -1.0]]), _numbers([[1.0, 1.0, 1.0]]), 0.2, 0.28,
        ),
        "negative advantages": (
            _numbers([[-1.0, -0.5, -2.0]]), _numbers([[-1.1, -1.5, -1.0]]), _numbers([[-2.0, -2.0, -2.0]]), 0.2, 0.2,
        ),
    },
    {
        "your ratio is upside down: it is pi / pi_old, exp(logprobs - old_logprobs)": (
            lambda new, old, advantages, low, high: _clipped_surrogate(old, new, advantages, low, high)
        ),
        "you took the larger of the two products; the smaller one is the pessimistic bound": (
            lambda new, old, advantages, low, high: -torch.maximum(
                (new - old).exp() * advantages, (new - old).exp().clamp(1 - low, 1 + high) * advantages
            )
        ),
        "you clipped without the min: a token that moved the wrong way must keep its gradient": (
            lambda new, old, advantages, low, high: -(new - old).exp().clamp(1 - low, 1 + high) * advantages
        ),
        "the sign: this is the objective, and an optimizer minimizes the loss": (
            lambda new, old, advantages, low, high: -_clipped_surrogate(new, old, advantages, low, high)
        ),
        "you did not clip": lambda new, old, advantages, low, high: -(new - old).exp() * advantages,
    },
)  # fmt: skip


def _kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, ...]:
    return tuple(estimator(logprobs - ref_logprobs) for estimator in primitives.KL_ESTIMATORS.values())


KL_ESTIMATORS = Exercise(
    "12, 15",
    "the three estimators of the KL to a reference",
    "posttrain.algorithms.objectives.primitives.kl_k1, kl_k2 and kl_k3",
    '''\
"""KL estimators (chapter 15): three estimates of KL(pi || pi_ref) from one token of pi.

With r = log pi - log pi_ref:     k1 = r     k2 = r^2 / 2     k3 = exp(-r) - 1 + r

logprobs, ref_logprobs: [B, T]. Return (k1, k2, k3), each [B, T].
"""

import torch


def kl_estimators(logprobs, ref_logprobs):
    raise NotImplementedError
''',
    _kl_estimators,
    {"both signs of r": (_numbers([[-1.0, -0.5, -2.0]]), _numbers([[-1.5, -1.5, -1.0]]))},
    {
        "your r is upside down: r = logprobs - ref_logprobs": lambda new, ref: _kl_estimators(ref, new),
        "k2 lacks its half": lambda new, ref: (new - ref, (new - ref) ** 2, primitives.kl_k3(new - ref)),
        "k3 has the other sign of r: exp(r) - 1 - r is for samples from pi_ref": (
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
    "weights for tokens that another engine sampled",
    "posttrain.algorithms.correction.token_tis",
    '''\
"""Importance correction (chapter 7): truncated importance sampling per token.

The engine that sampled gives a token another probability than the trainer does.
w_t = min(pi_trainer(a_t) / pi_sampler(a_t), cap), and 1 where the mask is False.

logprobs (the trainer's), sampler_logprobs: [B, T]; mask: bool [B, T]. Return weights [B, T].
"""

import torch


def token_tis(logprobs, sampler_logprobs, mask, cap):
    raise NotImplementedError
''',
    _token_tis,
    {
        "ratios below 1, above 1 and above the cap; padding": (
            _numbers([[-1.0, -0.5, -3.0, -0.1]]), _numbers([[-1.2, -4.0, -2.0, -4.0]]), _bits("1110"), 2.0,
        ),
    },
    {
        "your ratio is upside down: it is pi_trainer / pi_sampler": lambda new, sampler, mask, cap: (
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


def _bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    scores = torch.stack([chosen, rejected], 1).reshape(-1, 1)
    return reward.bradley_terry(Outputs(scores, scores=scores), _batch(torch.ones_like(scores).bool(), 2)).values


BRADLEY_TERRY = Exercise(
    "5, 11",
    "the loss of a reward model on pairs",
    "posttrain.algorithms.objectives.reward.bradley_terry",
    '''\
"""Bradley-Terry (chapter 5, reward models): the loss of a pair.

loss = - log sigmoid(r_chosen - r_rejected)

chosen, rejected: scores [P]. Return [P], without a mean. Differences of -800 are among the cases.
"""

import torch


def bradley_terry(chosen, rejected):
    raise NotImplementedError
''',
    _bradley_terry,
    {
        "pairs in and out of order": (_numbers([1.0, 0.0, -0.5]), _numbers([0.0, 2.0, -0.5])),
        "a difference of -800": (_numbers([-400.0, 3.0]), _numbers([400.0, 1.0])),
    },
    {
        "chosen and rejected are swapped": lambda chosen, rejected: _bradley_terry(rejected, chosen),
        "sigmoid(-800) is 0 in floating point, and its logarithm infinite; use logsigmoid": lambda chosen, rejected: (
            -torch.sigmoid(chosen - rejected).log()
        ),
        "the sign: this is the log-likelihood, and an optimizer minimizes the loss": lambda chosen, rejected: (
            logsigmoid(chosen - rejected)
        ),
        "you returned a probability; the loss is minus its logarithm": lambda chosen, rejected: torch.sigmoid(
            chosen - rejected
        ),
        "this is 1 - sigmoid: its gradient vanishes on pairs that are badly wrong; take -log sigmoid": (
            lambda chosen, rejected: torch.sigmoid(rejected - chosen)
        ),
    },
)


def _dpo(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float, by_length: bool = False) -> Tensor:
    batch = _batch(mask, 2, ref_logprobs=ref_logprobs)
    return preference.dpo(Outputs(logprobs), batch, beta=beta, length_normalized=by_length).values


_PAIRS = (
    _numbers([[-9.0, -1.0, -2.0, -0.5], [-9.0, -0.5, -9.0, -9.0], [-9.0, -1.0, -9.0, -9.0], [-9.0, -3.0, -1.0, -9.0]]),
    _numbers([[-1.0, -2.0, -2.5, -1.0], [-8.0, -0.4, -1.0, -1.0], [-1.0, -0.5, -1.0, -1.0], [-7.0, -2.5, -1.5, -1.0]]),
    _bits("0111", "0100", "0100", "0110"),
)

DPO = Exercise(
    "8",
    "the loss of direct preference optimization",
    "posttrain.algorithms.objectives.preference.dpo",
    '''\
"""Direct preference optimization (chapter 8).

log-ratio(y) = sum over the trained tokens of y of (log pi - log pi_ref)
loss = - log sigmoid(beta * (log-ratio(chosen) - log-ratio(rejected)))

logprobs, ref_logprobs: [2P, T], rows alternate: chosen, rejected, chosen, ...; mask: bool [2P, T].
Return [P], without a mean.
"""

import torch


def dpo(logprobs, ref_logprobs, mask, beta):
    raise NotImplementedError
''',
    _dpo,
    {"answers of unequal length, beta 0.1": (*_PAIRS, 0.1), "beta 0.5": (*_PAIRS, 0.5)},
    {
        "you averaged over tokens (length-normalized DPO); DPO takes the sum": lambda new, ref, mask, beta: _dpo(
            new, ref, mask, beta, True
        ),
        "you left out the reference": lambda new, ref, mask, beta: _dpo(new, torch.zeros_like(ref), mask, beta),
        "chosen and rejected are swapped: chosen rows are 0, 2, 4 ...": lambda new, ref, mask, beta: _dpo(
            new.flip(0), ref.flip(0), mask.flip(0), beta
        ).flip(0),
        "beta belongs inside the sigmoid": lambda new, ref, mask, beta: beta * _dpo(new, ref, mask, 1.0),
        "you did not use beta": lambda new, ref, mask, beta: _dpo(new, ref, mask, 1.0),
        "you summed over tokens that are not trained, too": lambda new, ref, mask, beta: _dpo(
            new, ref, torch.ones_like(mask), beta
        ),
    },
)

PASS_AT_K = Exercise(
    "16",
    "the chance that one of k samples is correct",
    "posttrain.evaluation.statistics.pass_at_k",
    '''\
"""pass@k (chapter 16, evaluation): the unbiased estimate from n samples of one problem.

pass@k = 1 - C(n - c, k) / C(n, k): the chance that k of the n samples, taken without
replacement, hold one of the c correct ones. 1 where fewer than k samples are wrong.

n, num_right, k: whole numbers. Return a number.
"""


def pass_at_k(n, num_right, k):
    raise NotImplementedError
''',
    measures.pass_at_k,
    {"3 of 16 correct": (16, 3, 4), "none correct": (8, 0, 2), "too few wrong for k": (8, 6, 4), "k = 1": (5, 2, 1)},
    {
        "1 - (1 - c/n)^k is biased: it takes the same sample more than once": lambda n, c, k: 1 - (1 - c / n) ** k,
        "this is 1 as soon as one of the n samples is correct; only k of them count": lambda n, c, k: float(c > 0),
        "this adds up k chances (k c / n); they overlap": lambda n, c, k: min(1.0, k * c / n),
        "this is the chance that ALL k samples are correct": lambda n, c, k: math.comb(c, k) / math.comb(n, k),
    },
)  # fmt: skip


def _first_of_tied(scores: list[float], right: list[float], k: int) -> float:
    return measures.best_of_n([score - 1e-9 * i for i, score in enumerate(scores)], right, k)


BEST_OF_N = Exercise(
    "9, 14",
    "what choosing by a score is worth, for any number of answers",
    "posttrain.evaluation.statistics.best_of_n",
    '''\
"""Best of k (chapter 9, rejection sampling; chapter 14, over-optimization).

A reward model scores n answers to a problem. Return how often the top-scored of k of them is
correct: the mean over all subsets of k of the n answers. Equal scores share the place:
their mean correctness counts.

scores, right: n numbers each (right: 1 or 0); k: a whole number. Return a number.
"""


def best_of_n(scores, right, k):
    raise NotImplementedError
''',
    measures.best_of_n,
    {
        "k = 2 of 4": ([0.1, 0.5, 0.9, 0.3], [0.0, 1.0, 0.0, 0.0], 2),
        "equal scores": ([1.0, 1.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.0], 3),
    },
    {
        "you chose among all n answers; take the mean over subsets of k": lambda scores, right, k: measures.best_of_n(
            scores, right, len(scores)
        ),
        "you chose among the first k answers; take the mean over all subsets of k": lambda scores, right, k: (
            measures.best_of_n(scores[:k], right[:k], k)
        ),
        "this is the share of correct answers: a random pick, without the scores": lambda scores, right, k: (
            statistics.fmean(right)
        ),
        "of equal scores you took the first; their mean correctness counts": _first_of_tied,
        "you chose the lowest score": lambda scores, right, k: measures.best_of_n([-s for s in scores], right, k),
    },
)


def _first_match(text: str, strip: bool = True) -> str | None:
    found = re.search("<answer>(.*?)</answer>", text, re.DOTALL)
    return found and (found[1].strip() if strip else found[1])


def _behind(text: str, reasoning: str) -> str:
    return text.partition(f"</{reasoning}>")[2]


TAGGED_ANSWER = Exercise(
    "7",
    "the answer in a model's output, as a verifier reads it",
    "posttrain.data.render.words.tagged_answer",
    '''\
"""Answer extraction (chapter 7, reasoning): what a verifier reads.

Return the text of the first complete <answer> ... </answer> AFTER the reasoning is first closed
(by </think>, say), stripped; of nested ones the innermost. None if the reasoning is not closed,
there is no answer, or it is blank.

text: what the model wrote. reasoning: the name of the reasoning's tag, such as "think".
"""


def tagged_answer(text, reasoning):
    raise NotImplementedError
''',
    words.tagged_answer,
    {
        "an answer": ("2 + 2 </think> <answer> 4 </answer>", "think"),
        "an answer inside the reasoning": ("maybe <answer>5</answer> </think> <answer>4</answer>", "think"),
        "reasoning that is cut off": ("maybe <answer>5</answer> no", "think"),
        "two answers": ("</think> <answer>4</answer> or <answer>5</answer>", "think"),
        "a nested answer": ("</reasoning> <answer>it is <answer>4</answer>", "reasoning"),
        "a blank answer": ("</think> <answer>  </answer>", "think"),
    },
    {
        "you count answers inside the reasoning; a model that lists candidates there would be paid for it": (
            lambda text, reasoning: words.tagged_answer(f"</{reasoning}>{text}", reasoning)
        ),
        "you took the last answer; with the first, a model cannot hedge by adding more": lambda text, reasoning: (
            words.tagged_answer(f"</{reasoning}>{text[max(text.rfind('<answer>'), 0):]}", reasoning)
            if _behind(text, reasoning) else None
        ),
        "of nested answers you took the outer one; its text holds a tag": lambda text, reasoning: (
            _first_match(_behind(text, reasoning)) or None
        ),
        "you did not strip the answer": lambda text, reasoning: (
            words.tagged_answer(text, reasoning) and _first_match(
                "<answer>" + _behind(text, reasoning).partition("</answer>")[0].rpartition("<answer>")[2] + "</answer>",
                strip=False,
            )
        ),
        "a blank answer is no answer: return None": lambda text, reasoning: (
            words.tagged_answer(text, reasoning) or ("" if "</answer>" in _behind(text, reasoning) else None)
        ),
    },
)  # fmt: skip

EXERCISES = {
    "response_mask": RESPONSE_MASK,
    "bradley_terry": BRADLEY_TERRY,
    "policy_gradient_loss": POLICY_GRADIENT_LOSS,
    "group_advantage": GROUP_ADVANTAGE,
    "gae": GAE,
    "clipped_surrogate": CLIPPED_SURROGATE,
    "tagged_answer": TAGGED_ANSWER,
    "token_tis": TOKEN_TIS,
    "dpo": DPO,
    "best_of_n": BEST_OF_N,
    "kl_estimators": KL_ESTIMATORS,
    "pass_at_k": PASS_AT_K,
}
