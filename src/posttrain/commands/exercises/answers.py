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
Return bool [B, T]: True for tokens written by the model, including end tokens.
False: prompt, tool output, padding. mask[b, t] describes the token AT t.

prompt_lengths: B numbers. own[b][i]: True if the model wrote token i in completion b.
""",
    _response_mask,
    {
        "two rows of one turn": ([2, 4], [[True] * 3, [True] * 2]),
        "a tool answers in the first row": ([1, 3], [[True, True, False, False, True], [True]]),
    },
    {
        "you also train the prompt; only model output has a loss": lambda prompt_lengths, own: _response_mask(
            [1] * len(own), [[True] * (n - 1) + row for n, row in zip(prompt_lengths, own, strict=True)]
        ),
        "you train on tool output, which the model did not write": lambda prompt_lengths, own: _response_mask(
            prompt_lengths, [[True] * len(row) for row in own]
        ),
        "you train the padding": _from_prompt_on,
        "your mask is shifted by one: here mask[b, t] describes token t, not the following token": (
            lambda prompt_lengths, own: _response_mask(prompt_lengths, own).roll(-1, 1)
        ),
        "you drop every completion's last token; without trained end tokens, a model never stops": (
            lambda prompt_lengths, own: _without_last(_response_mask(prompt_lengths, own))
        ),
    },
)


def _bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    scores = torch.stack([chosen, rejected], 1).reshape(-1, 1)
    return reward.bradley_terry(Outputs(scores, scores=scores), batch_of(torch.ones_like(scores).bool(), 2)).values


BRADLEY_TERRY = Exercise(
    "5, 11",
    "reward model loss on pairs",
    "posttrain.algorithms.objectives.reward.bradley_terry",
    "bradley_terry(chosen, rejected)",
    """\
Bradley-Terry (chapter 5, reward models): loss per pair.

loss = - log sigmoid(r_chosen - r_rejected)

chosen, rejected: scores [P]. Return [P], without a mean. Test cases include differences of -800.
""",
    _bradley_terry,
    {
        "pairs in and out of order": (numbers([1.0, 0.0, -0.5]), numbers([0.0, 2.0, -0.5])),
        "a difference of -800": (numbers([-400.0, 3.0]), numbers([400.0, 1.0])),
    },
    {
        "chosen and rejected are swapped": lambda chosen, rejected: _bradley_terry(rejected, chosen),
        "sigmoid(-800) underflows to 0, so the logarithm is infinite; use logsigmoid": lambda chosen, rejected: (
            -torch.sigmoid(chosen - rejected).log()
        ),
        "wrong sign: this is the log-likelihood, but optimizers minimize": lambda chosen, rejected: logsigmoid(
            chosen - rejected
        ),
        "you returned a probability; the loss is minus its logarithm": lambda chosen, rejected: torch.sigmoid(
            chosen - rejected
        ),
        "this is 1 - sigmoid, whose gradient vanishes on badly wrong pairs; use -log sigmoid": (
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
    "direct preference optimization loss",
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
        "you averaged token log-ratios (length-normalized DPO); DPO sums them": lambda new, ref, mask, beta: _dpo(
            new, ref, mask, beta, True
        ),
        "you left out the reference": lambda new, ref, mask, beta: _dpo(new, torch.zeros_like(ref), mask, beta),
        "chosen and rejected are swapped: chosen rows are 0, 2, 4 ...": lambda new, ref, mask, beta: _dpo(
            new.flip(0), ref.flip(0), mask.flip(0), beta
        ).flip(0),
        "beta belongs inside the sigmoid": lambda new, ref, mask, beta: beta * _dpo(new, ref, mask, 1.0),
        "you did not use beta": lambda new, ref, mask, beta: _dpo(new, ref, mask, 1.0),
        "you also summed untrained tokens": lambda new, ref, mask, beta: _dpo(new, ref, torch.ones_like(mask), beta),
    },
)

PASS_AT_K = Exercise(
    "16",
    "probability of a correct answer among k samples",
    "posttrain.evaluation.statistics.pass_at_k",
    "pass_at_k(n, num_correct, k)",
    """\
pass@k (chapter 16, evaluation): unbiased estimate from n samples for a problem.

pass@k = 1 - C(n - c, k) / C(n, k): probability that k of n samples, drawn without
replacement, include a correct one (c are correct). 1 if fewer than k samples are wrong.

n, num_correct, k: integers. Return a float.
""",
    measures.pass_at_k,
    {"3 of 16 correct": (16, 3, 4), "none correct": (8, 0, 2), "too few wrong for k": (8, 6, 4), "k = 1": (5, 2, 1)},
    {
        "1 - (1 - c/n)^k is biased: it draws with replacement": lambda n, c, k: 1 - (1 - c / n) ** k,
        "this is 1 if any of n samples is correct, but only k are drawn": lambda n, c, k: float(c > 0),
        "this adds up k chances (k c / n); they overlap": lambda n, c, k: min(1.0, k * c / n),
        "this is the chance that ALL k samples are correct": lambda n, c, k: math.comb(c, k) / math.comb(n, k),
    },
    needs_torch=False,
)  # fmt: skip


def _first_of_tied(scores: list[float], correct: list[float], k: int) -> float:
    return measures.best_of_n([score - 1e-9 * i for i, score in enumerate(scores)], correct, k)


BEST_OF_N = Exercise(
    "9, 14",
    "accuracy of best-of-k selection by score",
    "posttrain.evaluation.statistics.best_of_n",
    "best_of_n(scores, right, k)",
    """\
Best of k (chapter 9, rejection sampling; chapter 14, over-optimization).

A reward model scores n answers to a problem. Return the probability that the top-scored of
k answers is correct, averaged over all size-k subsets of the n answers. For tied scores,
average correctness over the tie.

scores, right: n numbers each (right: 1 or 0); k: an integer. Return a float.
""",
    measures.best_of_n,
    {
        "k = 2 of 4": ([0.1, 0.5, 0.9, 0.3], [0.0, 1.0, 0.0, 0.0], 2),
        "equal scores": ([1.0, 1.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.0], 3),
    },
    {
        "you chose among all n answers; average over size-k subsets instead": lambda scores, correct_ones, k: (
            measures.best_of_n(scores, correct_ones, len(scores))
        ),
        "you chose among the first k answers; average over size-k subsets instead": lambda scores, correct_ones, k: (
            measures.best_of_n(scores[:k], correct_ones[:k], k)
        ),
        "this is the share of correct answers: a random pick, without the scores": lambda scores, correct_ones, k: (
            statistics.fmean(correct_ones)
        ),
        "you took the first of tied answers; average correctness over ties instead": _first_of_tied,
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
    "answer extraction from model output",
    "posttrain.data.render.templates.tagged_answer",
    "tagged_answer(text, reasoning)",
    """\
Answer extraction (chapter 7, reasoning): what a verifier reads.

Return the stripped text in the first complete <answer> ... </answer> AFTER the reasoning is
first closed (for example by </think>). For nested answers, return the innermost. Return None
if the reasoning is never closed, or if the answer is missing or blank.

text: model output. reasoning: tag name for reasoning, such as "think".
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
        "you accept answers inside reasoning, which rewards listing candidates there": (
            lambda text, reasoning: templates.tagged_answer(f"</{reasoning}>{text}", reasoning)
        ),
        "you took the last answer; taking the first prevents hedging with more answers": lambda text, reasoning: (
            templates.tagged_answer(f"</{reasoning}>{text[max(text.rfind('<answer>'), 0):]}", reasoning)
            if _behind(text, reasoning) else None
        ),
        "you took the outer answer when nested, which still contains a tag": lambda text, reasoning: (
            _first_match(_behind(text, reasoning)) or None
        ),
        "you did not strip white space": lambda text, reasoning: (
            templates.tagged_answer(text, reasoning) and _first_match(
                "<answer>" + _behind(text, reasoning).partition("</answer>")[0].rpartition("<answer>")[2] + "</answer>",
                strip=False,
            )
        ),
        "blank answers do not count: return None": lambda text, reasoning: (
            templates.tagged_answer(text, reasoning) or ("" if "</answer>" in _behind(text, reasoning) else None)
        ),
    },
    needs_torch=False,
)  # fmt: skip
