"""The panels of runs and data sets: what a picture of each shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.reports.charts import LARGEST, Panel, Series
from posttrain.store.headline import ACCURACY, Headline
from posttrain.store.metrics import EvaluationPoint, MetricsRow, evaluation_points
from posttrain.tasks.description import Description, percentile

MAX_BARS = 12
NUM_BINS = 40


@dataclass(frozen=True)
class _Plan:
    """A panel and what it shows: ``metrics`` of steps and ``evaluations`` by name, with their labels.

    ``only_with``, ``only_without``: for runs that record these metrics, or none of them.
    """

    title: str
    caption: str
    metrics: Mapping[str, str]
    evaluations: Mapping[str, str] = field(default_factory=dict)
    is_share: bool = False
    only_with: Sequence[str] = ()
    only_without: Sequence[str] = ()


def _one(name: str, title: str, caption: str, *, is_share: bool = False, is_evaluated: bool = False) -> _Plan:
    return _Plan(title, caption, {name: "training"}, {name: "held-out"} if is_evaluated else {}, is_share)


# fmt: off
_PLANS = (
    _one("accuracy", "Accuracy", "sampled in training, and greedy on held-out problems", is_share=True,
         is_evaluated=True),
    _one("reward", "Reward", "mean over all sampled answers"),
    _Plan("Length of answers", "tokens; does it pay to write more?",
          {"num_tokens": "all", "num_tokens_right": "right", "num_tokens_wrong": "wrong"}),
    _one("worked", "Worked answers", "share that writes its steps", is_share=True, is_evaluated=True),
    _Plan("Format", "share in the asked format; cut off at the limit", {"format": "in format", "truncated": "cut off"},
          {"format": "held-out"}, is_share=True),
    _one("entropy", "Entropy", "nats per token; near 0 nothing new is tried"),
    _Plan("Loss", "per trained token", {"nll": "training"}, {"loss": "held-out"}, only_with=("nll",)),
    _Plan("Loss", "mean over what is judged: of the objective, in training and held out", {"loss": "training"},
          {"loss": "held-out"}, only_without=("nll", "uniform_groups", "divergence")),
    _Plan("Margin", "score of the better answer less that of the worse", {"margin": "training"},
          {"margin": "held-out"}, only_with=("chosen_score",)),
    _Plan("Margin", "implicit reward of the better answer less that of the worse", {"margin": "training"},
          only_without=("chosen_score",)),
    _one("pair_accuracy", "Pairs in the right order", "share of pairs; a tie counts half", is_share=True,
         is_evaluated=True),
    _Plan("Scores of the answers of a pair", "given in training; they are comparable, their level means nothing",
          {"chosen_score": "better", "rejected_score": "worse"}),
    _one("final_accuracy", "Agreement with the labels", "share of answers whose last score is on the labelled side",
         is_share=True, is_evaluated=True),
    _one("row_accuracy", "Agreement with the labels", "share of answers whose implicit reward is on the labelled side",
         is_share=True, is_evaluated=True),
    _one("step_accuracy", "Agreement with the labels", "share of steps that are scored as they are labelled",
         is_share=True, is_evaluated=True),
    _Plan("Log-probability of the answers of a pair", "nats per answer",
          {"chosen_logprob": "chosen", "rejected_logprob": "rejected"}),
    _one("divergence", "Divergence from the teacher", "nats per token"),
    _one("value_explained_variance", "What the critic explains", "share of the variance of returns"),
    _Plan("KL from the start", "nats per answer, sampled on held-out prompts", {"kl_in_reward": "in the reward"},
          {"kl_from_start": "held-out"}),
    _one("kl_ref", "KL to the reference", "nats per token"),
    _one("mismatch_kl", "KL from sampler to trainer", "nats per token; rounding alone, unless samples are reused"),
    _one("effective_sample_size", "Effective sample size",
         "share that importance weights between sampler and trainer leave", is_share=True),
    _one("clip_fraction", "Clipped tokens", "share whose ratio left the trust region", is_share=True),
    _one("uniform_groups", "Uniform groups", "share of prompts whose answers all earn the same: no signal",
         is_share=True),
    _one("grad_norm", "Gradient norm", "before clipping"),
)
# fmt: on
# What is told of each part of a mixture (``PART:NAME``), with a line for each.
_BY_PART = {
    "accuracy": ("Accuracy by part", "sampled in training, and greedy on held-out problems", True),
    "reward": ("Reward by part", "mean over the sampled answers", False),
    "num_calls": ("Calls by part", "calls of tools in an answer, sampled in training", False),
    "num_tokens": ("Length by part", "tokens of an answer", False),
    "pair_accuracy": ("Pairs in the right order by part", "share of pairs, in training; a tie counts half", True),
    "loss": ("Loss by part", "mean over what is trained of it", False),
    "prompts": ("Prompts by part", "that were sampled for", False),
}


def choose_panels(rows: Sequence[MetricsRow], headline: Headline = ACCURACY) -> list[Panel]:
    """The panels for which a run has numbers, that of its headline first. Non-finite values are in no line."""
    evaluations, recorded = evaluation_points(rows), {name for row in rows for name in row.metrics}
    panels: list[tuple[int, Panel]] = []
    for plan in (*_PLANS, _further(headline)):
        if (plan.only_with and not recorded & {*plan.only_with}) or recorded & {*plan.only_without}:
            continue
        shown = plan.evaluations or plan.metrics
        held_out = {headline.metric: "held-out"} if headline.metric in shown else {}
        series = [s for name, label in plan.metrics.items() if (s := _metric_series(rows, name, label)) is not None]
        for name, label in {**plan.evaluations, **held_out}.items():
            series += _evaluation_series(evaluations, name, label)
        if series:
            rank = 0 if held_out else 1 if shown.keys() & {*headline.beside} else 2
            panels.append((rank, Panel(plan.title, plan.caption, series, plan.is_share)))
    panels += [(2, panel) for panel in _part_panels(rows, evaluations)]
    return [panel for _, panel in sorted(panels, key=lambda ranked: ranked[0])]


def _part_panels(rows: Sequence[MetricsRow], evaluations: Sequence[EvaluationPoint]) -> Iterator[Panel]:
    """Of a mixture, what is told of its parts; prompts where their share changes."""
    recorded = dict.fromkeys(name for row in rows for name in row.metrics if ":" in name and "/" not in name)
    for metric, (title, caption, is_share) in _BY_PART.items():
        parts = {name: name.rpartition(":")[0] for name in recorded if name.rpartition(":")[2] == metric}
        series = [s for name, part in parts.items() if (s := _metric_series(rows, name, part)) is not None]
        for name, part in parts.items():
            series += _evaluation_series(evaluations, name, f"{part}, held-out")
        if metric == "prompts" and all(len(set(s.ys)) == 1 for s in series):
            continue  # each part has its share in every step
        if series:
            yield Panel(title, caption, series, is_share)


def _further(headline: Headline) -> _Plan:
    """A panel for a headline that no other shows: one that the recipe names."""
    is_shown = any(headline.metric in (plan.evaluations or plan.metrics) for plan in _PLANS)
    title = headline.label[:1].upper() + headline.label[1:]
    return _Plan(title, "held-out", {}, {} if is_shown else {headline.metric: "held-out"}, headline.is_share)


def _metric_series(rows: Sequence[MetricsRow], name: str, label: str) -> Series | None:
    points = [(row.step, row.metrics[name]) for row in rows if abs(row.metrics.get(name, math.nan)) < LARGEST]
    if not points:
        return None
    return Series(label, [float(step) for step, _ in points], [value for _, value in points])


def _evaluation_series(evaluations: Sequence[EvaluationPoint], name: str, label: str) -> list[Series]:
    tasks = list(dict.fromkeys(e.name for e in evaluations if name in e.results))
    series = []
    for task in tasks:
        drawn = [e for e in evaluations if e.name == task and abs(e.results.get(name, math.nan)) < LARGEST]
        points = sorted(drawn, key=lambda e: e.step)
        if not points:
            continue
        bounds = [e.results.get(f"{name}_{bound}", math.nan) for e in points for bound in ("low", "high")]
        has_interval = all(abs(bound) < LARGEST for bound in bounds)
        values, low, high = ([e.results[key] for e in points] if key == name or has_interval else []
                             for key in (name, f"{name}_low", f"{name}_high"))  # fmt: skip
        own = label if len(tasks) == 1 else f"{label} {task}"
        series.append(Series(own, [float(e.step) for e in points], values, low, high, is_points=True))
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
        ticks = [(float(i), f"{value[:28]} ({n:,})") for i, (value, n) in enumerate(shown)]
        panels.append(Panel(name, caption, [bars], x_label=" ", x_ticks=ticks))
    return panels


def balances(stats: Description) -> list[tuple[str, Counter[str]]]:
    """Counts by value: labels of answers and steps, which of a pair is longer, the keys of meta."""
    panels = [(f"labels of {name}", counts) for name, counts in stats.labels.items()]
    if stats.num_pairs:
        longer = stats.longer_chosen / stats.num_pairs
        shares = Counter({"chosen": round(100 * longer), "rejected": round(100 * (1 - longer))})
        panels.append(("the longer one of a pair, %", shares))
    return panels + list(stats.kinds.items())
