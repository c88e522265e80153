"""What the runs of a sweep learned: trials read from their records, and rows over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from posttrain.evals.statistics import Summary, student_t_quantile, summarize_seeds, wilson_interval
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.store.headline import ACCURACY, KL, Headline
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points

TrialState = Literal["finished", "failed", "unfinished"]
# Results of the last held-out evaluation that become facts of a trial, besides the primary metric.
EVALUATED = ("accuracy", "reward", "format", "truncated", "num_tokens", "worked", "kl_from_start", "entropy")
# Training metrics of which the first and the last value are facts: ``margin_first``, ``margin_last``, ...
ENDS = ("margin", "pair_accuracy")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One held-out evaluation: after ``step`` updates and ``seconds`` of training. ``value``: the primary metric.

    None: not recorded.
    """

    step: int
    seconds: float
    value: float
    reward: float | None
    kl: float | None


@dataclass(frozen=True)
class TrialResult:
    """One run of a sweep.

    ``facts`` by name: the primary metric and those of ``EVALUATED`` at the end, ``start_accuracy`` and
    ``mean_accuracy`` (over the run: the area under the learning curve by its width) or what else the primary metric is,
    ``gain`` (by how much it got better), ``train_seconds``, ``evaluation_seconds``, ``sampled_tokens``,
    ``trained_tokens`` and those of ``ENDS``; what was not recorded is not there. ``start`` holds the evaluation before
    the first update.
    """

    row: str
    seed: int
    state: TrialState
    step: int = 0
    problem: str | None = None
    evaluation: str | None = None
    start: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    curve: list[CurvePoint] = field(default_factory=list)


@dataclass(frozen=True)
class RowResult:
    """A row of the table: its finished trials, summarized over seeds by fact."""

    name: str
    trials: list[TrialResult]
    summaries: dict[str, Summary]

    @property
    def finished(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.state == "finished"]


@dataclass(frozen=True)
class Baseline:
    """The model that all trials start from, before the first update.

    ``interval``: of the primary metric; Wilson's over the problems of a share, None where there is none.
    """

    label: str
    results: dict[str, float]
    interval: tuple[float, float] | None


def read_trial(
    rows: Sequence[MetricsRow],
    row: str,
    seed: int,
    state: TrialState,
    problem: str | None = None,
    headline: Headline = ACCURACY,
) -> TrialResult:
    """A trial's facts from its metrics. Of several held-out tasks, the one evaluated first counts."""
    points = evaluation_points(rows)
    name = points[0].name if points else None
    own = list({p.step: p for p in points if p.name == name and headline.value(p.results) is not None}.values())
    course = [(p.step, p.results[headline.metric]) for p in own]
    facts = {**_costs(rows), **_ends(rows)}
    start = {k: v for k, v in own[0].results.items() if math.isfinite(v)} if own and own[0].step == 0 else {}
    if own:
        last = own[-1].results
        names = dict.fromkeys((headline.metric, *EVALUATED))
        facts |= {key: last[key] for key in names if math.isfinite(last.get(key, math.nan))}
    if start:
        gain = headline.goodness(course[-1][1]) - headline.goodness(course[0][1])
        facts |= {f"start_{headline.metric}": course[0][1], "gain": gain}
    if len(own) > 1:
        facts[f"mean_{headline.metric}"] = area_under(course)
    return TrialResult(
        row=row,
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
    """Tokens sampled in a step: the rate times the seconds; None where nothing was sampled."""
    rate, seconds = (row.timing.get(f"generate_{what}") for what in ("tokens_per_second", "seconds"))
    return None if rate is None or seconds is None else float(round(rate * seconds))


def _ends(rows: Sequence[MetricsRow]) -> dict[str, float]:
    facts: dict[str, float] = {}
    for name in ENDS:
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


def rank_rows(trials: Sequence[TrialResult], order: Sequence[str], headline: Headline = ACCURACY) -> list[RowResult]:
    """One result per row, the best mean of the primary metric first; those without a finished trial last."""
    rows = []
    for name in order:
        own = [trial for trial in trials if trial.row == name]
        finished = [trial for trial in own if trial.state == "finished"]
        keys = dict.fromkeys(key for trial in finished for key in trial.facts)
        summaries = {key: summarize_seeds([c.facts[key] for c in finished if key in c.facts]) for key in keys}
        rows.append(RowResult(name, own, {key: s for key, s in summaries.items() if s is not None}))
    means = {row.name: row.summaries[headline.metric].mean for row in rows if headline.metric in row.summaries}
    return sorted(rows, key=lambda row: -headline.goodness(means[row.name]) if row.name in means else math.inf)


def find_baseline(trials: Sequence[TrialResult], label: str, headline: Headline = ACCURACY) -> Baseline | None:
    """The evaluation before the first update, of the first trial that has one."""
    measured = [trial.start for trial in trials if "n" in trial.start]
    if not measured:
        return None
    first = measured[0]
    interval = headline.interval(first)
    if headline.counts_right:
        interval = wilson_interval(first["accuracy"] * first["n"], int(first["n"]))
    return Baseline(label, first, interval)


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


def band_over_seeds(trials: Sequence[TrialResult]) -> Band:
    """The mean curve of the finished trials of a row, at the steps that all of them evaluated."""
    curves = [
        {point.step: point for point in trial.curve} for trial in trials if trial.state == "finished" and trial.curve
    ]
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


def without_reward(trial: TrialResult, headline: Headline) -> TrialResult:
    """A trial whose reward is not that of the others: its own number would be read as a comparison."""
    if headline.metric == "reward":
        hidden = {"reward", "start_reward", "mean_reward", "gain"}
        return replace(trial, facts={key: x for key, x in trial.facts.items() if key not in hidden}, curve=[])
    facts = {key: value for key, value in trial.facts.items() if key != "reward"}
    return replace(trial, facts=facts, curve=[replace(point, reward=None) for point in trial.curve])


# The table of the rows, and how its numbers are read.


@dataclass(frozen=True)
class Column:
    """A fact as a column. ``has_interval``: the mean is shown with its interval."""

    key: str
    label: str
    form: str
    has_interval: bool = False
    is_optional: bool = False

    def show(self, value: float) -> str:
        """A value as its unit asks for."""
        if self.form == "count":
            return f"{value:.0f}" if value < 1000 else f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"
        if self.form == "seconds":
            return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
        return f"{value * 100:+.1f}" if self.form == "points" else f"{value:{self.form}}"

    def show_summary(self, summary: Summary | None) -> str:
        """A mean, with the half-width of its interval where the column has one and there are several seeds."""
        if summary is None:
            return NOTHING
        text = self.show(summary.mean)
        if not self.has_interval or summary.half_width is None:
            return text
        return (
            f"{text} ± {summary.half_width * 100:.1f}" if self.form == ".1%" else f"{text} ± {summary.half_width:.3f}"
        )


SECONDS = Column("train_seconds", "training", "seconds")
COLUMNS = (
    Column("reward", "reward", ".3f"),
    SECONDS,
    Column("sampled_tokens", "sampled", "count"),
    Column("trained_tokens", "trained on", "count"),
    Column("kl_from_start", "KL from start", ".3f"),
    Column("entropy", "entropy", ".3f"),
    Column("num_tokens", "length", ".1f"),
    Column("margin_last", "margin", ".3f", is_optional=True),
    Column("pair_accuracy_last", "pairs right", ".1%", is_optional=True),
)


def rows_table(rows: Sequence[RowResult], baseline: Baseline | None, headline: Headline) -> TextTable:
    """One line per row, best first, and the start model's."""
    form, gain = (".1%", ("gain, points", "points")) if headline.is_share else (".3f", ("gain", "+.3f"))
    columns = [
        Column(headline.metric, headline.label, form, has_interval=True),
        Column(f"mean_{headline.metric}", "over the run", form, has_interval=True),
        Column("gain", *gain),
    ]
    known = {key for row in rows for key in row.summaries}
    columns += [c for c in COLUMNS if c.key != headline.metric and (not c.is_optional or c.key in known)]
    lines = [_row_line(row, columns) for row in rows]
    if baseline is not None:
        shown = [c.show(baseline.results[c.key]) if c.key in baseline.results else NOTHING for c in columns]
        if baseline.interval is not None:
            shown[0] += f" [{', '.join(map(headline.show, baseline.interval))}]"
        lines.append(["start", NOTHING, *shown])
    return TextTable("", ["method", "seeds", *(column.label for column in columns)], lines)


def _row_line(row: RowResult, columns: Sequence[Column]) -> list[str]:
    done, asked = len(row.finished), len(row.trials)
    seeds = str(done) if done == asked else f"{done} of {asked}"
    if not done:
        state = "failed" if any(trial.state == "failed" for trial in row.trials) else "unfinished"
        return [row.name, seeds, state, *([NOTHING] * (len(columns) - 1))]
    return [row.name, seeds, *(column.show_summary(row.summaries.get(column.key)) for column in columns)]


def trials_table(rows: Sequence[RowResult], headline: Headline) -> TextTable:
    """One line per trial, with the same columns."""
    trials = [trial for row in rows for trial in row.trials]
    names = [f"{trial.row}, seed {trial.seed}" for trial in trials]
    single = [rank_rows([replace(t, row=name)], [name], headline)[0] for t, name in zip(trials, names, strict=True)]
    return replace(rows_table(single, None, headline), title="Every trial")


def row_notes(rows: Sequence[RowResult], baseline: Baseline | None, headline: Headline) -> list[str]:
    """How the numbers were made, and what went wrong."""
    notes = [
        "Held-out results after the last update, mean over seeds; best mean first. Over the run: the mean height of "
        "the learning curve, so that who learns faster stands higher."
    ]
    points = ", in points" if headline.is_share else ""
    counts = sorted({len(row.finished) for row in rows if len(row.finished) > 1})
    if counts:
        quantiles = ", ".join(f"{student_t_quantile(n - 1):.3f} for {n} seeds" for n in counts)
        notes.append(
            f"± is the half-width{points}, of the 95 % Student-t interval of the mean over seeds (t = {quantiles}). "
            f"It covers sampling and training, not the choice of the {headline.of}, which are the same in every "
            "evaluation."
        )
    if any(len(row.finished) == 1 for row in rows):
        notes.append("A row with one finished seed has no interval.")
    if baseline is not None:
        kind = "Wilson's" if headline.is_share else "the"
        of = f", with {kind} 95 % interval for {baseline.results['n']:.0f} {headline.of}"
        notes.append(f"start: {baseline.label}, before the first update{of if baseline.interval is not None else ''}.")
    notes.append(
        "Training time is that of the updates, sampling included and evaluation excluded. KL from start is in "
        f"nats per answer, entropy in nats per token, length in tokens. {NOTHING}: not recorded."
    )
    for trial in (trial for row in rows for trial in row.trials):
        if trial.state == "failed":
            notes.append(f"{trial.row}, seed {trial.seed}: failed after {trial.step} steps: {trial.problem}")
        elif trial.state == "unfinished":
            notes.append(f"{trial.row}, seed {trial.seed}: unfinished after {trial.step} steps")
    return notes
