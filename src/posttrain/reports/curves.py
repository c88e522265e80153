"""The panels of runs and data sets: what a picture of each shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.data.base import Description, percentile
from posttrain.reports.charts import LARGEST, Panel, Series
from posttrain.store.headline import ACCURACY, Headline
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points

MAX_BARS = 12
NUM_BINS = 40


@dataclass(frozen=True)
class _Plan:
    """A panel and its ``metrics`` of steps and ``evaluations`` by name, with their labels.

    ``only_with``, ``only_without``: for runs that record these metrics, or none of them.
    """

    title: str
    caption: str
    metrics: Mapping[str, str]
    evaluations: Mapping[str, str] = field(default_factory=dict)
    is_share: bool = False
    only_with: Sequence[str] = ()
    only_without: Sequence[str] = ()


_TRAINING, _HELD_OUT = "training", "held-out"
# fmt: off
_PLANS = (
    _Plan("Accuracy", "sampled in training, and greedy on held-out problems", {"accuracy": _TRAINING},
          {"accuracy": _HELD_OUT}, is_share=True),
    _Plan("Reward", "mean over all sampled answers", {"reward": _TRAINING}),
    _Plan("Length of answers", "tokens; does it pay to write more?",
          {"num_tokens": "all", "num_tokens_right": "right", "num_tokens_wrong": "wrong"}),
    _Plan("Worked answers", "share that writes its steps", {"worked": _TRAINING}, {"worked": _HELD_OUT}, is_share=True),
    _Plan("Format", "share in the asked format; cut off at the limit", {"format": "in format", "truncated": "cut off"},
          {"format": _HELD_OUT}, is_share=True),
    _Plan("Entropy", "nats per token; near 0 nothing new is tried", {"entropy": _TRAINING}),
    _Plan("Loss", "per trained token", {"nll": _TRAINING}, {"loss": _HELD_OUT}, only_with=("nll",)),
    _Plan("Loss", "of the objective, in training and held out", {"loss": _TRAINING},
          {"loss": _HELD_OUT}, only_without=("nll", "uniform_groups", "divergence")),
    _Plan("Margin", "score (or implicit reward) of the better answer less that of the worse", {"margin": _TRAINING},
          {"margin": _HELD_OUT}),
    _Plan("Pairs in the right order", "share of pairs; a tie counts half", {"pair_accuracy": _TRAINING},
          {"pair_accuracy": _HELD_OUT}, is_share=True),
    _Plan("Scores of the answers of a pair", "given in training; they are comparable, their level means nothing",
          {"chosen_score": "better", "rejected_score": "worse"}),
    *(_Plan("Agreement with the labels", "share of answers or steps that are scored as they are labelled",
            {name: _TRAINING}, {name: _HELD_OUT}, is_share=True)
      for name in ("final_accuracy", "row_accuracy", "step_accuracy")),
    _Plan("Log-probability of the answers of a pair", "nats per answer",
          {"chosen_logprob": "chosen", "rejected_logprob": "rejected"}),
    _Plan("Divergence from the teacher", "nats per token", {"divergence": _TRAINING}),
    _Plan("What the critic explains", "share of the variance of returns", {"value_explained_variance": _TRAINING}),
    _Plan("KL from the start", "nats per answer, sampled on held-out prompts", {"kl_in_reward": "in the reward"},
          {"kl_from_start": _HELD_OUT}),
    _Plan("KL to the reference", "nats per token", {"kl_ref": _TRAINING}),
    _Plan("KL from sampler to trainer", "nats per token; rounding alone, unless samples are reused",
          {"mismatch_kl": _TRAINING}),
    _Plan("Effective sample size", "share that importance weights between sampler and trainer leave",
          {"effective_sample_size": _TRAINING}, is_share=True),
    _Plan("Clipped tokens", "share whose ratio left the trust region", {"clip_fraction": _TRAINING}, is_share=True),
    _Plan("Uniform groups", "share of prompts whose answers all earn the same: no signal",
          {"uniform_groups": _TRAINING}, is_share=True),
    _Plan("Gradient norm", "before clipping", {"grad_norm": _TRAINING}),
)
# fmt: on
# Metrics of each part of a mixture (``PART:NAME``) that are drawn with a line for each.
_BY_PART = {
    "accuracy": ("Accuracy by part", "sampled in training, and greedy on held-out problems", True),
    "reward": ("Reward by part", "mean over the sampled answers", False),
    "num_calls": ("Calls by part", "calls of tools in an answer, sampled in training", False),
    "num_tokens": ("Length by part", "tokens of an answer", False),
    "pair_accuracy": ("Pairs in the right order by part", "share of pairs, in training; a tie counts half", True),
    "loss": ("Loss by part", "mean over the trained tokens, pairs or rows", False),
}


def choose_panels(rows: Sequence[MetricsRow], headline: Headline = ACCURACY) -> list[Panel]:
    """The panels for which a run has numbers, that of its headline first. Non-finite values are in no line."""
    evaluations, recorded = evaluation_points(rows), dict.fromkeys(name for row in rows for name in row.metrics)
    plans, metric = list(_PLANS), headline.metric
    if not any(metric in (plan.evaluations or plan.metrics) for plan in plans):
        title = headline.label[:1].upper() + headline.label[1:]
        plans.append(_Plan(title, "held-out", {}, {metric: _HELD_OUT}, headline.is_share))
    for name, (title, caption, is_share) in _BY_PART.items():
        parts = {key: key.rpartition(":")[0] for key in recorded if "/" not in key and key.endswith(f":{name}")}
        held_out = {key: f"{part}, {_HELD_OUT}" for key, part in parts.items()}
        plans.append(_Plan(title, caption, parts, held_out, is_share))
    panels: list[tuple[int, Panel]] = []
    for plan in plans:
        if (plan.only_with and not {*plan.only_with} & {*recorded}) or {*plan.only_without} & {*recorded}:
            continue
        shown = plan.evaluations or plan.metrics
        own = {metric: _HELD_OUT} if metric in shown else {}
        series = [s for name, label in plan.metrics.items() if (s := _metric_series(rows, name, label)) is not None]
        for name, label in {**plan.evaluations, **own}.items():
            series += _evaluation_series(evaluations, name, label)
        if series:
            rank = 0 if own else 1 if shown.keys() & {*headline.beside} else 2
            panels.append((rank, Panel(plan.title, plan.caption, series, plan.is_share)))
    return [panel for _, panel in sorted(panels, key=lambda ranked: ranked[0])]


def _metric_series(rows: Sequence[MetricsRow], name: str, label: str) -> Series | None:
    points = [(row.step, row.metrics[name]) for row in rows if abs(row.metrics.get(name, math.nan)) < LARGEST]
    return Series(label, [float(step) for step, _ in points], [value for _, value in points]) if points else None


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
        names = [f"{value[:28]} ({n:,})" for value, n in shown]
        panels.append(Panel(name, caption, [bars], x_label=" ", names=names))
    return panels


def balances(stats: Description) -> list[tuple[str, Counter[str]]]:
    """Counts by value: labels of answers and steps, which of a pair is longer, the keys of meta."""
    panels = [(f"labels of {name}", counts) for name, counts in stats.labels.items()]
    if stats.num_pairs:
        longer = stats.longer_chosen / stats.num_pairs
        shares = Counter({"chosen": round(100 * longer), "rejected": round(100 * (1 - longer))})
        panels.append(("the longer one of a pair, %", shares))
    return panels + list(stats.kinds.items())
