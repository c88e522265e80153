"""Two models on the same prompts: whose answers win, and how far apart their distributions are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.evals.drift import MAX_TOKENS, answers_as_batch, kl_of_states
from posttrain.evals.ranking import pair_wins
from posttrain.evals.statistics import Z_95, item_interval, standard_error
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.types import Rollout

# Answers whose lengths differ by at most this share of the longer one count as equally long.
SIMILAR_LENGTH = 0.1

Judge = Callable[[Sequence[Rollout]], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Contest:
    """What two models, A and B, answered to the prompt of item ``index``: one or several answers each."""

    index: int
    a: tuple[Rollout, ...]
    b: tuple[Rollout, ...]


@dataclass(slots=True)
class WinRate:
    """``results`` by name, and one record per item."""

    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)


def pair_up(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[Contest]:
    """The items that both models have answered, by ``Rollout.prompt_index``, in order."""
    found: tuple[dict[int, list[Rollout]], dict[int, list[Rollout]]] = ({}, {})
    for side, rollouts in zip(found, (a, b), strict=True):
        for rollout in rollouts:
            side.setdefault(rollout.prompt_index, []).append(rollout)
    return [Contest(i, tuple(found[0][i]), tuple(found[1][i])) for i in sorted(found[0].keys() & found[1].keys())]


def judge_by_grade(rollouts: Sequence[Rollout]) -> list[float]:
    """1 for an answer that the task's grader finds right, else 0."""
    return [float(rollout.outcome == "right") for rollout in rollouts]


def measure_wins(contests: Sequence[Contest], judge: Judge) -> WinRate:
    """How often an answer of A is judged better than one of B; a tie counts one half.

    Within an item every answer of A meets every answer of B; the mean of these is one number per item, and the
    intervals count items. An answer that the judge cannot score loses against one that it can (``unscored`` counts
    them).

    ``win_rate``, with its parts ``wins``, ``ties``, ``losses``. ``characters_a``, ``characters_b``: mean lengths.
    Judges like long answers, therefore also ``win_rate_similar``: over meetings of answers whose lengths differ by
    at most 10 % of the longer, in the ``n_similar`` items that have some.

    Raises:
        ValueError: no item.
    """
    if not contests:
        raise ValueError("no item that both models answered")
    found = WinRate()
    answers = [rollout for contest in contests for rollout in (*contest.a, *contest.b)]
    scores = iter(judge(answers))
    similar: list[float] = []
    unscored = 0
    for contest in contests:
        of_a, of_b = ([next(scores) for _ in side] for side in (contest.a, contest.b))
        unscored += sum(score is None for score in (*of_a, *of_b))
        meetings = [(i, j) for i in range(len(of_a)) for j in range(len(of_b))]
        outcomes = pair_wins([_number(of_a[i]) for i, _ in meetings], [_number(of_b[j]) for _, j in meetings])
        lengths = [[len(rollout.text) for rollout in side] for side in (contest.a, contest.b)]
        alike = [w for w, (i, j) in zip(outcomes, meetings, strict=True) if _similar(lengths[0][i], lengths[1][j])]
        item = _item(contest, of_a, of_b, outcomes) | {"num_similar": len(alike)}
        if alike:
            similar.append(statistics.fmean(alike))
            item["win_rate_similar"] = similar[-1]
        found.items.append(item)
    draws = max(1, min(len(contest.a) for contest in contests), min(len(contest.b) for contest in contests))
    found.results = {"n": float(len(contests)), "unscored": unscored / len(answers)}
    found.results |= _share("win_rate", [item["win_rate"] for item in found.items], draws)
    for name in ("wins", "ties", "losses", "characters_a", "characters_b"):
        found.results[name] = statistics.fmean(item[name] for item in found.items)
    found.results["n_similar"] = float(len(similar))
    if similar:
        found.results |= _share("win_rate_similar", similar, draws)
    return found


def _item(
    contest: Contest, of_a: Sequence[float | None], of_b: Sequence[float | None], outcomes: Sequence[float]
) -> dict[str, Any]:
    example = contest.a[0].example
    return {
        "id": example.id,
        "index": contest.index,
        "win_rate": statistics.fmean(outcomes),
        "wins": outcomes.count(1.0) / len(outcomes),
        "ties": outcomes.count(0.5) / len(outcomes),
        "losses": outcomes.count(0.0) / len(outcomes),
        "characters_a": statistics.fmean(len(rollout.text) for rollout in contest.a),
        "characters_b": statistics.fmean(len(rollout.text) for rollout in contest.b),
        "a": [_answer(rollout, score) for rollout, score in zip(contest.a, of_a, strict=True)],
        "b": [_answer(rollout, score) for rollout, score in zip(contest.b, of_b, strict=True)],
    }


def _answer(rollout: Rollout, score: float | None) -> dict[str, Any]:
    return {"text": rollout.text, "outcome": rollout.outcome, "extracted": rollout.extracted, "score": score}


def _number(score: float | None) -> float:
    return -math.inf if score is None else score


def _similar(left: int, right: int) -> bool:
    return abs(left - right) <= SIMILAR_LENGTH * max(left, right)


def _share(name: str, values: Sequence[float], draws: float) -> dict[str, float]:
    low, high = item_interval(values, draws)
    return {name: statistics.fmean(values), f"{name}_low": low, f"{name}_high": high}


@torch.no_grad()
def measure_kl(answers: Sequence[Rollout], own: Forward, other: Forward, *, tokens_per_micro: int) -> list[float]:
    """KL(own‖other) of each answer that ``own`` sampled, in nats: the sum over its tokens of the exact KL between the
    two next-token distributions (``evals/drift.py``), both at their ``Forward.temperature``.

    The mean over answers estimates the KL of the two distributions over whole answers.

    Raises:
        UsageError: the other model's vocabulary lacks a likely token.
    """
    batch = answers_as_batch(answers)
    found = [0.0] * len(answers)
    for rows in split_rows(batch, min(tokens_per_micro, MAX_TOKENS)):
        sums = kl_of_states(batch.select(rows), own, nullcontext(other)).sum(dim=1)
        for row, value in zip(rows, sums.tolist(), strict=True):
            found[row] = value
    return found


def summarize_kl(name: str, answers: Sequence[Rollout], kl: Sequence[float]) -> dict[str, float]:
    """``name`` per answer, with the interval of a mean over items (``_low``, ``_high``), and ``<name>_per_token``."""
    of_item: dict[int, list[float]] = {}
    for rollout, value in zip(answers, kl, strict=True):
        of_item.setdefault(rollout.prompt_index, []).append(value)
    means = [statistics.fmean(values) for values in of_item.values()]
    center, half = statistics.fmean(means), Z_95 * standard_error(means)
    tokens = sum(len(rollout.completion.ids) for rollout in answers)
    return {
        name: center,
        f"{name}_low": max(0.0, center - half),
        f"{name}_high": center + half,
        f"{name}_per_token": math.fsum(kl) / tokens,
    }
