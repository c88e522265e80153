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
_TRAINING, _HELD_OUT = "training", "held-out"
# Metrics that share a panel, which the first of them names; a line of each is drawn, and of its evaluations.
_PANELS: tuple[tuple[str, ...], ...] = (
    ("accuracy",), ("reward",), ("completion_length", "completion_length_correct", "completion_length_wrong"),
    ("shows_reasoning",), ("format", "truncated"), ("entropy",), ("loss",), ("margin",), ("pair_accuracy",),
    ("chosen_score", "rejected_score"), ("answer_accuracy",), ("step_accuracy",),
    ("chosen_logprob", "rejected_logprob"), ("divergence",), ("value_explained_variance",),
    ("kl_initial", "kl_in_reward"), ("kl_ref",), ("kl_sampler",), ("effective_sample_size",),
    ("clip_fraction",), ("uniform_groups",), ("grad_norm",),
)  # fmt: skip
_IN_TRAINING = ("reward", "completion_length", "entropy", "truncated")  # no line of evaluations, but of the primary
# Metrics of each part of a mixture (``PART:NAME``) that are drawn with a line for each.
_BY_PART = ("accuracy", "reward", "num_calls", "completion_length", "pair_accuracy", "loss")


def meaning_of(metric: Metric, recorded: Collection[str]) -> str:
    """Return the meaning of a metric in a run with the ``recorded`` ones.

    A loss is a mean over what its objective judges.
    """
    if metric.name != "loss":
        return metric.meaning
    units = (
        ("pair_accuracy", "pairs"),
        ("step_accuracy", "labelled steps"),
        ("outcome_accuracy", "tokens that are scored"),
        ("answer_accuracy", "answers"),
    )
    for name, unit in units:
        if name in recorded:
            return f"The objective, a mean over the {unit}; its values are no log-probabilities."
    return metric.meaning if "nll" in recorded else "The objective under its aggregation."


def choose_panels(rows: Sequence[MetricsRow], primary: Metric = ACCURACY) -> list[Panel]:
    """The panels for which a run has numbers, that of the primary metric first. Non-finite values are in no line."""
    evaluations, recorded = evaluation_points(rows), dict.fromkeys(name for row in rows for name in row.metrics)
    groups = [*_PANELS, *([] if any(primary.name in names for names in _PANELS) else [(primary.name,)])]
    # the loss of samples or to a teacher has no level that means something; that of imitation has (``nll``)
    without = {"loss"} if {"uniform_groups", "divergence"} & {*recorded} and "nll" not in recorded else set()
    panels: list[tuple[int, Panel]] = []
    for names in groups:
        series: dict[Metric, list[Series]] = {}
        for metric in map(metric_of, names):
            kinds = (_TRAINING, _HELD_OUT) if len(names) == 1 else (metric.label, f"{metric.label}, {_HELD_OUT}")
            lines = [] if metric.name in without else _metric_series(rows, metric.name, kinds[0])
            if metric.name not in _IN_TRAINING or metric.name == primary.name:
                lines += _evaluation_series(evaluations, metric.name, kinds[1])
            if lines:
                series[metric] = lines
        if series:
            first, *_ = series
            rank = 0 if primary in series else 1 if {*names} & {*primary.further} else 2
            lines = [one for own in series.values() for one in own]
            panels.append((rank, Panel(_title(first.label), meaning_of(first, recorded), lines, first.is_share)))
    for metric in map(METRICS.__getitem__, _BY_PART):
        keys = [key for key in recorded if "/" not in key and key.endswith(f":{metric.name}")]
        lines = [one for key in keys for one in _metric_series(rows, key, key.rpartition(":")[0])]
        for key in keys:
            lines += _evaluation_series(evaluations, key, f"{key.rpartition(':')[0]}, {_HELD_OUT}")
        if lines:
            title, caption = f"{_title(metric.label)} by part", meaning_of(metric, recorded)
            panels.append((2, Panel(title, caption, lines, metric.is_share)))
    panels += [(2, panel) for panel in _kind_panels(evaluations)]
    return [panel for _, panel in sorted(panels, key=lambda ranked: ranked[0])]


def _kind_panels(evaluations: Sequence[EvaluationPoint]) -> list[Panel]:
    """A panel for each key of the items by which held-out accuracy is broken down, with a line for each value."""
    names = dict.fromkeys(name for point in evaluations for name in point.results if "=" in name)
    lines: dict[str, list[Series]] = {}
    for name in names:
        kind, _, measure = name.rpartition(":")
        if measure.endswith("accuracy"):
            key, _, value = kind.partition("=")
            lines.setdefault(key, []).extend(_evaluation_series(evaluations, name, value))
    caption = "Held-out items by this key of their meta."
    return [
        Panel(f"Accuracy by {key}", caption, series, is_share=True)
        for key, series in lines.items()
        if len(series) <= MAX_BARS
    ]


def _title(label: str) -> str:
    return label[:1].upper() + label[1:]


def _metric_series(rows: Sequence[MetricsRow], name: str, label: str) -> list[Series]:
    points = [(row.step, row.metrics[name]) for row in rows if abs(row.metrics.get(name, math.nan)) < LARGEST]
    return [Series(label, [float(step) for step, _ in points], [value for _, value in points])] if points else []


def _evaluation_series(evaluations: Sequence[EvaluationPoint], name: str, label: str) -> list[Series]:
    tasks = list(dict.fromkeys(e.name for e in evaluations if abs(e.results.get(name, math.nan)) < LARGEST))
    series = []
    for task in tasks:
        drawn = [e for e in evaluations if e.name == task and abs(e.results.get(name, math.nan)) < LARGEST]
        points = sorted(drawn, key=lambda e: e.step)
        keys = (f"{name}_low", f"{name}_high")
        has_interval = all(abs(e.results.get(key, math.nan)) < LARGEST for e in points for key in keys)
        low, high = ([e.results[key] for e in points] if has_interval else [] for key in keys)
        own = label if len(tasks) == 1 else f"{label} {task}"
        steps, values = [float(e.step) for e in points], [e.results[name] for e in points]
        series.append(Series(own, steps, values, low, high, is_points=True))
    return series


def data_panels(stats: Description, unit: str) -> list[Panel]:
    """Lengths of the texts of a data set, and one panel for each balance that there is."""
    everything = [length for values in stats.lengths.values() for length in values]
    # whole numbers: else some bins would hold one length more than others
    width = max(1, math.ceil(percentile(everything, 0.99) / NUM_BINS))
    series = []
    for part, values in stats.lengths.items():
        counts = Counter(min(length // width, NUM_BINS) for length in values)
        ys = [float(counts[place]) for place in range(NUM_BINS)]
        label = f"{part} (median {percentile(values, 0.5):,.0f})"
        series.append(Series(label, [width * (place + 0.5) for place in range(NUM_BINS)], ys, is_bars=True))
    beyond = sum(length > width * NUM_BINS for length in everything)
    axis = unit + (f" ({beyond:,} longer texts are beyond the edge)" if beyond else "")
    panels = [Panel("Lengths", "", series, x_label=axis, y_label="texts")]
    for name, counted in balances(stats):
        shown = counted.most_common(MAX_BARS)
        caption = f"the {MAX_BARS} commonest of {len(counted)}" if len(counted) > MAX_BARS else ""
        bars = Series("", [float(i) for i in range(len(shown))], [float(n) for _, n in shown], is_bars=True)
        panels.append(Panel(name, caption, [bars], x_label=" ", names=[f"{value[:28]} ({n:,})" for value, n in shown]))
    return panels


def balances(stats: Description) -> list[tuple[str, Counter[str]]]:
    """Counts by value: labels of answers and steps, which of a pair is longer, the keys of meta."""
    panels = [(f"labels of {name}", counts) for name, counts in stats.labels.items()]
    if stats.num_pairs:
        longer = stats.longer_chosen / stats.num_pairs
        shares = Counter({"chosen": round(100 * longer), "rejected": round(100 * (1 - longer))})
        panels.append(("the longer one of a pair, %", shares))
    return panels + list(stats.kinds.items())
