"""What came out of a pipeline: how far each policy went, and whether what was learnt counts for someone else.

The judge is a reward model that no policy was trained against, so a policy that has learnt its proxy's mistakes wins
under the proxy alone. Whoever writes longer answers wins more often under most judges; so lengths stand beside.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrain.errors import DataError, RunFailure
from posttrain.evals.ranking import pair_wins
from posttrain.evals.statistics import half_width, summarize_seeds
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.store.reading import read_record
from posttrain.sweeps.pipeline import PipelinePlan
from posttrain.sweeps.plan import ITEMS, RESULTS, Training
from posttrain.sweeps.runner import Outcome
from posttrain.sweeps.sources import label_of_word
from posttrain.sweeps.study import Answer, Answers, StudyResults, begin_report, describe_training
from posttrain.untrusted import first_fault

NUM_SAMPLES = 4
MAX_ITEMS_BYTES = 1 << 30
# What is told of a policy: measure -> (column, whether it is a share).
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
    """A mean with its 95 % interval: Student's t over ``n`` seeds, or over prompts where there is one seed."""

    mean: float
    low: float
    high: float
    n: int


# What an evaluation against another model has written, as far as it is read here.
Score = Annotated[float, Field(allow_inf_nan=False)] | None


class _Written(BaseModel):
    model_config = ConfigDict(strict=True)


class _Answer(_Written):
    text: str
    score: Score
    scores: dict[str, Score] = {}


class _Item(_Written):
    index: int
    question: str
    answer: str | None = None
    a: list[_Answer] = Field(min_length=1)
    b: list[_Answer] = Field(min_length=1)


class _Contest(_Written):
    results: dict[str, Any]
    others: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Meeting:
    """A policy of one seed against the start. ``measures`` by name with their intervals over prompts."""

    method: str
    seed: int
    measures: Mapping[str, Estimate]
    items: list[dict[str, Any]]


@dataclass(frozen=True)
class Standing:
    """One method over its seeds."""

    method: str
    meetings: list[Meeting]
    measures: Mapping[str, Estimate]


def read_meeting(folder: Path, method: str, seed: int) -> Meeting:
    """What an evaluation of a policy against the start has left.

    The proxy is the one judge beside the judge, under whatever path it had then: a pipeline's folder may be moved.

    Raises:
        DataError: a file is damaged.
    """
    try:
        content = _Contest.model_validate_json(read_record(folder / RESULTS))
        lines = read_record(folder / ITEMS, MAX_ITEMS_BYTES).splitlines()
        items = [_Item.model_validate_json(line).model_dump() for line in lines]
        results = content.results
        [(proxy, other)] = content.others.items()
        measures = {
            "win_rate": _stated(results, "win_rate"),
            "win_rate_proxy": _stated(other, "win_rate"),
            "reward_judge": reward_gain(items, None),
            "reward_proxy": reward_gain(items, proxy),
            "length_ratio": _ratio(_number(results, "characters_a"), _number(results, "characters_b"), len(items)),
        }
        for name, source in (("win_rate_similar", results), ("kl", results)):
            key = {"kl": "kl_ab"}.get(name, name)
            if key in source:
                measures[name] = _stated(source, key)
        return Meeting(method, seed, measures, items)
    except ValidationError as error:
        raise DataError(folder, f"its files are damaged ({first_fault(error)}); delete the folder and repeat") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(folder, f"its files are damaged ({error!r}); delete the folder and repeat") from None


def _stated(results: Mapping[str, Any], name: str) -> Estimate:
    return Estimate(_number(results, name), _number(results, f"{name}_low"), _number(results, f"{name}_high"), 1)


def _number(results: Mapping[str, Any], name: str) -> float:
    value = results[name]
    if type(value) not in (int, float) or abs(value) > sys.float_info.max:  # of what does not exist it is NaN
        raise TypeError(f"{name} is {value!r:.40}")
    return float(value)


def _ratio(own: float, other: float, n: int) -> Estimate:
    ratio = own / other if other else float("nan")
    return Estimate(ratio, ratio, ratio, min(n, 1))


def reward_gain(items: Sequence[Mapping[str, Any]], judge: str | None) -> Estimate:
    """By how much a policy's answers score above the start's to the same prompts, in standard deviations of the
    scores of the start's answers; prompts with an answer that could not be scored are left out.

    ``judge``: the name of one that stood beside; None: the one that says who wins.

    Raises:
        ValueError: no prompt has scores.
    """

    def scores(item: Mapping[str, Any], side: str) -> list[float | None]:
        return [answer["score"] if judge is None else answer["scores"][judge] for answer in item[side]]

    gains: list[float] = []
    of_start: list[float] = []
    for item in items:
        own, start = scores(item, "a"), scores(item, "b")
        if None in own or None in start:
            continue
        known = [score for score in start if score is not None]
        of_start += known
        gains.append(statistics.fmean(s for s in own if s is not None) - statistics.fmean(known))
    if not gains:
        raise ValueError("no prompt whose answers were all scored")
    unit = statistics.pstdev(of_start) or 1.0
    mean, half = statistics.fmean(gains) / unit, half_width(gains) / unit
    return Estimate(mean, mean - half, mean + half, 1)


def over_seeds(estimates: Sequence[Estimate], *, is_share: bool = False) -> Estimate | None:
    """Mean and Student's t interval over seeds; of one seed its own interval; None for none."""
    if len(estimates) < 2:
        return estimates[0] if estimates else None
    summary = summarize_seeds([estimate.mean for estimate in estimates])
    assert summary is not None
    assert summary.half_width is not None
    low, high = summary.mean - summary.half_width, summary.mean + summary.half_width
    low, high = (max(0.0, low), min(1.0, high)) if is_share else (low, high)
    return Estimate(summary.mean, low, high, summary.n)


def stand(meetings: Sequence[Meeting]) -> list[Standing]:
    """Method by method, the best under the judge first."""
    by_method: dict[str, list[Meeting]] = {}
    for meeting in meetings:
        by_method.setdefault(meeting.method, []).append(meeting)
    standings = []
    for method, own in by_method.items():
        measures = {}
        for name, (_, is_share) in MEASURES.items():
            estimate = over_seeds([m.measures[name] for m in own if name in m.measures], is_share=is_share)
            if estimate is not None:
                measures[name] = estimate
        standings.append(Standing(method, own, measures))
    return sorted(standings, key=lambda standing: -standing.measures["win_rate"].mean)


def against_each_other(standings: Sequence[Standing]) -> dict[tuple[str, str], Estimate]:
    """By pair of methods, how often the first one's answer scores higher under the judge, on prompts of both."""
    rates: dict[tuple[str, str], Estimate] = {}
    for left, right in combinations(standings, 2):
        of_seed = []
        for meeting in left.meetings:
            other = next((m for m in right.meetings if m.seed == meeting.seed), None)
            if other is not None and (values := _wins(meeting, other)):
                half = half_width(values) if len(values) > 1 else 1.0
                mean = statistics.fmean(values)
                of_seed.append(Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), 1))
        estimate = over_seeds(of_seed, is_share=True)
        if estimate is not None:
            rates[left.method, right.method] = estimate
    return rates


def _wins(left: Meeting, right: Meeting) -> list[float]:
    """Prompt by prompt; answers that could not be scored lose."""
    others = {item["index"]: item for item in right.items}
    values = []
    for item in left.items:
        if item["index"] in others:
            own, other = ([_score(answer) for answer in i["a"]] for i in (item, others[item["index"]]))
            meetings = [(x, y) for x in own for y in other]
            values.append(statistics.fmean(pair_wins([x for x, _ in meetings], [y for _, y in meetings])))
    return values


def _score(answer: Mapping[str, Any]) -> float:
    score = answer["score"]
    return float("-inf") if score is None else float(score)


def show_estimate(estimate: Estimate | None, *, is_share: bool = False) -> str:
    """``61.2 % [55.0, 67.1]``, or ``0.61 [0.50, 0.72]``."""
    if estimate is None:
        return NOTHING
    scale, places, unit = (100.0, 1, " %") if is_share else (1.0, 2, "")
    mean, low, high = (f"{value * scale:z.{places}f}" for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean}{unit}" + (f" [{low}, {high}]" if low != high else "")


def tables(standings: Sequence[Standing], rates: Mapping[tuple[str, str], Estimate]) -> list[TextTable]:
    """Each policy against the start, and the policies against one another."""
    header = ["policy", "seeds", *(column for column, _ in MEASURES.values())]
    lines = [
        [
            one.method,
            str(len(one.meetings)),
            *(show_estimate(one.measures.get(name), is_share=share) for name, (_, share) in MEASURES.items()),
        ]
        for one in standings
    ]
    made = [TextTable("Policies against the start", header, lines)]
    if rates:
        pairs = [[f"{left} over {right}", show_estimate(rate, is_share=True)] for (left, right), rate in rates.items()]
        made.append(TextTable("Policies against one another, by the judge", ["policies", "wins"], pairs))
    return made


def findings(standings: Sequence[Standing], best: Training) -> list[str]:
    """What the numbers say, a sentence each, and where the best model is."""
    told = []
    for one in standings:
        rate, alike = one.measures["win_rate"], one.measures.get("win_rate_similar")
        verdict = "better than the start" if rate.low > 0.5 else "worse than the start" if rate.high < 0.5 else ""
        line = f"{one.method}: wins {show_estimate(rate, is_share=True)} by the judge: "
        line += verdict or "not told apart from the start"
        if verdict == "better than the start" and (alike is None or alike.low <= 0.5):
            line += "; among answers equally long that is not shown"
        if verdict != "better than the start" and one.measures["win_rate_proxy"].low > 0.5:
            line += "; it wins by the proxy alone, which it was trained against"
        told.append(line)
    told.append(f"the best model, chosen by the judge, so its own figure is a little too high: {best.weights}")
    return told


def choose_samples(meetings: Sequence[Meeting]) -> list[Answers]:
    """The first prompts of the lowest seed, with the start's answer and each policy's, and the judge's scores."""
    first = min(meeting.seed for meeting in meetings)
    own = [meeting for meeting in meetings if meeting.seed == first]
    shown = []
    for item in own[0].items[:NUM_SAMPLES]:
        answers = [_answer("start", item["b"][0])]
        for meeting in own:
            same = next((one for one in meeting.items if one["index"] == item["index"]), None)
            answers += [_answer(meeting.method, same["a"][0])] if same is not None else []
        shown.append(Answers(item["question"], answers, item["answer"]))
    return shown


def _answer(who: str, answer: Mapping[str, Any]) -> Answer:
    return Answer(who, answer["text"], answer["score"])


def collect_pipeline(plan: PipelinePlan, outcome: Outcome, command: str) -> StudyResults:
    """Read every finished contest.

    Raises:
        RunFailure: none is finished.
        DataError: a record is damaged.
    """
    meetings = [
        read_meeting(part.folder, part.method, part.seed) for part in plan.contests if part.standing == "finished"
    ]
    if not meetings:
        raise RunFailure("nothing to report yet: no policy has met the start")
    standings = stand(meetings)
    rates = against_each_other(standings)
    winner = max(standings[0].meetings, key=lambda meeting: meeting.measures["win_rate"].mean)
    best = next(p for p in plan.trainings("policies") if (p.method, p.seed) == (winner.method, winner.seed))
    data = {"sources": plan.sources, "best": best.weights} | to_data(standings, rates)
    report = replace(
        begin_report(plan, outcome, command, describe(plan), data),
        tables=tables(standings, rates),
        findings=findings(standings, best),
        notes=notes(plan, len({meeting.seed for meeting in meetings})),
        samples=choose_samples(meetings),
    )
    return StudyResults("pipeline", report, (standings,))


def notes(plan: PipelinePlan, num_seeds: int) -> list[str]:
    """How to read the numbers."""
    over = "95 % Student-t intervals over seeds; a seed has its own reward models, policies and answers"
    over = over if num_seeds > 1 else "95 % intervals over prompts; of one seed, they do not tell how seeds differ"
    return [
        f"judge: {plan.judge}, which no policy was trained against; proxy: {plan.optimize}, which policies that sample "
        "are rewarded by",
        "wins: how often the policy's answer scores above the start's to the same prompt; a tie counts one half, and "
        "an answer that cannot be scored loses. Equally long: lengths that differ by at most 10 % of the longer",
        "reward gained: policy less start, in standard deviations of the scores of the start's answers. KL: nats per "
        "answer, the exact sum over next-token distributions, on the policy's own answers",
        f"[ ]: {over}",
    ]


def describe(plan: PipelinePlan) -> list[tuple[str, str]]:
    """What was done, as (what, value)."""
    (start,), asked = plan.trainings("start"), plan.evaluate
    facts = [("start", f"{start.recipe.model.name} after {plan.sources['start']}, {start.recipe.train.steps} steps")]
    for part in (*plan.trainings("reward_models"), *plan.trainings("policies")):
        if part.seed == 0:
            facts.append((part.method, f"{plan.sources[part.method]}: {describe_training(part.recipe)}"))
    how = f"at most {asked.max_tokens} tokens, temperature {asked.temperature:g}"
    each = "one answer each" if asked.samples == 1 else f"{asked.samples} answers each"
    facts.append(("contests", f"{asked.n} prompts of {label_of_word(asked.task)}, {each}, {how}"))
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    return facts


def to_data(standings: Sequence[Standing], rates: Mapping[tuple[str, str], Estimate]) -> dict[str, Any]:
    """Everything as plain data."""

    def plain(measures: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
        return {name: {"mean": e.mean, "low": e.low, "high": e.high} for name, e in measures.items()}

    return {
        "policies": {
            one.method: plain(one.measures) | {"seeds": {str(m.seed): plain(m.measures) for m in one.meetings}}
            for one in standings
        },
        "against": plain({f"{left} over {right}": rate for (left, right), rate in rates.items()}),
    }
