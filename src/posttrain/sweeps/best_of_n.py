"""Best-of-n: compare reward models as selectors, and measure over-optimization against one.

Selection is compared with majority vote, random choice and an oracle. Over-optimization plots gold and proxy reward
against √KL for best-of-n and trained policies. A policy's distance is d = √KL(π‖π_start), with KL in nats per answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from posttrain.errors import DataError
from posttrain.evaluation.items import Item, item_values
from posttrain.evaluation.statistics import Summary, best_of_n, item_interval, paired_bootstrap, summarize_seeds
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.metrics import MetricsRow, evaluation_points
from posttrain.sweeps.results import SweepPart, show_summary

RANDOM = "random pick"
# Measure for each selection method.
_MEASURES = {"majority": "majority", RANDOM: "accuracy", "oracle": "pass"}
CHOICE_NOTES = [
    "every column averages over all size-n subsets of a problem's answers; ties are shared",
    "intervals are over held-out problems, after averaging over seeds (differences: paired bootstrap); thin lines are "
    "individual seeds",
    "majority: the most frequent final answer; oracle: correct if any of the n is, an upper bound for selection",
]


@dataclass(frozen=True)
class Chosen:
    """Accuracy of the answer selected from n by a reward model, by vote or at random, for each n.

    ``values[n]``: mean over seeds, per problem. ``seeds[n]``: mean over problems, per seed. ``bounds[n]``: 95 %
    interval over problems.
    """

    name: str
    ns: list[int]
    values: dict[int, list[float]] = field(default_factory=dict)
    seeds: dict[int, list[float]] = field(default_factory=dict)
    bounds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def mean(self, n: int) -> float:
        return statistics.fmean(self.values[n])


def powers_of_two(items: Sequence[Item]) -> list[int]:
    """List the powers of two below the number of answers per item, followed by this number."""
    samples = min(len(item.samples) for item in items if item.samples)
    below = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent < samples]
    return [*below, samples]


def choose(evaluations: Mapping[str, Sequence[Sequence[Item]]]) -> list[Chosen]:
    """Score every reward model, then majority vote, random choice and oracle, on identical answers.

    Problems whose prompt was too long have no answers, and count as incorrect for every selector.

    Args:
        evaluations: items for each seed, by reward model.

    Raises:
        DataError: reward models chose from different answers.
    """
    first_name, first = next(iter(evaluations.items()))
    for name, seeds in evaluations.items():
        for seed, (own, other) in enumerate(zip(seeds, first, strict=True)):
            if _answers(own) != _answers(other):
                what = f"{name} and {first_name} chose from different answers; delete the evaluation and repeat"
                raise DataError("chosen", f"seed {seed}: {what}")
    ns = powers_of_two([item for items in first for item in items])
    ways = [(name, "best_of", seeds) for name, seeds in evaluations.items()]
    ways += [(name, measure, first) for name, measure in _MEASURES.items()]
    chosen = []
    for name, measure, seeds in ways:
        choices = Chosen(name, ns)
        for n in ns:
            table = [item_values(items, f"{measure}@{n}") for items in seeds]
            choices.values[n] = [statistics.fmean(column) for column in zip(*table, strict=True)]
            choices.seeds[n] = [statistics.fmean(row) for row in table]
            used = n  # answers used per choice
            if name == RANDOM:
                used = 1
            choices.bounds[n] = item_interval(choices.values[n], len(seeds) * max(1, max(ns) // used))
        chosen.append(choices)
    return chosen


def _answers(items: Sequence[Item]) -> list[tuple[str, list[str]]]:
    return [(item.id, [sample.text for sample in item.samples]) for item in items]


def best_of_n_part(choices: Sequence[Chosen], num_models: int) -> SweepPart:
    """Build the report section on selection; the first ``num_models`` choices are reward models.

    Later reward models are compared with the first, and all of them with majority vote and random choice.
    """
    ns = choices[0].ns
    models = choices[:num_models]
    majority, pick, _ = choices[num_models:]
    last = ns[-1]
    lines = []
    findings = []
    differences = list[dict[str, object]]()
    for model in models:
        best = max(ns, key=lambda n: (model.mean(n), -n))
        findings.append(f"{model.name} is best at n = {best}: {model.mean(best):.1%}; at {last} {model.mean(last):.1%}")
    pairs = [(models[0], other) for other in models[1:]]
    pairs += [(majority, model) for model in models]
    pairs += [(pick, model) for model in models]
    for a, b in pairs:
        by_n = {n: paired_bootstrap(a.values[n], b.values[n]) for n in ns}
        differences.append({"a": a.name, "b": b.name, "by_n": {str(n): asdict(gap) for n, gap in by_n.items()}})
        gap = by_n[last]
        points = f"{100 * gap.difference:+.1f}"
        interval = f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
        lines.append([f"{b.name} minus {a.name}", points, interval, f"{gap.p:.2g}"])
        if gap.low > 0:
            way = "better than"
        elif gap.high < 0:
            way = "worse than"
        else:
            way = "measurably neither better nor worse than"
        findings.append(f"{b.name} chooses {way} {a.name} at n = {last}: {points} points [{interval}]")
    shares = []
    by_name = {}
    for choice in choices:
        low, high = choice.bounds[last]
        shares.append([choice.name, *(f"{choice.mean(n):.1%}" for n in ns), f"{low:.1%} – {high:.1%}"])
        by_name[choice.name] = {str(n): _plain(choice, n) for n in ns}
    header = ["chosen by", *(f"n = {n}" for n in ns), f"95 % at {last}"]
    tables = [
        TextTable("Accuracy of answers chosen from n", header, shares),
        TextTable(f"Differences at n = {last}", ["difference", "points", "95 % over problems", "p"], lines),
    ]
    data = {"chosen_by": by_name, "differences": differences}
    return SweepPart(tables, findings, CHOICE_NOTES, data, (choices, num_models))


def _plain(choice: Chosen, n: int) -> dict[str, object]:
    low, high = choice.bounds[n]
    return {"mean": choice.mean(n), "low": low, "high": high, "seeds": choice.seeds[n]}


BEST_OF_N = "best of n"
PROXY = "sampled_reward"  # a policy's total reward
GOLD = "sampled_accuracy"
OVER_NOTES = [
    "gold: fraction of answers accepted by the verifier; proxy: reward model score, standardized by mean and standard "
    "deviation over the initial model's answers; both on held-out problems",
    "policy KL is measured on sampled answers (exact sum over next-token distributions); best-of-n KL is "
    "log n − (n − 1)/n, an upper bound if answers repeat, as short ones often do",
    "best-of-n averages over all subsets of a problem's answers, for n = 1, 2, 4, ...",
    "± and bands: 95 % Student-t intervals over seeds; each seed has a separate reward model, pairs and policies. To "
    "measure a seed's fall, the peak is located by the remaining seeds",
]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point in training: after ``at`` updates, or best of ``at`` answers. KL in nats per answer."""

    at: int
    kl: float
    gold: float
    proxy: float

    @property
    def distance(self) -> float:
        return math.sqrt(max(0.0, self.kl))


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over seeds at one point: distance, and gold and proxy with intervals over seeds."""

    at: int
    distance: float
    gold: Summary
    proxy: Summary


@dataclass(frozen=True)
class MethodCurve:
    """A method's curves. ``curves``: points in order, by seed; the first is the initial model, with KL 0.

    ``peak``: point with the highest mean gold reward. ``drop``: gold reward at the peak minus at the end. Each seed's
    peak is located by the other seeds' mean, to avoid selection bias. A single seed uses its own maximum, which is
    biased upward. Both are None with fewer than two common points.
    """

    name: str
    curves: dict[int, list[CurvePoint]]
    means: list[Mean]
    peak: Mean | None
    drop: Summary | None

    @property
    def is_shown(self) -> bool:
        """True if the 95 % interval for the drop is above 0; never with a single seed."""
        if self.drop is None or self.drop.half_width is None:
            return False
        return self.drop.mean - self.drop.half_width > 0


def best_of_n_kl(n: int) -> float:
    """KL between best-of-n and the sampling distribution: ``log n − (n − 1)/n`` nats.

    Exact if ties have probability 0, otherwise an upper bound (Beirami et al. 2024, "Theoretical guarantees on the
    best-of-n alignment policy").

    Source: Stiennon et al. (2020), "Learning to summarize from human feedback", appendix G.3; Gao et al. (2022),
    "Scaling laws for reward model overoptimization", section 2.
    """
    assert n >= 1, "the best of at least one answer"
    return math.log(n) - (n - 1) / n


def best_of_n_points(items: Sequence[Item], ns: Sequence[int]) -> list[CurvePoint]:
    """Compute gold (fraction correct) and proxy (score) for best-of-n under the proxy, for each n.

    Averages over items the exact mean over all subsets of n samples (``ranking.best_of_n``). This is the estimator in
    Nakano et al. (2021), "WebGPT", appendix I, as used by Gao et al. (2022), with ties shared. Samples without a
    score are chosen last, and use the item's lowest score as proxy.
    """
    points = []
    for n in ns:
        gold = []
        proxy = []
        for item in items:
            if not item.samples:
                continue
            known = [sample.score for sample in item.samples if sample.score is not None]
            lowest = min((score for score in known if score > -math.inf), default=0.0)
            scores = []
            for sample in item.samples:
                scores.append(-math.inf if sample.score is None else sample.score)
            is_right = [float(sample.is_correct) for sample in item.samples]
            gold.append(best_of_n(scores, is_right, n))
            proxy.append(best_of_n(scores, [max(score, lowest) for score in scores], n))
        points.append(CurvePoint(n, best_of_n_kl(n), statistics.fmean(gold), statistics.fmean(proxy)))
    return points


def training_points(rows: Sequence[MetricsRow]) -> list[CurvePoint]:
    """Collect evaluations with KL from a policy's run, by step. With several held-out tasks, use the first."""
    measured = [point for point in evaluation_points(rows) if {"kl_initial", GOLD, PROXY} <= point.results.keys()]
    by_step = {point.step: point.results for point in measured if point.name == measured[0].name}
    points = []
    for step, results in sorted(by_step.items()):
        points.append(CurvePoint(step, results["kl_initial"], results[GOLD], results[PROXY]))
    return points


def score_scale(items: Sequence[Item]) -> tuple[float, float]:
    """Compute mean and standard deviation over all sample scores; the deviation is 1 if all are equal."""
    scores = [sample.score for item in items for sample in item.samples if sample.score is not None]
    mean = 0.0
    deviation = 1.0
    if scores:
        mean = statistics.fmean(scores)
    if len(set(scores)) > 1:
        deviation = statistics.pstdev(scores)
    return mean, deviation


def describe_method(name: str, curves: Mapping[int, list[CurvePoint]]) -> MethodCurve:
    """Average the points shared by all seeds, by ``at``, and measure the drop in gold reward."""
    tables = [{point.at: point for point in points} for points in curves.values()]
    means = []
    for at in sorted(set.intersection(*(set(table) for table in tables))):
        points = [table[at] for table in tables]
        gold = summarize_seeds([p.gold for p in points])
        proxy = summarize_seeds([p.proxy for p in points])
        assert gold is not None
        assert proxy is not None
        means.append(Mean(at, statistics.fmean(p.distance for p in points), gold, proxy))
    if len(means) < 2:
        return MethodCurve(name, dict(curves), means, None, None)

    def peak_of(chosen: Sequence[Mapping[int, CurvePoint]]) -> Mean:
        return max(means, key=lambda mean: (math.fsum(table[mean.at].gold for table in chosen), -mean.at))

    drops = []
    for index, table in enumerate(tables):
        others = [other for i, other in enumerate(tables) if i != index]
        drops.append(table[peak_of(others or [table]).at].gold - table[means[-1].at].gold)
    return MethodCurve(name, dict(curves), means, peak_of(tables), summarize_seeds(drops))


def collect_curves(
    chosen: Mapping[int, Sequence[Item]], policies: Sequence[tuple[str, int, Sequence[MetricsRow]]]
) -> list[MethodCurve]:
    """Build curves for best-of-n and each policy. The proxy is standardized by the seed's scores on initial answers.

    Args:
        chosen: initial model's answers with proxy scores, by seed.
        policies: (row, seed, metrics) for finished runs.
    """
    found = [(BEST_OF_N, seed, best_of_n_points(items, powers_of_two(items))) for seed, items in chosen.items()]
    found += [(row, seed, training_points(metrics)) for row, seed, metrics in policies if seed in chosen]
    curves: dict[str, dict[int, list[CurvePoint]]] = {}
    for name, seed, points in found:  # every seed trains a separate reward model with its own scale
        mean, deviation = score_scale(chosen[seed])
        curves.setdefault(name, {})[seed] = [replace(p, proxy=(p.proxy - mean) / deviation) for p in points]
    return [describe_method(name, own) for name, own in curves.items()]


def overoptimization_part(methods: Sequence[MethodCurve]) -> SweepPart:
    """Build the report section on gold and proxy rewards."""
    lines = []
    findings = []
    data = {}
    for method in methods:
        first = method.means[0]
        last = method.means[-1]
        peak = method.peak
        line = [method.name, str(len(method.curves)), f"{last.distance:.2f}", show_summary(last.proxy)]
        if peak is not None:
            line += [show_summary(first.gold, is_share=True), show_summary(peak.gold, is_share=True)]
            line += [f"{peak.distance:.2f}", show_summary(last.gold, is_share=True)]
            line.append(show_summary(method.drop, is_share=True))
            findings.append(_finding(method, peak))
        lines.append([*line, *[NOTHING] * (9 - len(line))])
        data[method.name] = asdict(method) | {"is_shown": method.is_shown}
    header = ["method", "seeds", "final √KL", "final proxy", "initial gold", "peak gold"]
    header += ["√KL at peak", "final gold", "peak minus final, points"]
    return SweepPart([TextTable("Gold and proxy", header, lines)], findings, OVER_NOTES, {"methods": data}, (methods,))


def _finding(method: MethodCurve, peak: Mean) -> str:
    """Describe if the gold reward fell while the proxy reward kept rising."""
    first = method.means[0]
    last = method.means[-1]
    if peak is last:
        end = show_summary(last.gold, is_share=True)
        return f"{method.name}: no over-optimization up to √KL {last.distance:.2f}: gold peaks at the end ({end})"
    if len(method.curves) == 1:
        verdict = "a single seed, so no interval"
    elif not method.is_shown:
        verdict = "the fall may be chance"
    elif last.proxy.mean > peak.proxy.mean:
        verdict = "over-optimized"
    else:
        verdict = "gold falls, but so does the proxy"
    return (
        f"{method.name}: {verdict}: gold starts at {first.gold.mean:.1%}, peaks at {peak.gold.mean:.1%} (√KL "
        f"{peak.distance:.2f}) and ends at {last.gold.mean:.1%} (√KL {last.distance:.2f}); after the peak the proxy "
        f"moves from {peak.proxy.mean:+.2f} to {last.proxy.mean:+.2f}"
    )
