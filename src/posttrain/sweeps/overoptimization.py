"""Over-optimization: gold and proxy reward against √KL, for best-of-n and for trained policies.

The distance of a policy is d = √KL(π‖π_start), KL in nats per answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from posttrain.evals.items import Item
from posttrain.evals.ranking import best_of_n
from posttrain.evals.statistics import Summary, summarize_seeds
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.store.metrics import MetricsRow, evaluation_points
from posttrain.sweeps.best_of_n import powers_of_two
from posttrain.sweeps.part import Part, show_summary

BEST_OF_N = "best of n"
PROXY = "sampled_reward"  # the proxy is a policy's whole reward
GOLD = "sampled_accuracy"
FORMS: Mapping[Shape, str] = {"best_of_n": "d (α − β d)", "training": "d (α − β log d)"}
Shape = Literal["best_of_n", "training"]
# The second term of each shape, which is subtracted: d(α − β d) and d(α − β log d).
_SECOND: Mapping[Shape, Callable[[float], float]] = {
    "best_of_n": lambda d: d * d,
    "training": lambda d: d * math.log(d),
}


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


@dataclass(frozen=True)
class Curve:
    """The points of one method with one seed, in order; the first one is the start, where KL is 0."""

    method: str
    seed: int
    points: list[Point]


@dataclass(frozen=True, slots=True)
class MeanPoint:
    """The same point of all seeds: mean distance, and gold and proxy with their intervals over seeds."""

    at: int
    distance: float
    gold: Summary
    proxy: Summary


@dataclass(frozen=True, slots=True)
class Fit:
    """``R(d) − R(0) = d (α − β d)`` or ``d (α − β log d)``; ``explained`` is R², 1 for a perfect fit."""

    alpha: float
    beta: float
    explained: float


@dataclass(frozen=True)
class Peak:
    """The highest gold reward, and the loss from there to the end.

    ``peak_at`` is that of the mean over seeds. ``drop``: gold at the peak less gold at the end, where the peak
    of a seed is that of the other seeds' mean, so that chance in a seed does not choose its own peak. With one seed
    there are no others: then ``drop`` is the highest value less the last, which chance makes positive.
    """

    peak_at: int
    start: Summary
    peak: Summary
    end: Summary
    drop: Summary

    @property
    def is_shown(self) -> bool:
        """True if the 95 % interval of the drop lies above 0; never with one seed."""
        return self.drop.half_width is not None and self.drop.mean - self.drop.half_width > 0


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
    answered = [item for item in items if item.samples]
    points = []
    for n in ns:
        gold, proxy = [], []
        for item in answered:
            scores = [-math.inf if sample.score is None else sample.score for sample in item.samples]
            lowest = min((s for s in scores if s > -math.inf), default=0.0)
            gold.append(best_of_n(scores, [float(sample.is_right) for sample in item.samples], n))
            proxy.append(best_of_n(scores, [max(s, lowest) for s in scores], n))
        points.append(Point(n, best_of_n_kl(n), statistics.fmean(gold), statistics.fmean(proxy)))
    return points


def score_scale(items: Sequence[Item]) -> tuple[float, float]:
    """Mean and standard deviation of the scores of all samples; the deviation is 1 where they do not differ."""
    scores = [sample.score for item in items for sample in item.samples if sample.score is not None]
    mean = statistics.fmean(scores) if scores else 0.0
    return mean, statistics.pstdev(scores) if len(set(scores)) > 1 else 1.0


def in_units_of(curve: Curve, scale: tuple[float, float]) -> Curve:
    """The curve with ``(proxy − mean) / deviation``: seeds have reward models of their own, each with its own unit."""
    mean, deviation = scale
    return replace(curve, points=[replace(p, proxy=(p.proxy - mean) / deviation) for p in curve.points])


def mean_curve(curves: Sequence[Curve]) -> list[MeanPoint]:
    """The points that all seeds of one method have in common, by ``at``."""
    tables = [{point.at: point for point in curve.points} for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    means = []
    for at in shared:
        points = [table[at] for table in tables]
        gold, proxy = summarize_seeds([p.gold for p in points]), summarize_seeds([p.proxy for p in points])
        assert gold is not None
        assert proxy is not None
        means.append(MeanPoint(at, statistics.fmean(p.distance for p in points), gold, proxy))
    return means


def fit_shape(points: Sequence[Point], shape: Shape) -> Fit | None:
    """α and β of the gold reward by least squares through the start; None for fewer than two distances above 0.

    Source: Gao et al. (2022), section 3.1: ``d(α − β d)`` for best-of-n and ``d(α − β log d)`` for reinforcement
    learning; Rafailov et al. (2024), "Scaling laws for reward model overoptimization in direct alignment
    algorithms", use the latter for DPO. Their gold reward is a reward model's score; ours may be a share, which
    has a ceiling that these shapes know nothing of.
    """
    moved = [point for point in points if point.distance > 0]
    if len({point.distance for point in moved}) < 2:
        return None
    columns = np.array([(point.distance, -_SECOND[shape](point.distance)) for point in moved])
    gains = np.array([point.gold - points[0].gold for point in moved])
    (alpha, beta), _, rank, _ = np.linalg.lstsq(columns, gains, rcond=None)
    if rank < 2:
        return None
    total = float(((gains - gains.mean()) ** 2).sum())
    left = float(((gains - columns @ (alpha, beta)) ** 2).sum())
    return Fit(float(alpha), float(beta), 1.0 - left / total if total else 0.0)


def fitted(fit: Fit, shape: Shape, distance: float) -> float:
    """The gain ``R(d) − R(0)`` of a fit."""
    return fit.alpha * distance - fit.beta * (_SECOND[shape](distance) if distance > 0 else 0.0)


def find_peak(curves: Sequence[Curve]) -> Peak | None:
    """The peak of the gold reward over the seeds of one method; None without two common points."""
    means = mean_curve(curves)
    if len(means) < 2:
        return None
    at = [point.at for point in means]
    tables = [{point.at: point.gold for point in curve.points} for curve in curves]

    def peak_of(chosen: Sequence[Mapping[int, float]]) -> int:
        return max(at, key=lambda a: (math.fsum(table[a] for table in chosen), -a))

    drops = []
    for index, table in enumerate(tables):
        others = [other for i, other in enumerate(tables) if i != index]
        drops.append(table[peak_of(others or [table])] - table[at[-1]])
    drop = summarize_seeds(drops)
    assert drop is not None
    peak = peak_of(tables)
    return Peak(peak, means[0].gold, means[at.index(peak)].gold, means[-1].gold, drop)


@dataclass(frozen=True)
class MethodCurve:
    """One method over its seeds. Fits are of the seeds one by one."""

    name: str
    shape: Shape
    curves: list[Curve]
    means: list[MeanPoint]
    turn: Peak | None
    fits: list[Fit]

    @property
    def alpha(self) -> Summary | None:
        return summarize_seeds([fit.alpha for fit in self.fits])

    @property
    def beta(self) -> Summary | None:
        return summarize_seeds([fit.beta for fit in self.fits])


def training_points(rows: Sequence[MetricsRow]) -> list[Point]:
    """The evaluations of a policy's run that measured drift, by step. Of several held-out tasks, the first counts."""
    points = [p for p in evaluation_points(rows) if {"kl_from_start", GOLD, PROXY} <= p.results.keys()]
    own = {p.step: p.results for p in points if p.name == points[0].name}
    return [Point(step, r["kl_from_start"], r[GOLD], r[PROXY]) for step, r in sorted(own.items())]


def choosing_points(items: Sequence[Item]) -> list[Point]:
    """Best-of-n for n = 1, 2, 4, ... up to the samples that each item has."""
    return best_of_n_points(items, powers_of_two(min(len(item.samples) for item in items if item.samples)))


def describe_method(name: str, shape: Shape, curves: Sequence[Curve]) -> MethodCurve:
    """Means over seeds, fits and whether gold turns over."""
    fits = [fit for curve in curves if (fit := fit_shape(curve.points, shape)) is not None]
    return MethodCurve(name, shape, list(curves), mean_curve(curves), find_peak(curves), fits)


def tables(methods: Sequence[MethodCurve]) -> list[TextTable]:
    """The ends of the curves, and their shapes."""
    header = ["method", "seeds", "√KL at the end", "proxy at the end", "gold at the start", "gold at its peak"]
    header += ["√KL there", "gold at the end", "peak less end, points"]
    lines = []
    for method in methods:
        turn, last = method.turn, method.means[-1]
        line = [method.name, str(len(method.curves)), f"{last.distance:.2f}", show_summary(last.proxy)]
        if turn is None:
            lines.append([*line, *[NOTHING] * 5])
            continue
        there = next(point.distance for point in method.means if point.at == turn.peak_at)
        line += [show_summary(turn.start, is_share=True), show_summary(turn.peak, is_share=True), f"{there:.2f}"]
        drop = f"{turn.drop.mean * 100:+.1f}"
        drop += f" ± {turn.drop.half_width * 100:.1f}" if turn.drop.half_width is not None else ""
        lines.append([*line, show_summary(turn.end, is_share=True), drop])
    shapes = [
        [method.name, FORMS[method.shape], show_summary(method.alpha), show_summary(method.beta), _explained(method)]
        for method in methods
    ]
    return [
        TextTable("Gold and proxy", header, lines),
        TextTable("Shape of the gold reward, d = √KL", ["method", "R(d) − R(0)", "α", "β", "R²"], shapes, num_labels=2),
    ]


def _explained(method: MethodCurve) -> str:
    return f"{statistics.fmean(fit.explained for fit in method.fits):.2f}" if method.fits else NOTHING


def findings(methods: Sequence[MethodCurve]) -> list[str]:
    """For each method, whether the gold reward turned over while the proxy did not: a sentence."""
    return [_finding(method, method.turn) for method in methods if method.turn is not None]


def _finding(method: MethodCurve, turn: Peak) -> str:
    means = {point.at: point for point in method.means}
    peak, last = means[turn.peak_at], method.means[-1]
    proxy = f"the proxy goes from {peak.proxy.mean:+.2f} to {last.proxy.mean:+.2f}"
    curve = (
        f"gold goes from {turn.start.mean:.1%} over {turn.peak.mean:.1%} at √KL {peak.distance:.2f} to "
        f"{turn.end.mean:.1%} at √KL {last.distance:.2f}; from that peak on {proxy}"
    )
    if turn.peak_at == last.at:
        reach = f"no over-optimization up to √KL {last.distance:.2f}"
        return f"{method.name}: {reach}: gold is highest at the end ({show_summary(turn.end, is_share=True)})"
    if turn.is_shown:
        verb = "over-optimized" if last.proxy.mean > peak.proxy.mean else "gold falls, but the proxy does too"
        return f"{method.name}: {verb}: {curve}"
    if turn.drop.half_width is None:
        return f"{method.name}: one seed gives a curve, and no interval: {curve}"
    return f"{method.name}: a fall that may be chance (its interval over seeds holds 0): {curve}"


def notes(methods: Sequence[MethodCurve], samples: int, num_seeds: int) -> list[str]:
    """How to read the numbers."""
    lines = [
        "gold: the share of answers that the verifier finds right; proxy: the score of the reward model, in standard "
        "deviations of its scores of the start's own answers, from their mean. On held-out problems, sampled as in "
        "training",
        "KL of a policy is measured (the exact sum over next-token distributions, on its own answers); that of "
        "best-of-n is log n − (n − 1)/n, an upper bound where answers repeat, as they do when most are short",
        f"best-of-n is the mean over all subsets of the {samples} answers to a problem, for n = 1, 2, 4, ...",
    ]
    if num_seeds > 1:
        lines.append(
            "± and bands: 95 % Student-t intervals over seeds; a seed has its own reward model, pairs and policies. "
            "The peak of a seed is chosen by the other seeds when the fall from it is measured"
        )
    if any(method.shape == "training" for method in methods):
        lines.append(
            "the shapes are those of Gao et al. (2022), fitted to each seed by least squares; a share has a floor and "
            "a ceiling that they do not know of"
        )
    return lines


def to_data(methods: Sequence[MethodCurve]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "methods": {
            method.name: {
                "seeds": {str(c.seed): [asdict(p) | {"distance": p.distance} for p in c.points] for c in method.curves},
                "mean": [asdict(point) for point in method.means],
                "form": FORMS[method.shape],
                "alpha": asdict(method.alpha) if method.alpha else None,
                "beta": asdict(method.beta) if method.beta else None,
                "fits": [asdict(fit) for fit in method.fits],
                "turn_over": asdict(method.turn) | {"is_shown": method.turn.is_shown} if method.turn else None,
            }
            for method in methods
        }
    }


def overoptimization_part(methods: Sequence[MethodCurve], samples: int, num_seeds: int) -> Part:
    """The part of a sweep's report about gold and proxy rewards."""
    return Part(tables(methods), findings(methods), notes(methods, samples, num_seeds), to_data(methods))


def collect_curves(
    chosen: Mapping[int, Sequence[Item]], policies: Sequence[tuple[str, int, Sequence[MetricsRow]]]
) -> list[MethodCurve]:
    """The curves of best-of-n and of each policy, the proxy in units of its seed's scores of the start's answers.

    Args:
        chosen: by seed, the answers of the start with the proxy's scores.
        policies: (row, seed, metrics) of the finished runs.
    """
    scales = {seed: score_scale(items) for seed, items in chosen.items()}
    curves = {BEST_OF_N: [Curve(BEST_OF_N, seed, choosing_points(items)) for seed, items in chosen.items()]}
    for row, seed, metrics in policies:
        if seed in scales:
            curves.setdefault(row, []).append(Curve(row, seed, training_points(metrics)))
    return [
        describe_method(
            name, "best_of_n" if name == BEST_OF_N else "training", [in_units_of(c, scales[c.seed]) for c in own]
        )
        for name, own in curves.items()
    ]
