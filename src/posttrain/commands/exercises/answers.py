"""Exercises about whole answers: which tokens are trained, pairs, choosing, extraction."""

from __future__ import annotations

import math
import re
import statistics

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms.objectives import preference, reward
from posttrain.commands.exercises.exercise import Exercise, batch_of, bits, numbers
from posttrain.data.render import templates
from posttrain.evaluation import statistics as measures
from posttrain.types import Outputs, Sample, collate


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
    "response_mask(prompt_lengths, own)",
    """\
Response mask (chapter 4, instruction tuning; chapter 13, tools).

A row is a prompt, then a completion, then padding up to the longest row, T tokens.
Return bool [B, T]: True where the model wrote the token, its end token included.
False: the prompt, what a tool answered, padding. mask[b, t] describes the token AT t.

prompt_lengths: B numbers. own[b][i]: whether the model wrote token i of completion b.
""",
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


def _bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    scores = torch.stack([chosen, rejected], 1).reshape(-1, 1)
    return reward.bradley_terry(Outputs(scores, scores=scores), batch_of(torch.ones_like(scores).bool(), 2)).values


BRADLEY_TERRY = Exercise(
    "5, 11",
    "the loss of a reward model on pairs",
    "posttrain.algorithms.objectives.reward.bradley_terry",
    "bradley_terry(chosen, rejected)",
    """\
Bradley-Terry (chapter 5, reward models): the loss of a pair.

loss = - log sigmoid(r_chosen - r_rejected)

chosen, rejected: scores [P]. Return [P], without a mean. Differences of -800 are among the cases.
""",
    _bradley_terry,
    {
        "pairs in and out of order": (numbers([1.0, 0.0, -0.5]), numbers([0.0, 2.0, -0.5])),
        "a difference of -800": (numbers([-400.0, 3.0]), numbers([400.0, 1.0])),
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
    batch = batch_of(mask, 2, ref_logprobs=ref_logprobs)
    return preference.dpo(Outputs(logprobs), batch, beta=beta, length_normalized=by_length).values


_PAIRS = (
    numbers([[-9.0, -1.0, -2.0, -0.5], [-9.0, -0.5, -9.0, -9.0], [-9.0, -1.0, -9.0, -9.0], [-9.0, -3.0, -1.0, -9.0]]),
    numbers([[-1.0, -2.0, -2.5, -1.0], [-8.0, -0.4, -1.0, -1.0], [-1.0, -0.5, -1.0, -1.0], [-7.0, -2.5, -1.5, -1.0]]),
    bits("0111", "0100", "0100", "0110"),
)

DPO = Exercise(
    "8",
    "the loss of direct preference optimization",
    "posttrain.algorithms.objectives.preference.dpo",
    "dpo(logprobs, ref_logprobs, mask, beta)",
    """\
Direct preference optimization (chapter 8).

log-ratio(y) = sum over the trained tokens of y of (log pi - log pi_ref)
loss = - log sigmoid(beta * (log-ratio(chosen) - log-ratio(rejected)))

logprobs, ref_logprobs: [2P, T], rows alternate: chosen, rejected, chosen, ...; mask: bool [2P, T].
Return [P], without a mean.
""",
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
    "pass_at_k(n, num_correct, k)",
    """\
pass@k (chapter 16, evaluation): the unbiased estimate from n samples of one problem.

pass@k = 1 - C(n - c, k) / C(n, k): the chance that k of the n samples, taken without
replacement, hold one of the c correct ones. 1 where fewer than k samples are wrong.

n, num_correct, k: whole numbers. Return a number.
""",
    measures.pass_at_k,
    {"3 of 16 correct": (16, 3, 4), "none correct": (8, 0, 2), "too few wrong for k": (8, 6, 4), "k = 1": (5, 2, 1)},
    {
        "1 - (1 - c/n)^k is biased: it takes the same sample more than once": lambda n, c, k: 1 - (1 - c / n) ** k,
        "this is 1 as soon as one of the n samples is correct; only k of them count": lambda n, c, k: float(c > 0),
        "this adds up k chances (k c / n); they overlap": lambda n, c, k: min(1.0, k * c / n),
        "this is the chance that ALL k samples are correct": lambda n, c, k: math.comb(c, k) / math.comb(n, k),
    },
    needs_torch=False,
)  # fmt: skip


def _first_of_tied(scores: list[float], correct: list[float], k: int) -> float:
    return measures.best_of_n([score - 1e-9 * i for i, score in enumerate(scores)], correct, k)


BEST_OF_N = Exercise(
    "9, 14",
    "what choosing by a score is worth, for any number of answers",
    "posttrain.evaluation.statistics.best_of_n",
    "best_of_n(scores, right, k)",
    """\
Best of k (chapter 9, rejection sampling; chapter 14, over-optimization).

A reward model scores n answers to a problem. Return how often the top-scored of k of them is
correct: the mean over all subsets of k of the n answers. Equal scores share the place:
their mean correctness counts.

scores, right: n numbers each (right: 1 or 0); k: a whole number. Return a number.
""",
    measures.best_of_n,
    {
        "k = 2 of 4": ([0.1, 0.5, 0.9, 0.3], [0.0, 1.0, 0.0, 0.0], 2),
        "equal scores": ([1.0, 1.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.0], 3),
    },
    {
        "you chose among all n answers; take the mean over subsets of k": lambda scores, correct_ones, k: (
            measures.best_of_n(scores, correct_ones, len(scores))
        ),
        "you chose among the first k answers; take the mean over all subsets of k": lambda scores, correct_ones, k: (
            measures.best_of_n(scores[:k], correct_ones[:k], k)
        ),
        "this is the share of correct answers: a random pick, without the scores": lambda scores, correct_ones, k: (
            statistics.fmean(correct_ones)
        ),
        "of equal scores you took the first; their mean correctness counts": _first_of_tied,
        "you chose the lowest score": lambda scores, correct_ones, k: measures.best_of_n(
            [-s for s in scores], correct_ones, k
        ),
    },
    needs_torch=False,
)


def _first_match(text: str, strip: bool = True) -> str | None:
    found = re.search("<answer>(.*?)</answer>", text, re.DOTALL)
    if found is None:
        return None
    if strip:
        return found[1].strip()
    return found[1]


def _behind(text: str, reasoning: str) -> str:
    return text.partition(f"</{reasoning}>")[2]


TAGGED_ANSWER = Exercise(
    "7",
    "the answer in a model's output, as a verifier reads it",
    "posttrain.data.render.templates.tagged_answer",
    "tagged_answer(text, reasoning)",
    """\
Answer extraction (chapter 7, reasoning): what a verifier reads.

Return the text of the first complete <answer> ... </answer> AFTER the reasoning is first closed
(by </think>, say), stripped; of nested ones the innermost. None if the reasoning is not closed,
there is no answer, or it is blank.

text: what the model wrote. reasoning: the name of the reasoning's tag, such as "think".
""",
    templates.tagged_answer,
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
            lambda text, reasoning: templates.tagged_answer(f"</{reasoning}>{text}", reasoning)
        ),
        "you took the last answer; with the first, a model cannot hedge by adding more": lambda text, reasoning: (
            templates.tagged_answer(f"</{reasoning}>{text[max(text.rfind('<answer>'), 0):]}", reasoning)
            if _behind(text, reasoning) else None
        ),
        "of nested answers you took the outer one; its text holds a tag": lambda text, reasoning: (
            _first_match(_behind(text, reasoning)) or None
        ),
        "you did not strip the answer": lambda text, reasoning: (
            templates.tagged_answer(text, reasoning) and _first_match(
                "<answer>" + _behind(text, reasoning).partition("</answer>")[0].rpartition("<answer>")[2] + "</answer>",
                strip=False,
            )
        ),
        "a blank answer is no answer: return None": lambda text, reasoning: (
            templates.tagged_answer(text, reasoning) or ("" if "</answer>" in _behind(text, reasoning) else None)
        ),
    },
    needs_torch=False,
)  # fmt: skip
