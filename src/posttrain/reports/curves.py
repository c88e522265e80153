"""The panels of runs and data sets: what a picture of each shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from posttrain.data.base import Description, percentile
from posttrain.reports.charts import LARGEST, Panel, Series
from posttrain.store.metric_names import ACCURACY, METRICS, Metric, metric_of
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points

MAX_BARS = 12
NUM_BINS = 40
_TRAINING = "training"
_HELD_OUT = "held-out"
# Metrics sharing a panel, named by the first. Each is drawn as a line, as are its evaluations.
_PANELS: tuple[tuple[str, ...], ...] = (
    ("accuracy",), ("reward",), ("completion_length", "completion_length_correct", "completion_length_wrong"),
    ("shows_reasoning",), ("format", "truncated"), ("entropy",), ("loss",), ("margin",), ("pair_accuracy",),
    ("chosen_score", "rejected_score"), ("answer_accuracy",), ("step_accuracy",),
    ("chosen_logprob", "rejected_logprob"), ("divergence",), ("value_explained_variance",),
    ("kl_initial", "kl_in_reward"), ("kl_ref",), ("kl_sampler",), ("effective_sample_size",),
    ("clip_fraction",), ("uniform_groups",), ("grad_norm",),
)  # fmt: skip
_IN_TRAINING = ("reward", "completion_length", "entropy", "truncated")  # no line of evaluations, but of the primary
# Metrics drawn per mixture part (``PART:NAME``), one line each.
_BY_PART = ("accuracy", "reward", "num_calls", "completion_length", "pair_accuracy", "loss")


def meaning_of(metric: Metric, recorded: Collection[str]) -> str:
    """Describe a metric, given all ``recorded`` ones.

    The loss is described by its unit of averaging.
    """
    if metric.name != "loss":
        return metric.meaning
    units = (
        ("pair_accuracy", "pairs"),
        ("step_accuracy", "labelled steps"),
        ("outcome_accuracy", "scored tokens"),
        ("answer_accuracy", "answers"),
    )
    for name, unit in units:
        if name in recorded:
            return f"Mean objective over {unit}. Not a log-probability."
    if "nll" not in recorded:
        return "Objective after aggregation."
    return metric.meaning


def choose_panels(rows: Sequence[MetricsRow], primary: Metric = ACCURACY) -> list[Panel]:
    """Panels for a run's recorded metrics, primary metric first. Non-finite values are skipped."""
    evaluations = evaluation_points(rows)
    recorded = dict.fromkeys(name for row in rows for name in row.metrics)
    groups = list(_PANELS)
    if not any(primary.name in names for names in groups):
        groups.append((primary.name,))
    first: list[Panel] = []
    second: list[Panel] = []
    others: list[Panel] = []
    for names in groups:
        series = _group_series(names, rows, evaluations, recorded, primary)
        if not series:
            continue
        lines = [line for lines_of_metric in series.values() for line in lines_of_metric]
        leading = next(iter(series))
        panel = Panel(_title(leading.label), meaning_of(leading, recorded), lines, leading.is_share)
        if primary in series:
            first.append(panel)
        elif set(names) & set(primary.further):
            second.append(panel)
        else:
            others.append(panel)
    others += _part_panels(rows, evaluations, recorded)
    others += _kind_panels(evaluations)
    return [*first, *second, *others]


def _group_series(
    names: Sequence[str],
    rows: Sequence[MetricsRow],
    evaluations: Sequence[EvaluationPoint],
    recorded: Collection[str],
    primary: Metric,
) -> dict[Metric, list[Series]]:
    """Lines for a panel's metrics, from training and evaluation. Empty ones are omitted."""
    # Absolute loss values only mean something for imitation (``nll``), not for sampling or distillation losses.
    loss_has_level = "nll" in recorded or not {"uniform_groups", "divergence"} & set(recorded)
    series: dict[Metric, list[Series]] = {}
    for metric in map(metric_of, names):
        if len(names) == 1:
            label = _TRAINING
            label_held_out = _HELD_OUT
        else:
            label = metric.label
            label_held_out = f"{metric.label}, {_HELD_OUT}"
        lines = []
        if metric.name != "loss" or loss_has_level:
            lines += _metric_series(rows, metric.name, label)
        if metric.name not in _IN_TRAINING or metric.name == primary.name:
            lines += _evaluation_series(evaluations, metric.name, label_held_out)
        if lines:
            series[metric] = lines
    return series


def _part_panels(
    rows: Sequence[MetricsRow], evaluations: Sequence[EvaluationPoint], recorded: Collection[str]
) -> list[Panel]:
    """One panel per metric recorded by mixture part, with a line per part."""
    panels = []
    for name in _BY_PART:
        metric = METRICS[name]
        keys = [key for key in recorded if "/" not in key and key.endswith(f":{name}")]
        lines = []
        for key in keys:
            lines += _metric_series(rows, key, key.rpartition(":")[0])
        for key in keys:
            lines += _evaluation_series(evaluations, key, f"{key.rpartition(':')[0]}, {_HELD_OUT}")
        if lines:
            title = f"{_title(metric.label)} by part"
            panels.append(Panel(title, meaning_of(metric, recorded), lines, metric.is_share))
    return panels


def _kind_panels(evaluations: Sequence[EvaluationPoint]) -> list[Panel]:
    """One panel per key that splits held-out accuracy, with a line per value."""
    names = dict.fromkeys(name for point in evaluations for name in point.results if "=" in name)
    lines: dict[str, list[Series]] = {}
    for name in names:
        kind, _, measure = name.rpartition(":")
        if measure.endswith("accuracy"):
            key, _, value = kind.partition("=")
            lines.setdefault(key, []).extend(_evaluation_series(evaluations, name, value))
    caption = "Held-out items grouped by this meta key."
    panels = []
    for key, series in lines.items():
        if len(series) <= MAX_BARS:
            panels.append(Panel(f"Accuracy by {key}", caption, series, is_share=True))
    return panels


def _title(label: str) -> str:
    return label[:1].upper() + label[1:]


def _metric_series(rows: Sequence[MetricsRow], name: str, label: str) -> list[Series]:
    steps = []
    values = []
    for row in rows:
        if _is_drawable(row.metrics.get(name)):
            steps.append(float(row.step))
            values.append(row.metrics[name])
    if not steps:
        return []
    return [Series(label, steps, values)]


def _is_drawable(value: float | None) -> bool:
    """Check if a value exists, is finite, and fits on an axis."""
    return value is not None and abs(value) < LARGEST


def _evaluation_series(evaluations: Sequence[EvaluationPoint], name: str, label: str) -> list[Series]:
    by_task: dict[str, list[EvaluationPoint]] = {}
    for point in evaluations:
        if _is_drawable(point.results.get(name)):
            by_task.setdefault(point.name, []).append(point)
    series = []
    for task, points in by_task.items():
        points.sort(key=lambda point: point.step)
        steps = [float(point.step) for point in points]
        values = [point.results[name] for point in points]
        low = []
        high = []
        ends = (f"{name}_low", f"{name}_high")
        if all(_is_drawable(point.results.get(end)) for point in points for end in ends):
            low = [point.results[ends[0]] for point in points]
            high = [point.results[ends[1]] for point in points]
        own_label = label
        if len(by_task) > 1:
            own_label = f"{label} {task}"
        series.append(Series(own_label, steps, values, low, high, is_points=True))
    return series


def data_panels(stats: Description, unit: str) -> list[Panel]:
    """Panels for a data set: text lengths, plus class balances if any."""
    everything = [length for values in stats.lengths.values() for length in values]
    # integer bin width: otherwise bins would cover unequal numbers of lengths
    width = max(1, math.ceil(percentile(everything, 0.99) / NUM_BINS))
    series = []
    for part, values in stats.lengths.items():
        counts = Counter(min(length // width, NUM_BINS) for length in values)
        ys = [float(counts[place]) for place in range(NUM_BINS)]
        label = f"{part} (median {percentile(values, 0.5):,.0f})"
        series.append(Series(label, [width * (place + 0.5) for place in range(NUM_BINS)], ys, is_bars=True))
    beyond = sum(length > width * NUM_BINS for length in everything)
    axis = unit
    if beyond:
        axis = f"{unit} ({beyond:,} longer texts are beyond the edge)"
    panels = [Panel("Lengths", "", series, x_label=axis, y_label="texts")]
    for name, counted in balances(stats):
        shown = counted.most_common(MAX_BARS)
        caption = ""
        if len(counted) > MAX_BARS:
            caption = f"the {MAX_BARS} commonest of {len(counted)}"
        heights = [float(count) for _, count in shown]
        bars = Series("", [float(place) for place in range(len(shown))], heights, is_bars=True)
        names = [f"{value[:28]} ({count:,})" for value, count in shown]
        panels.append(Panel(name, caption, [bars], x_label=" ", names=names))
    return panels


def balances(stats: Description) -> list[tuple[str, Counter[str]]]:
    """Value counts for labels of answers and steps, longer answers in pairs, and meta keys."""
    panels = [(f"labels of {name}", counts) for name, counts in stats.labels.items()]
    if stats.num_pairs:
        longer = stats.longer_chosen / stats.num_pairs
        shares = Counter({"chosen": round(100 * longer), "rejected": round(100 * (1 - longer))})
        panels.append(("longer answer in each pair, %", shares))
    return panels + list(stats.kinds.items())
