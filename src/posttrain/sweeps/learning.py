"""Sweep results: trials read from their records, and rows averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from posttrain.evaluation.comparisons import mean_height
from posttrain.evaluation.statistics import Summary, half_width, summarize_seeds, wilson_interval
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.metric_names import ACCURACY, KL, Metric, metric_of
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points
from posttrain.sweeps.results import SweepPart, show_summary

# Table columns. Columns without any value are omitted.
COLUMNS = (
    "reward", "train_seconds", "sampled_tokens", "trained_tokens", KL, "entropy", "completion_length", "margin_last",
    "pair_accuracy_last",
)  # fmt: skip
NOTES = (
    "Held-out results after the last update, averaged over seeds; best mean first. Over the run: mean height of the "
    "learning curve, which rewards faster learning.",
    "± is the half-width of the 95 % Student-t interval over seeds. With a single seed, or without any spread, [ ] "
    "gives the 95 % interval over problems in one evaluation. ± covers sampling and training, but not the choice of "
    "problems, since every evaluation uses the same ones.",
    "Training time covers sampling and updates, but not evaluation. KL from the initial model is in nats per answer, "
    f"entropy in nats per token, completion length in tokens. {NOTHING}: not recorded.",
)


@dataclass(frozen=True)
class TrialResult:
    """One run in a sweep; ``state``: finished, failed or unfinished.

    ``points``: evaluations with the primary metric, on the first evaluated task. ``info``: values by name, from the
    last evaluation; also ``start_accuracy`` and ``mean_accuracy`` (normalized area under the learning curve), or the
    same for a different primary metric; ``gain`` (improvement), ``train_seconds``, ``sampled_tokens``,
    ``trained_tokens``, ``margin_last`` and ``pair_accuracy_last`` (last recorded update). Unrecorded values are
    omitted.
    """

    row: str
    seed: int
    state: str
    step: int = 0
    points: list[EvaluationPoint] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> dict[str, float]:
        """The evaluation before the first update."""
        if self.points and self.points[0].step == 0:
            return self.points[0].results
        return {}


@dataclass(frozen=True)
class Peak:
    """Highest point on a row's mean learning curve before a fall, in units of the primary metric."""

    step: int
    value: float
    end: float


@dataclass(frozen=True)
class RowResult:
    """A table row: its trials, and finished results summarized over seeds."""

    name: str
    trials: list[TrialResult]
    summaries: dict[str, Summary]

    @property
    def finished(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.state == "finished"]

    def fall(self, primary: Metric) -> Peak | None:
        """Find the peak of the mean curve if the row then fell by more than chance explains.

        For fractions, the final mean must be outside the 95 % interval of one evaluation at the peak (first seed).
        For other metrics, the 95 % interval for (peak − end) over seeds must exclude 0, so a single seed never shows
        a fall.
        """
        curves = [{point.step: point.results for point in trial.points} for trial in self.finished]
        if not curves:
            return None
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if len(steps) < 3:
            return None
        means = {step: math.fsum(curve[step][primary.name] for curve in curves) / len(curves) for step in steps}
        best = max(steps, key=lambda step: (primary.goodness(means[step]), -step))
        last = steps[-1]
        lost = primary.goodness(means[best]) - primary.goodness(means[last])
        if lost <= 0:
            return None
        bound = _noise(primary, [curve[best] for curve in curves], [curve[last] for curve in curves])
        if bound is None or lost <= bound:
            return None
        return Peak(best, means[best], means[last])


def read_trial(rows: Sequence[MetricsRow], row: str, seed: int, state: str, primary: Metric = ACCURACY) -> TrialResult:
    """Read a trial from its metrics. With several held-out tasks, use the first evaluated."""
    every = evaluation_points(rows)
    metric = primary.name
    info = _training_info(rows)
    by_step = {}
    for point in every:
        if point.name == every[0].name and primary.value(point.results) is not None:
            by_step[point.step] = point  # if a step was evaluated twice, keep the last
    points = list(by_step.values())
    curve = [(point.step, point.results[metric]) for point in points]
    if curve:
        info |= {key: value for key, value in points[-1].results.items() if math.isfinite(value)}
    if len(curve) > 1:
        info[f"mean_{metric}"] = mean_height(curve)
    if curve and curve[0][0] == 0:
        info[f"start_{metric}"] = curve[0][1]
        info["gain"] = primary.goodness(curve[-1][1]) - primary.goodness(curve[0][1])
    return TrialResult(row, seed, state, max((row.step for row in rows), default=0), points, info)


def _training_info(rows: Sequence[MetricsRow]) -> dict[str, float]:
    info: dict[str, float] = {}
    rate = "generate_tokens_per_second"
    seconds = "generate_seconds"
    for row in rows:
        if "step_seconds" in row.timing:
            spent = {"train_seconds": row.timing["step_seconds"]}
            if row.metrics.get("trained_tokens") is not None:
                spent["trained_tokens"] = row.metrics["trained_tokens"]
            if rate in row.timing and seconds in row.timing:
                spent["sampled_tokens"] = float(round(row.timing[rate] * row.timing[seconds]))
            for name, value in spent.items():
                info[name] = info.get(name, 0.0) + value
        for name in ("margin", "pair_accuracy"):
            if math.isfinite(row.metrics.get(name, math.nan)):
                info[f"{name}_last"] = row.metrics[name]
    return info


def rank_rows(trials: Sequence[TrialResult], order: Sequence[str], primary: Metric = ACCURACY) -> list[RowResult]:
    """Build one result per row, best mean primary metric first; rows without finished trials last."""
    rows = []
    for name in order:
        own = [trial for trial in trials if trial.row == name]
        by_seed: dict[str, list[float]] = {}
        for trial in own:
            if trial.state == "finished":
                for key, value in trial.info.items():
                    by_seed.setdefault(key, []).append(value)
        summaries = {}
        for key, values in by_seed.items():
            summary = summarize_seeds(values)
            if summary is not None:
                summaries[key] = summary
        rows.append(RowResult(name, own, summaries))

    def badness(row: RowResult) -> float:
        if primary.name not in row.summaries:
            return math.inf
        return -primary.goodness(row.summaries[primary.name].mean)

    return sorted(rows, key=badness)


def _noise(primary: Metric, peaks: Sequence[Mapping[str, float]], ends: Sequence[Mapping[str, float]]) -> float | None:
    """Estimate how far a row may fall by chance; None if unknown. See ``RowResult.fall``."""
    interval = primary.interval(peaks[0])
    value = primary.value(peaks[0])
    if interval is not None and value is not None:
        worse = interval[0]
        if primary.better == "lower":
            worse = interval[1]
        return abs(value - worse)
    lost = [
        primary.goodness(peak[primary.name]) - primary.goodness(end[primary.name])
        for peak, end in zip(peaks, ends, strict=True)
    ]
    if len(lost) < 2:
        return None
    return half_width(lost)


def describe_falls(rows: Sequence[RowResult], primary: Metric) -> list[str]:
    """Describe each row that fell after a peak."""
    lines = []
    for row in rows:
        peak = row.fall(primary)
        if peak is not None:
            high = f"{primary.label} {primary.show(peak.value)} after {peak.step} updates"
            lines.append(f"{row.name} fell after its peak: {high}, {primary.show(peak.end)} at the end")
    return lines


def rows_part(
    rows: Sequence[RowResult],
    start_label: str,
    primary: Metric,
    sources: Mapping[str, str],
    title: str = "",
    over: tuple[str, Mapping[str, float]] | None = None,
) -> SweepPart:
    """Build the report section on learning.

    ``start_label``: origin of the initial model. ``sources``: origin of each row. ``over``: the varied key with its
    value in each row, if numeric.
    """
    start = next((trial.start for row in rows for trial in row.trials if "n" in trial.start), {})
    interval = primary.interval(start)
    if start and primary.name == ACCURACY.name:
        interval = wilson_interval(start["accuracy"] * start["n"], int(start["n"]))
    about_start = None
    if start:
        about_start = {"label": start_label, "results": start, "interval": interval}
    data = {
        "primary_metric": primary.name,
        "start": about_start,
        "rows": {row.name: _plain_row(row, sources[row.name], primary) for row in rows},
    }
    known = {key for row in rows for key in row.summaries}
    columns = [metric_of(key) for key in COLUMNS if key in known and key != primary.name]
    lines = [_line(row, columns, primary) for row in rows]
    falls = describe_falls(rows, primary)
    if start:
        result = primary.show(start[primary.name])
        if interval is not None:
            result = f"{result} [{', '.join(map(primary.show, interval))}]"
        shown = [_shown(metric, start.get(metric.name)) for metric in columns]
        lines.append(["start", NOTHING, result, NOTHING, NOTHING, *shown])
    gain = "gain"
    kind = "the"
    if primary.is_share:
        gain = "gain, points"
        kind = "Wilson's"
    header = ["method", "seeds", primary.label, "over the run", gain, *(metric.label for metric in columns)]
    of = ""
    if interval:
        of = f", with {kind} 95 % interval for {start['n']:.0f} {primary.of}"
    notes = [*NOTES, f"start: {start_label}, before the first update{of}."]
    if falls:
        at = {row.name: row.fall(primary) for row in rows}
        _insert_peaks(header, lines, at, primary)
    return SweepPart([TextTable(title, header, lines)], falls, notes, data, (rows, start, primary, over))


def _plain_row(row: RowResult, source: str, primary: Metric) -> dict[str, object]:
    """Convert a row to plain data for ``results.json``."""
    fall = None
    peak = row.fall(primary)
    if peak is not None:
        fall = asdict(peak)
    return {"source": source, **asdict(row), "fall": fall}


def _insert_peaks(
    header: list[str], lines: Sequence[list[str]], at: Mapping[str, Peak | None], primary: Metric
) -> None:
    """Insert the column ``peak`` after the final result: highest mean and its step, for rows that fell."""
    header.insert(3, "peak")
    for line in lines:
        peak = at.get(line[0])
        shown = NOTHING
        if peak is not None:
            shown = f"{primary.show(peak.value)} at {peak.step}"
        line.insert(3, shown)


def _shown(metric: Metric, value: float | None) -> str:
    if value is None:
        return NOTHING
    return metric.show(value)


def _line(row: RowResult, columns: Sequence[Metric], primary: Metric) -> list[str]:
    done = len(row.finished)
    total = len(row.trials)
    seeds = str(done)
    if done < total:
        seeds = f"{done} of {total}"
    line = [row.name, seeds]
    if not done:
        state = "unfinished"
        if any(trial.state == "failed" for trial in row.trials):
            state = "failed"
        return [*line, state, *[NOTHING] * (len(columns) + 1)]
    for key in (primary.name, f"mean_{primary.name}"):
        line.append(show_summary(row.summaries.get(key), is_share=primary.is_share, digits=3))
    summary = row.summaries.get(primary.name)
    has_spread = summary is not None and bool(summary.half_width)
    bounds = None
    if row.finished[0].points:
        bounds = primary.interval(row.finished[0].points[-1].results)
    if bounds is not None and not has_spread:
        line[2] += f" [{', '.join(map(primary.show, bounds))}]"
    gain = row.summaries.get("gain")
    if gain is None:
        line.append(NOTHING)
    elif primary.is_share:
        line.append(f"{100 * gain.mean:+.1f}")
    else:
        line.append(f"{gain.mean:+.3f}")
    for metric in columns:
        result = row.summaries.get(metric.name)
        line.append(_shown(metric, None if result is None else result.mean))
    return line
