"""Best of n: which reward model chooses best among n answers, and how far a policy may be trained against one.

Choices are compared with a vote, a random pick and an oracle. Over-optimization is gold and proxy reward against √KL,
for best-of-n and for trained policies; the distance of a policy is d = √KL(π‖π_start), KL in nats per answer.
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
# The measure of each way to choose among n of an item's answers.
_MEASURES = {"majority": "majority", RANDOM: "accuracy", "oracle": "pass"}
CHOICE_NOTES = [
    "every column is the mean over all subsets of n of the answers to a problem; ties are shared",
    "intervals are over the held-out problems (of differences: a paired bootstrap), of the mean over seeds; thin lines "
    "are single seeds",
    "majority: the most frequent final answer; oracle: any of the n is right, the most that any choice can reach",
]


@dataclass(frozen=True)
class Chosen:
    """The share of right answers among those that a reward model, a vote or chance chooses from n, for each n.

    ``values[n]``: per problem, the mean over seeds. ``seeds[n]``: per seed, the mean over problems.
    ``bounds[n]``: the 95 % interval over problems.
    """

    name: str
    ns: list[int]
    values: dict[int, list[float]] = field(default_factory=dict)
    seeds: dict[int, list[float]] = field(default_factory=dict)
    bounds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def mean(self, n: int) -> float:
        return statistics.fmean(self.values[n])


def powers_of_two(items: Sequence[Item]) -> list[int]:
    """1, 2, 4, ... below the number of answers that each item has, and that number."""
    samples = min(len(item.samples) for item in items if item.samples)
    below = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent < samples]
    return [*below, samples]


def choose(evaluations: Mapping[str, Sequence[Sequence[Item]]]) -> list[Chosen]:
    """Every reward model, then majority, a random pick and the oracle, on the same answers.

    A problem whose prompt did not fit has no answers, and counts as wrong for all of them.

    Args:
        evaluations: by reward model, the items of each seed.

    Raises:
        DataError: reward models had different answers to choose from.
    """
    first_name, first = next(iter(evaluations.items()))
    for name, seeds in evaluations.items():
        for seed, (own, other) in enumerate(zip(seeds, first, strict=True)):
            if _answers(own) != _answers(other):
                what = f"{name} and {first_name} had different answers to choose from; delete it and repeat"
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
            used = n  # of an item's answers, by one choice
            if name == RANDOM:
                used = 1
            choices.bounds[n] = item_interval(choices.values[n], len(seeds) * max(1, max(ns) // used))
        chosen.append(choices)
    return chosen


def _answers(items: Sequence[Item]) -> list[tuple[str, list[str]]]:
    return [(item.id, [sample.text for sample in item.samples]) for item in items]


def best_of_n_part(choices: Sequence[Chosen], num_models: int) -> SweepPart:
    """The part of a sweep's report about choices among answers; the first ``num_models`` are reward models.

    Each later reward model is compared with the first, and each with majority and a random pick.
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
        lines.append([f"{b.name} less {a.name}", points, interval, f"{gap.p:.2g}"])
        if gap.low > 0:
            way = "better than"
        elif gap.high < 0:
            way = "worse than"
        else:
            way = "as well as, as far as is shown,"
        findings.append(f"{b.name} chooses {way} {a.name} at n = {last}: {points} points [{interval}]")
    shares = []
    by_name = {}
    for choice in choices:
        low, high = choice.bounds[last]
        shares.append([choice.name, *(f"{choice.mean(n):.1%}" for n in ns), f"{low:.1%} – {high:.1%}"])
        by_name[choice.name] = {str(n): _plain(choice, n) for n in ns}
    header = ["chosen by", *(f"n = {n}" for n in ns), f"95 % at {last}"]
    tables = [
        TextTable("Right answers chosen among n", header, shares),
        TextTable(f"Differences at n = {last}", ["difference", "points", "95 % over problems", "p"], lines),
    ]
    data = {"chosen_by": by_name, "differences": differences}
    return SweepPart(tables, findings, CHOICE_NOTES, data, (choices, num_models))


def _plain(choice: Chosen, n: int) -> dict[str, object]:
    low, high = choice.bounds[n]
    return {"mean": choice.mean(n), "low": low, "high": high, "seeds": choice.seeds[n]}


BEST_OF_N = "best of n"
PROXY = "sampled_reward"  # a policy's whole reward
GOLD = "sampled_accuracy"
OVER_NOTES = [
    "gold: the share of answers that the verifier finds right; proxy: the score of the reward model, in standard "
    "deviations of its scores of the start's own answers, from their mean; on held-out problems",
    "KL of a policy is measured (the exact sum over next-token distributions, on its own answers); that of best-of-n "
    "is log n − (n − 1)/n, an upper bound where answers repeat, as they do when most are short",
    "best-of-n is the mean over all subsets of the answers to a problem, for n = 1, 2, 4, ...",
    "± and bands: 95 % Student-t intervals over seeds; a seed has its own reward model, pairs and policies. The peak "
    "of a seed is chosen by the other seeds when the fall from it is measured",
]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A policy in training: after ``at`` updates, or with the best of ``at`` answers. KL in nats per answer."""

    at: int
    kl: float
    gold: float
    proxy: float

    @property
    def distance(self) -> float:
        return math.sqrt(max(0.0, self.kl))


@dataclass(frozen=True, slots=True)
class Mean:
    """The same point of all seeds: mean distance, and gold and proxy with their intervals over seeds."""

    at: int
    distance: float
    gold: Summary
    proxy: Summary


@dataclass(frozen=True)
class MethodCurve:
    """One method over its seeds. ``curves``: by seed, points in order, of which the first is the start, where KL is 0.

    ``peak``: the point at which the mean gold reward is highest. ``drop``: gold at the peak less gold at the end, where
    the peak of a seed is that of the other seeds' mean, so that chance in a seed does not choose its own peak. With one
    seed there are no others: then it is the highest value less the last, which chance makes positive. Both are None
    without two common points.
    """

    name: str
    curves: dict[int, list[CurvePoint]]
    means: list[Mean]
    peak: Mean | None
    drop: Summary | None

    @property
    def is_shown(self) -> bool:
        """True if the 95 % interval of the drop lies above 0; never with one seed."""
        if self.drop is None or self.drop.half_width is None:
            return False
        return self.drop.mean - self.drop.half_width > 0


def best_of_n_kl(n: int) -> float:
    """KL of the best of n answers from the distribution that they were drawn from: ``log n − (n − 1)/n`` nats.

    Exact where no two answers have the same score with positive probability; where answers repeat or tie it is an
    upper bound (Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy").

    Source: Stiennon et al. (2020), "Learning to summarize from human feedback", appendix G.3; Gao et al. (2022),
    "Scaling laws for reward model overoptimization", section 2.
    """
    assert n >= 1, "the best of at least one answer"
    return math.log(n) - (n - 1) / n


def best_of_n_points(items: Sequence[Item], ns: Sequence[int]) -> list[CurvePoint]:
    """Gold (the share that is right) and proxy (the score) of the best of n under the score, for each n.

    The mean over items of the exact mean over all subsets of n of an item's N samples (``ranking.best_of_n``): the
    estimator of Nakano et al. (2021), "WebGPT", appendix I, as Gao et al. (2022) use it; ties are shared. A sample
    without a score is chosen last, and counts for the proxy as much as the item's lowest score.
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
    """The evaluations of a policy's run that measured KL, by step. Of several held-out tasks, the first counts."""
    measured = [point for point in evaluation_points(rows) if {"kl_initial", GOLD, PROXY} <= point.results.keys()]
    by_step = {point.step: point.results for point in measured if point.name == measured[0].name}
    points = []
    for step, results in sorted(by_step.items()):
        points.append(CurvePoint(step, results["kl_initial"], results[GOLD], results[PROXY]))
    return points


def score_scale(items: Sequence[Item]) -> tuple[float, float]:
    """Mean and standard deviation of the scores of all samples; the deviation is 1 where they do not differ."""
    scores = [sample.score for item in items for sample in item.samples if sample.score is not None]
    mean = 0.0
    deviation = 1.0
    if scores:
        mean = statistics.fmean(scores)
    if len(set(scores)) > 1:
        deviation = statistics.pstdev(scores)
    return mean, deviation


def describe_method(name: str, curves: Mapping[int, list[CurvePoint]]) -> MethodCurve:
    """Means at the points that all seeds have, by ``at``, and whether gold turns over."""
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
    """The curves of best-of-n and of each policy, the proxy in units of its seed's scores of the start's answers.

    Args:
        chosen: by seed, the answers of the start with the proxy's scores.
        policies: (row, seed, metrics) of the finished runs.
    """
    found = [(BEST_OF_N, seed, best_of_n_points(items, powers_of_two(items))) for seed, items in chosen.items()]
    found += [(row, seed, training_points(metrics)) for row, seed, metrics in policies if seed in chosen]
    curves: dict[str, dict[int, list[CurvePoint]]] = {}
    for name, seed, points in found:  # seeds have reward models of their own, each with its own unit
        mean, deviation = score_scale(chosen[seed])
        curves.setdefault(name, {})[seed] = [replace(p, proxy=(p.proxy - mean) / deviation) for p in points]
    return [describe_method(name, own) for name, own in curves.items()]


def overoptimization_part(methods: Sequence[MethodCurve]) -> SweepPart:
    """The part of a sweep's report about gold and proxy rewards."""
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
    header = ["method", "seeds", "√KL at the end", "proxy at the end", "gold at the start", "gold at its peak"]
    header += ["√KL there", "gold at the end", "peak less end, points"]
    return SweepPart([TextTable("Gold and proxy", header, lines)], findings, OVER_NOTES, {"methods": data}, (methods,))


def _finding(method: MethodCurve, peak: Mean) -> str:
    """State whether the gold reward turned over while the proxy did not."""
    first = method.means[0]
    last = method.means[-1]
    if peak is last:
        end = show_summary(last.gold, is_share=True)
        return f"{method.name}: no over-optimization up to √KL {last.distance:.2f}: gold is highest at the end ({end})"
    if len(method.curves) == 1:
        verdict = "one seed gives a curve, and no interval"
    elif not method.is_shown:
        verdict = "a fall that may be chance"
    elif last.proxy.mean > peak.proxy.mean:
        verdict = "over-optimized"
    else:
        verdict = "gold falls, but the proxy does too"
    return (
        f"{method.name}: {verdict}: gold goes from {first.gold.mean:.1%} over {peak.gold.mean:.1%} at √KL "
        f"{peak.distance:.2f} to {last.gold.mean:.1%} at √KL {last.distance:.2f}; from that peak on the proxy goes "
        f"from {peak.proxy.mean:+.2f} to {last.proxy.mean:+.2f}"
    )
