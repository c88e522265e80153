"""Over-optimization: gold and proxy reward against √KL, for best-of-n and for trained policies.

The distance of a policy is d = √KL(π‖π_start), KL in nats per answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from posttrain.evaluation.items import Item
from posttrain.evaluation.statistics import Summary, best_of_n, summarize_seeds
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.metrics import MetricsRow, evaluation_points
from posttrain.sweeps.best_of_n import powers_of_two
from posttrain.sweeps.results import Part, show_summary

BEST_OF_N = "best of n"
PROXY, GOLD = "sampled_reward", "sampled_accuracy"  # the proxy is a policy's whole reward
NOTES = [
    "gold: the share of answers that the verifier finds right; proxy: the score of the reward model, in standard "
    "deviations of its scores of the start's own answers, from their mean; on held-out problems",
    "KL of a policy is measured (the exact sum over next-token distributions, on its own answers); that of best-of-n "
    "is log n − (n − 1)/n, an upper bound where answers repeat, as they do when most are short",
    "best-of-n is the mean over all subsets of the answers to a problem, for n = 1, 2, 4, ...",
    "± and bands: 95 % Student-t intervals over seeds; a seed has its own reward model, pairs and policies. The peak "
    "of a seed is chosen by the other seeds when the fall from it is measured",
]


@dataclass(frozen=True, slots=True)
class Point:
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
    curves: dict[int, list[Point]]
    means: list[Mean]
    peak: Mean | None
    drop: Summary | None

    @property
    def is_shown(self) -> bool:
        """True if the 95 % interval of the drop lies above 0; never with one seed."""
        half = self.drop.half_width if self.drop is not None else None
        return self.drop is not None and half is not None and self.drop.mean - half > 0


def best_of_n_kl(n: int) -> float:
    """KL of the best of n answers from the distribution that they were drawn from: ``log n − (n − 1)/n`` nats.

    Exact where no two answers have the same score with positive probability; where answers repeat or tie it is an
    upper bound (Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy").

    Source: Stiennon et al. (2020), "Learning to summarize from human feedback", appendix G.3; Gao et al. (2022),
    "Scaling laws for reward model overoptimization", section 2.
    """
    assert n >= 1, "the best of at least one answer"
    return math.log(n) - (n - 1) / n


def best_of_n_points(items: Sequence[Item], ns: Sequence[int]) -> list[Point]:
    """Gold (the share that is right) and proxy (the score) of the best of n under the score, for each n.

    The mean over items of the exact mean over all subsets of n of an item's N samples (``ranking.best_of_n``): the
    estimator of Nakano et al. (2021), "WebGPT", appendix I, as Gao et al. (2022) use it; ties are shared. A sample
    without a score is chosen last, and counts for the proxy as much as the item's lowest score.
    """
    points = []
    for n in ns:
        gold, proxy = [], []
        for item in (item for item in items if item.samples):
            scores = [-math.inf if sample.score is None else sample.score for sample in item.samples]
            lowest = min((s for s in scores if s > -math.inf), default=0.0)
            gold.append(best_of_n(scores, [float(sample.is_correct) for sample in item.samples], n))
            proxy.append(best_of_n(scores, [max(s, lowest) for s in scores], n))
        points.append(Point(n, best_of_n_kl(n), statistics.fmean(gold), statistics.fmean(proxy)))
    return points


def training_points(rows: Sequence[MetricsRow]) -> list[Point]:
    """The evaluations of a policy's run that measured KL, by step. Of several held-out tasks, the first counts."""
    points = [p for p in evaluation_points(rows) if {"kl_initial", GOLD, PROXY} <= p.results.keys()]
    own = {p.step: p.results for p in points if p.name == points[0].name}
    return [Point(step, r["kl_initial"], r[GOLD], r[PROXY]) for step, r in sorted(own.items())]


def score_scale(items: Sequence[Item]) -> tuple[float, float]:
    """Mean and standard deviation of the scores of all samples; the deviation is 1 where they do not differ."""
    scores = [sample.score for item in items for sample in item.samples if sample.score is not None]
    mean = statistics.fmean(scores) if scores else 0.0
    return mean, statistics.pstdev(scores) if len(set(scores)) > 1 else 1.0


def describe_method(name: str, curves: Mapping[int, list[Point]]) -> MethodCurve:
    """Means at the points that all seeds have, by ``at``, and whether gold turns over."""
    tables = [{point.at: point for point in points} for points in curves.values()]
    means = []
    for at in sorted(set.intersection(*(set(table) for table in tables))):
        points = [table[at] for table in tables]
        gold, proxy = summarize_seeds([p.gold for p in points]), summarize_seeds([p.proxy for p in points])
        assert gold is not None
        assert proxy is not None
        means.append(Mean(at, statistics.fmean(p.distance for p in points), gold, proxy))
    if len(means) < 2:
        return MethodCurve(name, dict(curves), means, None, None)

    def peak_of(chosen: Sequence[Mapping[int, Point]]) -> Mean:
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
    curves: dict[str, dict[int, list[Point]]] = {}
    for name, seed, points in found:  # seeds have reward models of their own, each with its own unit
        mean, deviation = score_scale(chosen[seed])
        curves.setdefault(name, {})[seed] = [replace(p, proxy=(p.proxy - mean) / deviation) for p in points]
    return [describe_method(name, own) for name, own in curves.items()]


def overoptimization_part(methods: Sequence[MethodCurve]) -> Part:
    """The part of a sweep's report about gold and proxy rewards."""
    lines, findings, data = [], [], {}
    for method in methods:
        first, last, peak = method.means[0], method.means[-1], method.peak
        line = [method.name, str(len(method.curves)), f"{last.distance:.2f}", show_summary(last.proxy)]
        if peak is not None:
            start, top, end = (show_summary(point.gold, is_share=True) for point in (first, peak, last))
            line += [start, top, f"{peak.distance:.2f}", end, show_summary(method.drop, is_share=True)]
            findings.append(_finding(method, peak))
        lines.append([*line, *[NOTHING] * (9 - len(line))])
        data[method.name] = asdict(method) | {"is_shown": method.is_shown}
    header = ["method", "seeds", "√KL at the end", "proxy at the end", "gold at the start", "gold at its peak"]
    header += ["√KL there", "gold at the end", "peak less end, points"]
    return Part([TextTable("Gold and proxy", header, lines)], findings, NOTES, {"methods": data}, (methods,))


def _finding(method: MethodCurve, peak: Mean) -> str:
    """State whether the gold reward turned over while the proxy did not."""
    first, last = method.means[0], method.means[-1]
    if peak is last:
        end = show_summary(last.gold, is_share=True)
        return f"{method.name}: no over-optimization up to √KL {last.distance:.2f}: gold is highest at the end ({end})"
    verdict = "over-optimized" if last.proxy.mean > peak.proxy.mean else "gold falls, but the proxy does too"
    if not method.is_shown:
        verdict = "a fall that may be chance" if len(method.curves) > 1 else "one seed gives a curve, and no interval"
    return (
        f"{method.name}: {verdict}: gold goes from {first.gold.mean:.1%} over {peak.gold.mean:.1%} at √KL "
        f"{peak.distance:.2f} to {last.gold.mean:.1%} at √KL {last.distance:.2f}; from that peak on the proxy goes "
        f"from {peak.proxy.mean:+.2f} to {last.proxy.mean:+.2f}"
    )
