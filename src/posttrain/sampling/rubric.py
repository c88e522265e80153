"""Judge rewards from several judgments: row-specific criteria and rankings within groups."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from posttrain.sampling.llm_judge import (
    Concurrency,
    FailureShare,
    Judge,
    Opinion,
    ReplyTokens,
    Retries,
    Temperature,
    TimeoutSeconds,
    check_failures,
    judge_for,
    prepare_judge,
)
from posttrain.store.rollouts import prompt_text
from posttrain.types import Example
from posttrain.untrusted import cut_end

_TEXT_KEYS = ("criterion", "description", "text")
_WEIGHT_KEYS = ("weight", "points")
_MAX_CRITERIA = 100


@dataclass(frozen=True, slots=True)
class Criterion:
    """A statement to check against an answer, with its weight. Negative weights mark faults."""

    text: str
    weight: float = 1.0


def read_criteria(value: object, place: str) -> list[Criterion]:
    """Parse criteria: a list of strings, or of mappings with text and weight (default 1).

    Text is read from ``criterion``, ``description`` or ``text``, weights from ``weight`` or ``points``. Lists may be
    encoded as JSON.

    Raises:
        DataError: not a list, empty, missing text, an invalid weight, or no positive weight.
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
        raise DataError(place, f"{cut_end(repr(value), 80)} is neither a string nor a mapping")
    text = next((value[key] for key in _TEXT_KEYS if value.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(place, f"no text; give it under {_TEXT_KEYS[0]!r}")
    weight = next((value[key] for key in _WEIGHT_KEYS if value.get(key) is not None), 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise DataError(place, f"weight {cut_end(repr(weight), 80)} is not a finite number")
    if weight == 0:
        raise DataError(place, "weight 0 would be judged but never counted; remove it, or set a nonzero weight")
    return Criterion(text, float(weight))


def refuse_missing_criteria(examples: Iterable[Example], place: str, *, key: str = "rubric", **options: Any) -> None:
    """Refuse rows without valid criteria before loading a model.

    Raises:
        DataError: names the first invalid row.
    """
    for example in examples:
        criteria_of(example, key, place)


def criteria_of(example: Example, key: str, place: str) -> list[Criterion]:
    """Parse a row's criteria from ``key``."""
    return read_criteria(example.meta.get(key), f"{place}: row {example.id}, key {key!r}")


def weighted_share(criteria: Sequence[Criterion], met: Sequence[float | None]) -> float | None:
    """Compute ``Σ_k w_k y_k / Σ_k max(w_k, 0)`` over judged criteria; None without a judged positive weight."""
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
    temperature: Temperature = 0.0,
    max_tokens: ReplyTokens = 1024,
    concurrency: Concurrency = 8,
    retries: Retries = 4,
    timeout_seconds: TimeoutSeconds = 120.0,
    max_failures: FailureShare = 0.1,
) -> list[MeasuredReward]:
    """Weighted fraction of criteria met, according to an LLM judge: ``r = Σ_k w_k y_k / Σ_k max(w_k, 0)``.

    y_k is 1 for yes and 0 for no; each criterion is judged separately. Faults have negative weights, so r may be
    negative. Rows list criteria under ``key``: ``[{criterion: ..., weight: 2}, ...]``, or strings with weight 1.
    ``rubric:k`` records y_k. Unjudged criteria are removed from both sums and counted by ``rubric_unanswered``. If no
    positive criterion was judged, r becomes the average for its prompt, or else for its batch.

    Args:
        url: server URL with an OpenAI chat endpoint.
        model: served model name; may be omitted if only one is served.
        key: row field containing criteria.
        known_answer: show gold answers to the judge if available.
        structured: request replies with a JSON schema; set false for servers without support.
        temperature: judge temperature; null uses the server default.
        max_tokens: maximum tokens per judge reply.
        concurrency: maximum concurrent requests.
        retries: retries per request, with increasing delays.
        timeout_seconds: timeout per attempt.
        max_failures: fraction of unanswered requests tolerated per batch; training stops above it.

    Source: rubrics as rewards (Gunjal et al. 2025, eq. 1) with negative criteria from HealthBench (Arora et al. 2025).
    Departure from HealthBench: r is not clipped at 0.

    Raises:
        UsageError: judge unavailable. RunFailure: too many requests failed.
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
    """Combine consecutive opinions into one reward per answer."""
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
    temperature: Temperature = 0.0,
    max_tokens: ReplyTokens = 1024,
    concurrency: Concurrency = 8,
    retries: Retries = 4,
    timeout_seconds: TimeoutSeconds = 120.0,
    max_failures: FailureShare = 0.1,
) -> list[MeasuredReward]:
    """Rank within a group, according to an LLM judge: ``r = (n − 1 − k) / (n − 1)``.

    k counts better answers among n distinct ones. Duplicates share a rank; if all are identical, they get 0.5 without
    a request. Each group is ranked in one request, in an order derived from its texts. ``judge_first``: mean reward
    for answers shown first; 0.5 means no position bias. Unjudged groups get 0.5.

    Args:
        url: server URL with an OpenAI chat endpoint.
        model: served model name; may be omitted if only one is served.
        rubric: ranking criterion.
        both_orders: rank again in reverse order and average.
        structured: request replies with a JSON schema; set false for servers without support.
        temperature: judge temperature; null uses the server default.
        max_tokens: maximum tokens per judge reply.
        concurrency: maximum concurrent requests.
        retries: retries per request, with increasing delays.
        timeout_seconds: timeout per attempt.
        max_failures: fraction of unanswered requests tolerated per batch; training stops above it.

    Source: group-relative judging as in RULER (OpenPipe 2025), which uses scores; ranks, both orders and wording are
    ours.

    Raises:
        UsageError: judge unavailable. RunFailure: too many requests failed.
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
    """Split answers into parts of at most ``MAX_RANKED``, in case a prompt is drawn twice. Returns boundaries."""
    parts = max(1, math.ceil(count / MAX_RANKED))
    return [count * part // parts for part in range(parts + 1)]


@dataclass(frozen=True)
class Ranking:
    """Distinct answers to rank together, and their positions within the batch."""

    prompt: str
    texts: Sequence[str]
    places: Sequence[int]

    def orders(self, *, both: bool) -> list[list[int]]:
        """Build display orders for the judge; empty for a single answer."""
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
    """Average ``(n − 1 − k) / (n − 1)`` per answer over judged orders; 0.5 if none were judged."""
    of_answer: list[list[float]] = [[] for _ in range(count)]
    for order, opinion in zip(orders, opinions, strict=True):
        if opinion.value is None:
            continue
        for k, shown in enumerate(numbered_order(int(opinion.value), count)):
            of_answer[order[shown]].append((count - 1 - k) / (count - 1))
    return [statistics.fmean(values or [0.5]) for values in of_answer]
