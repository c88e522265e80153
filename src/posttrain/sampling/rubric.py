"""Rewards of a judge that is asked more than one number: criteria of the row, and the order of a group."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import DataError
from posttrain.graders.grading import MeasuredReward
from posttrain.randomness import permutation
from posttrain.registry import register
from posttrain.sampling.judge_questions import (
    MAX_RANKED,
    RUBRIC,
    ask_criterion,
    ask_ranking,
    mark_of,
    numbered_order,
)
from posttrain.sampling.llm_judge import Judge, Opinion, check_failures, judge_for, prepare_judge
from posttrain.store.rollouts import prompt_text
from posttrain.types import Example
from posttrain.untrusted import cut_end

_TEXT_KEYS = ("criterion", "description", "text")
_WEIGHT_KEYS = ("weight", "points")
_MAX_CRITERIA = 100


@dataclass(frozen=True, slots=True)
class Criterion:
    """A statement about an answer, and what it is worth if it is true; a negative weight is of a fault."""

    text: str
    weight: float = 1.0


def read_criteria(value: object, place: str) -> list[Criterion]:
    """Read the criteria of a row: a list of texts, or of mappings with a text and a weight (1 by default).

    A text is under ``criterion``, ``description`` or ``text``, a weight under ``weight`` or ``points``; a list may be
    written as JSON.

    Raises:
        DataError: no list, no criterion, one without text, a weight that is no number, or no weight above 0.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not value:
        raise DataError(place, "no criteria; give a list such as [{criterion: names the year, weight: 2}]")
    if len(value) > _MAX_CRITERIA:
        raise DataError(place, f"{len(value)} criteria; at most {_MAX_CRITERIA} are judged")
    criteria = [_read_criterion(one, f"{place}, criterion {number}") for number, one in enumerate(value, start=1)]
    if not any(one.weight > 0 for one in criteria):
        raise DataError(place, "no criterion has a weight above 0, so that nothing could be earned; give one a weight")
    return criteria


def _read_criterion(value: object, place: str) -> Criterion:
    if isinstance(value, str):
        value = {"criterion": value}
    if not isinstance(value, dict):
        raise DataError(place, f"{cut_end(repr(value), 80)} is no text and no mapping")
    text = next((value[key] for key in _TEXT_KEYS if value.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(place, f"no text; give it under {_TEXT_KEYS[0]!r}")
    weight = next((value[key] for key in _WEIGHT_KEYS if value.get(key) is not None), 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise DataError(place, f"weight {cut_end(repr(weight), 80)} is no finite number")
    if weight == 0:
        raise DataError(place, "weight 0: it would be asked and not counted; leave it out, or give it a weight")
    return Criterion(text, float(weight))


def refuse_missing_criteria(examples: Iterable[Example], place: str, *, key: str = "rubric", **options: Any) -> None:
    """Refuse rows without criteria, before a model is loaded.

    Raises:
        DataError: with the first such row.
    """
    for example in examples:
        criteria_of(example, key, place)


def criteria_of(example: Example, key: str, place: str) -> list[Criterion]:
    """Return the criteria under a ``key`` of a row."""
    return read_criteria(example.meta.get(key), f"{place}: row {example.id}, key {key!r}")


def weighted_share(criteria: Sequence[Criterion], met: Sequence[float | None]) -> float | None:
    """``Σ_k w_k y_k / Σ_k max(w_k, 0)`` over the criteria that were judged; None if none of a positive weight was."""
    earned = 0.0
    most = 0.0
    for criterion, value in zip(criteria, met, strict=True):
        if value is None:
            continue
        earned += criterion.weight * value
        most += max(0.0, criterion.weight)
    if most == 0:
        return None
    return earned / most


@register("reward", batched=True, asks_a_model=True, prepare=prepare_judge, refuses_rows=refuse_missing_criteria)
def rubric(
    example: Sequence[Example],
    text: Sequence[str],
    folder: Sequence[Path | None],
    where: str = "judge",
    *,
    url: str | None = None,
    model: str | None = None,
    key: str = "rubric",
    known_answer: bool = False,
    structured: bool = True,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] = 1024,
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8,
    retries: Annotated[int, Field(ge=0, le=20)] = 4,
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0,
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.1,
) -> list[MeasuredReward]:
    """The weighted share of a row's criteria that a judge finds met: ``r = Σ_k w_k y_k / Σ_k max(w_k, 0)``.

    y_k is 1 for yes and 0 for no; each criterion is a question. A fault has a negative weight, so r may be below 0. A
    row has its criteria under ``key``: ``[{criterion: ..., weight: 2}, ...]``, or texts, which weigh 1. ``rubric:k`` is
    y_k. A criterion that is not judged leaves both sums (``rubric_unanswered`` counts them); an answer without a
    judged one of positive weight gets the mean of the others to its prompt.

    Args:
        url: the address of a server with OpenAI's chat endpoint.
        model: its name there; by default the only one that the server has.
        key: of the row, with its criteria.
        known_answer: show the judge the gold answer where there is one.
        structured: send the schema of the reply along; false for servers that refuse it.
        temperature: of the judge; null leaves it to the server.
        max_tokens: of the judge's reply.
        concurrency: questions under way at a time.
        retries: how often a question is asked again, with growing pauses.
        timeout_seconds: how long one attempt may take.
        max_failures: the share of a batch's questions that may go unanswered; above it the run ends.

    Source: rubrics as rewards (Gunjal et al. 2025, eq. 1) with the negative criteria of HealthBench (Arora et al.
    2025). Departure from the latter: r is not cut at 0.

    Raises:
        UsageError: the judge cannot be asked. RunFailure: more of it failed than may.
    """
    limits = (temperature, max_tokens, concurrency, retries, timeout_seconds)
    judge = judge_for(url, model, structured, *limits, where, folder[0])
    criteria = [criteria_of(one, key, where) for one in example]
    questions = []
    for one, answer, own in zip(example, text, criteria, strict=True):
        gold = None
        if known_answer:
            gold = one.answer
        questions += [ask_criterion(prompt_text(one), answer, criterion.text, gold=gold) for criterion in own]
    opinions = judge.ask(questions)
    check_failures(opinions, max_failures, judge)
    return _of_criteria([one.id for one in example], criteria, opinions)


def _of_criteria(
    ids: Sequence[str], criteria: Sequence[Sequence[Criterion]], opinions: Sequence[Opinion]
) -> list[MeasuredReward]:
    """Return the reward of each answer; ``opinions`` of one after the other."""
    own_opinions: list[Sequence[Opinion]] = []
    shares: list[float | None] = []
    of_prompt: dict[str, list[float]] = {}
    start = 0
    for name, own in zip(ids, criteria, strict=True):
        judged = opinions[start : start + len(own)]
        start += len(own)
        share = weighted_share(own, [opinion.value for opinion in judged])
        own_opinions.append(judged)
        shares.append(share)
        if share is not None:
            of_prompt.setdefault(name, []).append(share)
    known = [share for share in shares if share is not None]
    results = []
    for name, share, judged in zip(ids, shares, own_opinions, strict=True):
        unanswered = [opinion for opinion in judged if opinion.value is None]
        info = {f"rubric:{k}": opinion.value for k, opinion in enumerate(judged, start=1) if opinion.value is not None}
        info["rubric_unanswered"] = float(len(unanswered))
        info["judge_tokens_in"] = float(sum(opinion.tokens_in for opinion in judged))
        info["judge_tokens_out"] = float(sum(opinion.tokens_out for opinion in judged))
        value = share
        if value is None:
            value = statistics.fmean(of_prompt.get(name, known) or [0.0])
        failure = None
        if unanswered:
            failure = unanswered[0].failure
        results.append(MeasuredReward(value, info, failure))
    return results


@register("reward", batched=True, asks_a_model=True, prepare=prepare_judge, max_group=MAX_RANKED)
def judge_ranking(
    example: Sequence[Example],
    text: Sequence[str],
    folder: Sequence[Path | None],
    where: str = "judge",
    *,
    url: str | None = None,
    model: str | None = None,
    rubric: str = RUBRIC,
    both_orders: bool = True,
    structured: bool = True,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] = 1024,
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8,
    retries: Annotated[int, Field(ge=0, le=20)] = 4,
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0,
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.1,
) -> list[MeasuredReward]:
    """The place of an answer among the answers to its prompt, which a judge ranks: ``r = (n − 1 − k) / (n − 1)``.

    k counts the better of n different answers; equal ones share a place, and a single one, which is not asked about,
    gets 0.5. The answers of a group are in one question, in an order that follows from their texts. ``judge_first``:
    the mean reward of those that stood first, 0.5 without a bias. A group that is not judged gets 0.5.

    Args:
        url: the address of a server with OpenAI's chat endpoint.
        model: its name there; by default the only one that the server has.
        rubric: the standard of the order.
        both_orders: ask a second time in the reverse order, and take the mean.
        structured: send the schema of the reply along; false for servers that refuse it.
        temperature: of the judge; null leaves it to the server.
        max_tokens: of the judge's reply.
        concurrency: questions under way at a time.
        retries: how often a question is asked again, with growing pauses.
        timeout_seconds: how long one attempt may take.
        max_failures: the share of a batch's questions that may go unanswered; above it the run ends.

    Source: group-relative judging, as RULER (OpenPipe 2025) does with scores; ranks, both orders and the wording are
    ours.

    Raises:
        UsageError: the judge cannot be asked. RunFailure: more of it failed than may.
    """
    limits = (temperature, max_tokens, concurrency, retries, timeout_seconds)
    judge = judge_for(url, model, structured, *limits, where, folder[0])
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(example):
        groups.setdefault(one.id, []).append(place)
    rankings: list[Ranking] = []
    for places in groups.values():
        texts = list(dict.fromkeys(text[place] for place in places))
        for start, end in pairwise(_bounds(len(texts))):
            prompt = prompt_text(example[places[0]])
            rankings.append(Ranking(prompt, texts[start:end], [p for p in places if text[p] in texts[start:end]]))
    return _rank(judge, rankings, text, rubric, both_orders=both_orders, max_failures=max_failures)


def _bounds(count: int) -> list[int]:
    """Return where parts of at most ``MAX_RANKED`` answers begin and end, for a prompt that is drawn twice."""
    parts = max(1, math.ceil(count / MAX_RANKED))
    return [count * part // parts for part in range(parts + 1)]


@dataclass(frozen=True)
class Ranking:
    """Different answers to a prompt that are ranked together, and the places that they have in the batch."""

    prompt: str
    texts: Sequence[str]
    places: Sequence[int]

    def orders(self, *, both: bool) -> list[list[int]]:
        """Return the orders in which the judge reads the answers; none of a single one."""
        if len(self.texts) < 2:
            return []
        seed = int(mark_of(sorted(self.texts)).removeprefix("text-"), 16)
        first = [int(i) for i in permutation(seed, "order of answers", 0, len(self.texts))]
        if not both:
            return [first]
        return [first, first[::-1]]


def _rank(
    judge: Judge,
    rankings: Sequence[Ranking],
    text: Sequence[str],
    rubric: str,
    *,
    both_orders: bool,
    max_failures: float,
) -> list[MeasuredReward]:
    shown = [ranking.orders(both=both_orders) for ranking in rankings]
    questions = []
    for ranking, orders in zip(rankings, shown, strict=True):
        for order in orders:
            questions.append(ask_ranking(ranking.prompt, [ranking.texts[i] for i in order], rubric=rubric))
    opinions = judge.ask(questions)
    check_failures(opinions, max_failures, judge)
    results: dict[int, MeasuredReward] = {}
    start = 0
    for ranking, orders in zip(rankings, shown, strict=True):
        own = opinions[start : start + len(orders)]
        start += len(orders)
        rewards = _mean_places(len(ranking.texts), orders, own)
        info = {
            "judge_failed": float(bool(orders) and all(opinion.value is None for opinion in own)),
            "judge_tokens_in": float(sum(opinion.tokens_in for opinion in own)) / len(ranking.places),
            "judge_tokens_out": float(sum(opinion.tokens_out for opinion in own)) / len(ranking.places),
            "judge_first": statistics.fmean([rewards[order[0]] for order in orders] or [0.5]),
        }
        failures = [opinion.failure for opinion in own if opinion.failure is not None]
        failure = None
        if failures:
            failure = failures[0]
        for place in ranking.places:
            results[place] = MeasuredReward(rewards[ranking.texts.index(text[place])], info, failure)
    return [results[place] for place in range(len(text))]


def _mean_places(count: int, orders: Sequence[Sequence[int]], opinions: Sequence[Opinion]) -> list[float]:
    """Return ``(n − 1 − k) / (n − 1)`` of each answer, the mean over the orders that were judged; else 0.5."""
    of_answer: list[list[float]] = [[] for _ in range(count)]
    for order, opinion in zip(orders, opinions, strict=True):
        if opinion.value is None:
            continue
        for k, shown in enumerate(numbered_order(int(opinion.value), count)):
            of_answer[order[shown]].append((count - 1 - k) / (count - 1))
    return [statistics.fmean(values or [0.5]) for values in of_answer]
