"""Head-to-head evaluations: how far each policy moved, and how often its answers beat those of the start.

The judge is a reward model that no policy was trained against, so a policy that has learnt the mistakes of the proxy
wins by the proxy alone. Most judges like longer answers, so lengths stand next to the win rates.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrain.errors import DataError
from posttrain.evals.ranking import pair_wins
from posttrain.evals.statistics import half_width, summarize_seeds
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.store.reading import read_record
from posttrain.sweeps.part import Part
from posttrain.sweeps.plan import ITEMS, RESULTS
from posttrain.untrusted import first_fault

NUM_SAMPLES = 4
MAX_ITEMS_BYTES = 1 << 30
# measure -> (column, True for a share)
MEASURES: Mapping[str, tuple[str, bool]] = {
    "win_rate": ("wins, by the judge", True),
    "win_rate_similar": ("of answers equally long", True),
    "win_rate_proxy": ("by the proxy", True),
    "reward_judge": ("reward gained, judge", False),
    "reward_proxy": ("reward gained, proxy", False),
    "kl": ("KL from the start", False),
    "length_ratio": ("length, start = 1", False),
}


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval: Student's t over seeds, or over prompts where there is one seed."""

    mean: float
    low: float
    high: float


# What an evaluation against another model has written, as far as it is read here.
Score = Annotated[float, Field(allow_inf_nan=False)] | None


class _Written(BaseModel):
    model_config = ConfigDict(strict=True)


class WrittenAnswer(_Written):
    """An answer with the judge's score and those of the other judges by name."""

    text: str
    score: Score
    scores: dict[str, Score] = {}


class WrittenItem(_Written):
    """A prompt with the answers of the policy (a) and of the start (b)."""

    index: int
    question: str
    answer: str | None = None
    a: list[WrittenAnswer] = Field(min_length=1)
    b: list[WrittenAnswer] = Field(min_length=1)


class _WrittenResults(_Written):
    results: dict[str, Any]
    others: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """A policy of one seed against the start. ``measures`` by name with their intervals over prompts."""

    row: str
    seed: int
    measures: Mapping[str, Estimate]
    items: list[WrittenItem]


@dataclass(frozen=True)
class PolicyResult:
    """One row over its seeds."""

    row: str
    comparisons: list[Comparison]
    measures: Mapping[str, Estimate]


def read_comparison(folder: Path, row: str, seed: int) -> Comparison:
    """The results that an evaluation of a policy against the start has written.

    The proxy is the one other judge, under whatever path it had then: a sweep's folder may be moved.

    Raises:
        DataError: a file is damaged.
    """
    try:
        content = _WrittenResults.model_validate_json(read_record(folder / RESULTS))
        lines = read_record(folder / ITEMS, MAX_ITEMS_BYTES).splitlines()
        items = [WrittenItem.model_validate_json(line) for line in lines]
        [(proxy, other)] = content.others.items()
        results = content.results
        own, start = (_number(results, f"characters_{side}") for side in "ab")
        ratio = own / start if start else float("nan")
        measures = {
            "win_rate": _stored(results, "win_rate"),
            "win_rate_proxy": _stored(other, "win_rate"),
            "reward_judge": reward_gain(items, None),
            "reward_proxy": reward_gain(items, proxy),
            "length_ratio": Estimate(ratio, ratio, ratio),
        }
        for name, key in (("win_rate_similar", "win_rate_similar"), ("kl", "kl_ab")):
            if key in results:
                measures[name] = _stored(results, key)
        return Comparison(row, seed, measures, items)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else repr(error)
        raise DataError(folder, f"its files are damaged ({fault}); delete the folder and repeat") from None


def _stored(results: Mapping[str, Any], name: str) -> Estimate:
    return Estimate(_number(results, name), _number(results, f"{name}_low"), _number(results, f"{name}_high"))


def _number(results: Mapping[str, Any], name: str) -> float:
    value = results[name]
    if type(value) not in (int, float) or abs(value) > sys.float_info.max:  # of what does not exist it is NaN
        raise TypeError(f"{name} is {value!r:.40}")
    return float(value)


def reward_gain(items: Sequence[WrittenItem], judge: str | None) -> Estimate:
    """The mean score of a policy's answers minus that of the start's to the same prompts, in standard deviations of the
    scores of the start's answers; prompts with an answer that could not be scored are left out.

    ``judge``: the name of another judge; None: the one that decides who wins.

    Raises:
        ValueError: no prompt has scores.
    """

    def scores(answers: Sequence[WrittenAnswer]) -> list[float]:
        values = [answer.score if judge is None else answer.scores[judge] for answer in answers]
        return [] if None in values else [value for value in values if value is not None]

    pairs = [(own, start) for item in items if (own := scores(item.a)) and (start := scores(item.b))]
    if not pairs:
        raise ValueError("no prompt whose answers were all scored")
    gains = [statistics.fmean(own) - statistics.fmean(start) for own, start in pairs]
    unit = statistics.pstdev([score for _, start in pairs for score in start]) or 1.0
    mean, half = statistics.fmean(gains) / unit, half_width(gains) / unit
    return Estimate(mean, mean - half, mean + half)


def over_seeds(estimates: Sequence[Estimate], *, is_share: bool = False) -> Estimate | None:
    """Mean and Student's t interval over seeds; of one seed its own interval; None for none."""
    if len(estimates) < 2:
        return estimates[0] if estimates else None
    summary = summarize_seeds([estimate.mean for estimate in estimates])
    assert summary is not None
    assert summary.half_width is not None
    low, high = summary.mean - summary.half_width, summary.mean + summary.half_width
    low, high = (max(0.0, low), min(1.0, high)) if is_share else (low, high)
    return Estimate(summary.mean, low, high)


def rank_policies(comparisons: Sequence[Comparison]) -> list[PolicyResult]:
    """Row by row, the best under the judge first."""
    results = []
    for row in dict.fromkeys(comparison.row for comparison in comparisons):
        own = [comparison for comparison in comparisons if comparison.row == row]
        measures = {}
        for name, (_, is_share) in MEASURES.items():
            estimate = over_seeds([c.measures[name] for c in own if name in c.measures], is_share=is_share)
            if estimate is not None:
                measures[name] = estimate
        results.append(PolicyResult(row, own, measures))
    return sorted(results, key=lambda result: -result.measures["win_rate"].mean)


def against_each_other(policies: Sequence[PolicyResult]) -> dict[tuple[str, str], Estimate]:
    """By pair of rows, how often the first one's answer scores higher under the judge, on prompts of both."""
    rates: dict[tuple[str, str], Estimate] = {}
    for left, right in combinations(policies, 2):
        others = {comparison.seed: comparison for comparison in right.comparisons}
        of_seed = []
        for own in left.comparisons:
            values = _wins(own, others[own.seed]) if own.seed in others else []
            if values:
                half = half_width(values) if len(values) > 1 else 1.0
                mean = statistics.fmean(values)
                of_seed.append(Estimate(mean, max(0.0, mean - half), min(1.0, mean + half)))
        estimate = over_seeds(of_seed, is_share=True)
        if estimate is not None:
            rates[left.row, right.row] = estimate
    return rates


def _wins(left: Comparison, right: Comparison) -> list[float]:
    """Wins prompt by prompt; answers that could not be scored lose."""

    def scores(item: WrittenItem) -> list[float]:
        return [float("-inf") if answer.score is None else answer.score for answer in item.a]

    others = {item.index: item for item in right.items}
    values = []
    for item in left.items:
        if item.index in others:
            pairs = [(x, y) for x in scores(item) for y in scores(others[item.index])]
            values.append(statistics.fmean(pair_wins([x for x, _ in pairs], [y for _, y in pairs])))
    return values


def show_estimate(estimate: Estimate | None, *, is_share: bool = False) -> str:
    """Write ``61.2 % [55.0, 67.1]``, or ``0.61 [0.50, 0.72]``."""
    if estimate is None:
        return NOTHING
    scale, places, unit = (100.0, 1, " %") if is_share else (1.0, 2, "")
    mean, low, high = (f"{value * scale:z.{places}f}" for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean}{unit}" + (f" [{low}, {high}]" if low != high else "")


def tables(policies: Sequence[PolicyResult], rates: Mapping[tuple[str, str], Estimate]) -> list[TextTable]:
    """Each policy against the start, and the policies against one another."""
    header = ["policy", "seeds", *(column for column, _ in MEASURES.values())]
    lines = [
        [
            one.row,
            str(len(one.comparisons)),
            *(show_estimate(one.measures.get(name), is_share=share) for name, (_, share) in MEASURES.items()),
        ]
        for one in policies
    ]
    made = [TextTable("Policies against the start", header, lines)]
    if rates:
        pairs = [[f"{left} over {right}", show_estimate(rate, is_share=True)] for (left, right), rate in rates.items()]
        made.append(TextTable("Policies against one another, by the judge", ["policies", "wins"], pairs))
    return made


def findings(policies: Sequence[PolicyResult], best: str) -> list[str]:
    """What the numbers say, a sentence each, and where the best model is."""
    lines = []
    for one in policies:
        rate, alike = one.measures["win_rate"], one.measures.get("win_rate_similar")
        verdict = "better than the start" if rate.low > 0.5 else "worse than the start" if rate.high < 0.5 else ""
        line = f"{one.row}: wins {show_estimate(rate, is_share=True)} by the judge: "
        line += verdict or "not distinguishable from the start"
        if verdict == "better than the start" and (alike is None or alike.low <= 0.5):
            line += "; among answers equally long that is not shown"
        if verdict != "better than the start" and one.measures["win_rate_proxy"].low > 0.5:
            line += "; it wins by the proxy alone, which it was trained against"
        lines.append(line)
    return [*lines, f"the best model, chosen by the judge, so its own figure is a little too high: {best}"]


def notes(judge: str, proxy: str, num_seeds: int) -> list[str]:
    """How to read the numbers."""
    over = "95 % Student-t intervals over seeds; a seed has its own reward models, policies and answers"
    over = over if num_seeds > 1 else "95 % intervals over prompts; of one seed, they do not say how seeds differ"
    return [
        f"judge: {judge}, which no policy was trained against; proxy: {proxy}, which policies that sample are "
        "rewarded by",
        "wins: how often the policy's answer scores above the start's to the same prompt; a tie counts one half, and "
        "an answer that cannot be scored loses. Equally long: lengths that differ by at most 10 % of the longer",
        "reward gained: policy less start, in standard deviations of the scores of the start's answers. KL: nats per "
        "answer, the exact sum over next-token distributions, on the policy's own answers",
        f"[ ]: {over}",
    ]


def head_to_head_part(policies: Sequence[PolicyResult], judge: str, proxy: str, weights: Mapping[str, str]) -> Part:
    """The part of a sweep's report about policies against the start. ``weights``: by ``ROW-seedN``."""
    rates = against_each_other(policies)
    winner = max(policies[0].comparisons, key=lambda comparison: comparison.measures["win_rate"].mean)
    best = weights[f"{winner.row}-seed{winner.seed}"]
    num_seeds = len({comparison.seed for one in policies for comparison in one.comparisons})

    def plain(measures: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
        return {name: {"mean": e.mean, "low": e.low, "high": e.high} for name, e in measures.items()}

    by_row = {
        one.row: plain(one.measures) | {"seeds": {str(c.seed): plain(c.measures) for c in one.comparisons}}
        for one in policies
    }
    against = plain({f"{left} over {right}": rate for (left, right), rate in rates.items()})
    data = {"best": best, "policies": by_row, "against": against}
    return Part(tables(policies, rates), findings(policies, best), notes(judge, proxy, num_seeds), data)


@dataclass(frozen=True)
class Sample:
    """A prompt with answers of several models: (model, text, score). ``gold``: the right answer, where there is one."""

    question: str
    gold: str | None
    answers: list[tuple[str, str, float | None]]


def choose_samples(comparisons: Sequence[Comparison]) -> list[Sample]:
    """The first prompts of the lowest seed, with the start's answer and each policy's, and the judge's scores."""
    first = min(comparison.seed for comparison in comparisons)
    own = [comparison for comparison in comparisons if comparison.seed == first]
    samples = []
    for item in own[0].items[:NUM_SAMPLES]:
        answers = [("start", item.b[0].text, item.b[0].score)]
        for comparison in own:
            same = next((one.a[0] for one in comparison.items if one.index == item.index), None)
            answers += [(comparison.row, same.text, same.score)] if same is not None else []
        samples.append(Sample(item.question, item.answer, answers))
    return samples
