"""The results of a comparison: cells read off their records, and rows over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from posttrain.evals.statistics import Summary, summarize_seeds, wilson_interval
from posttrain.recipes.recipe import Recipe
from posttrain.store.headline import ACCURACY, KL, Headline
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points
from posttrain.sweeps.compare import ComparisonPlan
from posttrain.sweeps.plan import Training, problems
from posttrain.sweeps.runner import Outcome
from posttrain.sweeps.sources import label_of_word

CellState = Literal["finished", "failed", "unfinished"]
# Results of the last held-out evaluation that become facts of a cell under their own names, beside the headline.
EVALUATED = ("accuracy", "reward", "format", "truncated", "num_tokens", "worked", "kl_from_start", "entropy")
# Training metrics of which the first and the last value are facts: ``margin_first``, ``margin_last``, ...
COURSES = ("margin", "pair_accuracy")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One held-out evaluation: after ``step`` updates and ``seconds`` of training. ``value`` is the headline's.

    None: not recorded.
    """

    step: int
    seconds: float
    value: float
    reward: float | None
    kl: float | None


@dataclass(frozen=True)
class CellResult:
    """One run of a comparison.

    ``facts`` by name: the headline and those of ``EVALUATED`` at the end, ``start_accuracy`` and ``mean_accuracy``
    (over the run: the area under the learning curve by its width) or what else the headline is, ``gain`` (by how much
    it got better), ``train_seconds``, ``evaluation_seconds``, ``sampled_tokens``, ``trained_tokens`` and the courses;
    what was not recorded is not there. ``start`` holds the evaluation before the first update.
    """

    method: str
    seed: int
    state: CellState
    step: int = 0
    problem: str | None = None
    evaluation: str | None = None
    start: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    curve: list[CurvePoint] = field(default_factory=list)


@dataclass(frozen=True)
class MethodResult:
    """A row of the table: the finished cells of a method, summarized over seeds by fact."""

    name: str
    cells: list[CellResult]
    summaries: dict[str, Summary]

    @property
    def finished(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.state == "finished"]


@dataclass(frozen=True)
class Baseline:
    """The model that all cells start from, before the first update.

    ``interval``: of its headline; Wilson's over the problems of a share, None where there is none.
    ``varies``: lowest and highest value, where the cells did not measure the same.
    """

    label: str
    results: dict[str, float]
    interval: tuple[float, float] | None
    varies: tuple[float, float] | None = None


@dataclass(frozen=True)
class Comparison:
    """All that is told about a comparison. ``common``: (what, value); ``differs``: method -> lines.

    ``headline``: what all cells are told and ranked by.
    """

    title: str
    description: str
    rows: list[MethodResult]
    baseline: Baseline | None
    common: list[tuple[str, str]]
    differs: dict[str, list[str]]
    sources: dict[str, str]
    command: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    headline: Headline = ACCURACY


def read_cell(
    rows: Sequence[MetricsRow],
    method: str,
    seed: int,
    state: CellState,
    problem: str | None = None,
    headline: Headline = ACCURACY,
) -> CellResult:
    """A cell's facts from its metrics. Of several held-out tasks, the one evaluated first counts."""
    points = evaluation_points(rows)
    name = points[0].name if points else None
    own = list({p.step: p for p in points if p.name == name and headline.value(p.results) is not None}.values())
    course = [(p.step, p.results[headline.metric]) for p in own]
    facts = {**_costs(rows), **_courses(rows)}
    start = {k: v for k, v in own[0].results.items() if math.isfinite(v)} if own and own[0].step == 0 else {}
    if own:
        last = own[-1].results
        told = dict.fromkeys((headline.metric, *EVALUATED))
        facts |= {key: last[key] for key in told if math.isfinite(last.get(key, math.nan))}
    if start:
        gain = headline.goodness(course[-1][1]) - headline.goodness(course[0][1])
        facts |= {f"start_{headline.metric}": course[0][1], "gain": gain}
    if len(own) > 1:
        facts[f"mean_{headline.metric}"] = area_under(course)
    return CellResult(
        method=method,
        seed=seed,
        state=state,
        step=max((row.step for row in rows), default=0),
        problem=problem,
        evaluation=name,
        start=start,
        facts=facts,
        curve=_curve(rows, own, headline),
    )


def area_under(points: Sequence[tuple[int, float]]) -> float:
    """The mean height of the line through (step, value) points: how good a run was while it went on."""
    pairs = list(pairwise(points))
    area = math.fsum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairs)
    return area / (points[-1][0] - points[0][0])


def _costs(rows: Sequence[MetricsRow]) -> dict[str, float]:
    trained = [row for row in rows if "step_seconds" in row.timing]
    costs = {
        "train_seconds": [row.timing["step_seconds"] for row in trained],
        "evaluation_seconds": [row.timing["evaluation_seconds"] for row in rows if "evaluation_seconds" in row.timing],
        "sampled_tokens": [tokens for row in trained if (tokens := _sampled_tokens(row)) is not None],
        "trained_tokens": [row.metrics["tokens"] for row in trained if "tokens" in row.metrics],
    }
    return {name: math.fsum(values) for name, values in costs.items() if values}


def _sampled_tokens(row: MetricsRow) -> float | None:
    """Tokens sampled in a step: recorded as such, or as a rate over the seconds; None for neither."""
    timing = row.timing
    if "generated_tokens" in timing:
        return timing["generated_tokens"]
    if "generate_tokens_per_second" in timing and "generate_seconds" in timing:
        return float(round(timing["generate_tokens_per_second"] * timing["generate_seconds"]))
    return None


def _courses(rows: Sequence[MetricsRow]) -> dict[str, float]:
    facts: dict[str, float] = {}
    for name in COURSES:
        values = [row.metrics[name] for row in rows if math.isfinite(row.metrics.get(name, math.nan))]
        if values:
            facts |= {f"{name}_first": values[0], f"{name}_last": values[-1]}
    return facts


def _curve(rows: Sequence[MetricsRow], points: Sequence[EvaluationPoint], headline: Headline) -> list[CurvePoint]:
    curve = []
    for point in points:
        seconds = math.fsum(row.timing.get("step_seconds", 0.0) for row in rows if row.step <= point.step)
        results = {key: value for key, value in point.results.items() if math.isfinite(value)}
        curve.append(CurvePoint(point.step, seconds, results[headline.metric], results.get("reward"), results.get(KL)))
    return curve


def rank_methods(
    cells: Sequence[CellResult], order: Sequence[str], headline: Headline = ACCURACY
) -> list[MethodResult]:
    """One row per method, the best mean of the headline first; those without a finished cell last."""
    rows = []
    for name in order:
        own = [cell for cell in cells if cell.method == name]
        finished = [cell for cell in own if cell.state == "finished"]
        keys = dict.fromkeys(key for cell in finished for key in cell.facts)
        summaries = {key: summarize_seeds([c.facts[key] for c in finished if key in c.facts]) for key in keys}
        rows.append(MethodResult(name, own, {key: s for key, s in summaries.items() if s is not None}))
    means = {row.name: row.summaries[headline.metric].mean for row in rows if headline.metric in row.summaries}
    return sorted(rows, key=lambda row: -headline.goodness(means[row.name]) if row.name in means else math.inf)


def find_baseline(cells: Sequence[CellResult], label: str, headline: Headline = ACCURACY) -> Baseline | None:
    """The evaluation before the first update, of the first cell that has one."""
    measured = [cell.start for cell in cells if "n" in cell.start]
    if not measured:
        return None
    first = measured[0]
    interval = headline.interval(first)
    if headline.counts_right:
        interval = wilson_interval(first["accuracy"] * first["n"], int(first["n"]))
    values = [results[headline.metric] for results in measured]
    varies = (min(values), max(values)) if len(set(values)) > 1 else None
    return Baseline(label, first, interval, varies)


@dataclass(frozen=True, slots=True)
class Band:
    """A learning curve over seeds: means, with the lowest and the highest seed, at each step."""

    steps: list[int]
    seconds: list[float]
    means: list[float]
    low: list[float]
    high: list[float]
    rewards: list[float | None]
    kls: list[float | None]


def band_over_seeds(cells: Sequence[CellResult]) -> Band:
    """The mean curve of the finished cells of a method, at the steps that all of them evaluated."""
    curves = [{point.step: point for point in cell.curve} for cell in cells if cell.state == "finished" and cell.curve]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    columns = [[curve[step] for curve in curves] for step in steps]
    return Band(
        steps=steps,
        seconds=[math.fsum(p.seconds for p in points) / len(points) for points in columns],
        means=[math.fsum(p.value for p in points) / len(points) for points in columns],
        low=[min(p.value for p in points) for points in columns],
        high=[max(p.value for p in points) for points in columns],
        rewards=[_mean_or_none([p.reward for p in points]) for points in columns],
        kls=[_mean_or_none([p.kl for p in points]) for points in columns],
    )


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def collect_comparison(plan: ComparisonPlan, outcome: Outcome, command: str) -> Comparison:
    """Read every cell's records.

    Raises:
        DataError: a record is damaged.
    """
    failures = problems(plan, outcome.failures)
    own_reward = {m.name for m in plan.methods if any(key.startswith("rewards") for key in m.differs)}
    stored = [status.headline for cell in plan.cells if (status := cell.status) is not None and status.headline]
    headline = stored[0] if stored else ACCURACY
    cells = [_read_result(cell, failures.get(cell.name), headline) for cell in plan.cells]
    cells = [_without_reward(cell, headline) if cell.method in own_reward else cell for cell in cells]
    return Comparison(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        rows=rank_methods(cells, [method.name for method in plan.methods], headline),
        baseline=find_baseline(cells, plan.start_source, headline),
        common=describe_common(plan, cells, outcome, headline),
        differs={
            method.name: [_show_change(key, old, new) for key, (old, new) in sorted(method.differs.items())]
            for method in plan.methods
        },
        sources={method.name: method.source for method in plan.methods},
        command=command,
        environment=plan.environment(),
        headline=headline,
    )


def _read_result(cell: Training, problem: str | None, headline: Headline) -> CellResult:
    is_finished = cell.standing == "finished"
    state: CellState = "finished" if is_finished else "failed" if problem is not None else "unfinished"
    rows = cell.metrics()
    return read_cell(rows, cell.method, cell.seed, state, None if is_finished else problem, headline)


def _without_reward(cell: CellResult, headline: Headline) -> CellResult:
    """A cell whose reward is not that of the others: its own number would be read as a comparison."""
    if headline.metric == "reward":
        told = {"reward", "start_reward", "mean_reward", "gain"}
        return replace(cell, facts={key: x for key, x in cell.facts.items() if key not in told}, curve=[])
    facts = {key: value for key, value in cell.facts.items() if key != "reward"}
    return replace(cell, facts=facts, curve=[replace(point, reward=None) for point in cell.curve])


def _show_change(key: str, old: Any, new: Any) -> str:
    shown = ["nothing" if value is None else str(value) for value in (new, old)]
    return f"{key} = {shown[0]} (base: {shown[1]})"


def describe_common(
    plan: ComparisonPlan, cells: Sequence[CellResult], outcome: Outcome, headline: Headline = ACCURACY
) -> list[tuple[str, str]]:
    """What the cells have in common, as (what, value)."""
    base = plan.base
    start = plan.start.recipe if plan.start is not None else None
    model = f"{start.model.name} after {plan.start_source}, {start.train.steps} steps" if start else base.model.name
    facts = [("model", model), ("task", label_of_word(base.task))]
    measured = next((cell for cell in cells if cell.start), None)
    how = "greedy" if base.eval.temperature == 0 else f"temperature {base.eval.temperature:g}"
    if measured is not None:
        facts.append(("held-out evaluation", f"{measured.evaluation}, {measured.start['n']:.0f} {headline.of}, {how}"))
    facts += _describe_training(base)
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    threads = f"{outcome.num_threads} thread{'s' if outcome.num_threads > 1 else ''} each"
    facts.append(("ran", f"{outcome.num_jobs} at a time, {threads}"))
    return facts


def _describe_training(base: Recipe) -> list[tuple[str, str]]:
    facts = [("steps", f"{base.train.steps}, learning rate {base.train.lr:g} ({base.train.schedule})")]
    if base.rollout is not None:
        r = base.rollout
        updates = base.train.epochs * base.train.minibatches
        batch = f"{r.prompts} prompts × {r.group} answers of at most {r.max_tokens} tokens"
        facts.append(("rollouts", batch + (f", for {updates} steps" if updates > 1 else ", for each step")))
        facts.append(("rewards", ", ".join(f"{word.weight:g} × {word.name}" for word in base.rewards)))
    elif base.data is not None:
        facts.append(("data", f"{base.data.batch} rows in each step"))
    return facts
