"""Reward against distance from the start: the numbers behind an over-optimization study.

The distance of a policy is d = √KL(π‖π_start), KL in nats per answer. Pure functions of numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.evals.items import Item
from posttrain.evals.ranking import best_of_n
from posttrain.evals.seeds import Summary, summarize_seeds

Shape = Literal["best_of_n", "training"]
# The second term of each shape, which is subtracted: d(α − β d) and d(α − β log d).
_SECOND: Mapping[Shape, Callable[[float], float]] = {
    "best_of_n": lambda d: d * d,
    "training": lambda d: d * math.log(d),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A policy on its way: after ``at`` updates, or with the best of ``at`` answers. KL in nats per answer."""

    at: int
    kl: float
    gold: float
    proxy: float

    @property
    def distance(self) -> float:
        return math.sqrt(max(0.0, self.kl))


@dataclass(frozen=True)
class Course:
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
class TurnOver:
    """Where the gold reward is highest, and what is lost from there to the end.

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
        """Whether the 95 % interval of the drop lies above 0; never with one seed."""
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


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... below ``samples``, and ``samples``."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def score_scale(items: Sequence[Item]) -> tuple[float, float]:
    """Mean and standard deviation of the scores of all samples; the deviation is 1 where they do not differ."""
    scores = [sample.score for item in items for sample in item.samples if sample.score is not None]
    mean = statistics.fmean(scores) if scores else 0.0
    return mean, statistics.pstdev(scores) if len(set(scores)) > 1 else 1.0


def in_units_of(course: Course, scale: tuple[float, float]) -> Course:
    """The course with ``(proxy − mean) / deviation``: seeds have reward models of their own, each with its own unit."""
    mean, deviation = scale
    return replace(course, points=[replace(p, proxy=(p.proxy - mean) / deviation) for p in course.points])


def mean_course(courses: Sequence[Course]) -> list[MeanPoint]:
    """The points that all seeds of one method have in common, by ``at``."""
    tables = [{point.at: point for point in course.points} for course in courses]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    found = []
    for at in shared:
        points = [table[at] for table in tables]
        gold, proxy = summarize_seeds([p.gold for p in points]), summarize_seeds([p.proxy for p in points])
        assert gold is not None
        assert proxy is not None
        found.append(MeanPoint(at, statistics.fmean(p.distance for p in points), gold, proxy))
    return found


def fit_shape(points: Sequence[Point], shape: Shape) -> Fit | None:
    """α and β of the gold reward by least squares through the start; None for fewer than two distances above 0.

    Source: Gao et al. (2022), section 3.1: ``d(α − β d)`` for best-of-n and ``d(α − β log d)`` for reinforcement
    learning; Rafailov et al. (2024), "Scaling laws for reward model overoptimization in direct alignment
    algorithms", use the latter for DPO. Their gold reward is a reward model's score; ours may be a share, which
    has a ceiling that these shapes know nothing of.
    """
    start = points[0].gold
    rows = [(p.distance, _SECOND[shape](p.distance), p.gold - start) for p in points if p.distance > 0]
    if len({first for first, _, _ in rows}) < 2:
        return None
    aa, ab, bb = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (math.fsum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return None
    alpha, second = (bb * ay - ab * by) / determinant, (aa * by - ab * ay) / determinant
    mean = statistics.fmean(y for _, _, y in rows)
    total = math.fsum((y - mean) ** 2 for _, _, y in rows)
    left = math.fsum((y - alpha * first - second * other) ** 2 for first, other, y in rows)
    return Fit(alpha, -second, 1.0 - left / total if total else 0.0)


def fitted(fit: Fit, shape: Shape, distance: float) -> float:
    """``R(d) − R(0)`` of a fit."""
    return fit.alpha * distance - fit.beta * (_SECOND[shape](distance) if distance > 0 else 0.0)


def turn_over(courses: Sequence[Course]) -> TurnOver | None:
    """Whether the gold reward falls after its peak, over the seeds of one method; None without two common points."""
    means = mean_course(courses)
    if len(means) < 2:
        return None
    at = [point.at for point in means]
    tables = [{point.at: point.gold for point in course.points} for course in courses]

    def peak_of(chosen: Sequence[Mapping[int, float]]) -> int:
        return max(at, key=lambda a: (math.fsum(table[a] for table in chosen), -a))

    drops = []
    for index, table in enumerate(tables):
        others = [other for i, other in enumerate(tables) if i != index]
        drops.append(table[peak_of(others or [table])] - table[at[-1]])
    drop = summarize_seeds(drops)
    assert drop is not None
    peak = peak_of(tables)
    return TurnOver(peak, means[0].gold, means[at.index(peak)].gold, means[-1].gold, drop)
