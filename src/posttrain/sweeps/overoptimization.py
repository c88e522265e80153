"""An over-optimization study: gold and proxy reward against √KL, for best-of-n and for trained policies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.evals.items import Item
from posttrain.evals.seeds import Summary, summarize_seeds
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.store.metrics import MetricsRow, evaluation_points
from posttrain.sweeps.study_curves import (
    Course,
    Fit,
    MeanPoint,
    Point,
    Shape,
    TurnOver,
    best_of_n_points,
    fit_shape,
    mean_course,
    powers_of_two,
    turn_over,
)
from posttrain.sweeps.study_results import show_summary, summary_data

BEST_OF_N = "best of n"
PROXY = "sampled_reward"  # the proxy is a policy's whole reward
GOLD = "sampled_accuracy"
FORMS: Mapping[Shape, str] = {"best_of_n": "d (α − β d)", "training": "d (α − β log d)"}


@dataclass(frozen=True)
class MethodCourse:
    """One method over its seeds: what is drawn and tabled of it. Fits are of the seeds one by one."""

    name: str
    shape: Shape
    courses: list[Course]
    means: list[MeanPoint]
    turn: TurnOver | None
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
    samples = min(len(item.samples) for item in items if item.samples)
    return best_of_n_points(items, powers_of_two(samples))


def describe_method(name: str, shape: Shape, courses: Sequence[Course]) -> MethodCourse:
    """Means over seeds, fits and whether gold turns over."""
    fits = [fit for course in courses if (fit := fit_shape(course.points, shape)) is not None]
    return MethodCourse(name, shape, list(courses), mean_course(courses), turn_over(courses), fits)


def tables(methods: Sequence[MethodCourse]) -> list[TextTable]:
    """The ends of the courses, and their shapes."""
    header = ["method", "seeds", "√KL at the end", "proxy at the end", "gold at the start", "gold at its peak"]
    header += ["√KL there", "gold at the end", "peak less end, points"]
    lines = []
    for method in methods:
        turn, last = method.turn, method.means[-1]
        line = [method.name, str(len(method.courses)), f"{last.distance:.2f}", show_summary(last.proxy)]
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


def _explained(method: MethodCourse) -> str:
    return f"{statistics.fmean(fit.explained for fit in method.fits):.2f}" if method.fits else NOTHING


def findings(methods: Sequence[MethodCourse]) -> list[str]:
    """For each method, whether the gold reward turned over while the proxy did not: a sentence."""
    return [_finding(method, method.turn) for method in methods if method.turn is not None]


def _finding(method: MethodCourse, turn: TurnOver) -> str:
    means = {point.at: point for point in method.means}
    peak, last = means[turn.peak_at], method.means[-1]
    proxy = f"the proxy goes from {peak.proxy.mean:+.2f} to {last.proxy.mean:+.2f}"
    course = (
        f"gold goes from {turn.start.mean:.1%} over {turn.peak.mean:.1%} at √KL {peak.distance:.2f} to "
        f"{turn.end.mean:.1%} at √KL {last.distance:.2f}; from that peak on {proxy}"
    )
    if turn.peak_at == last.at:
        return f"{method.name}: no over-optimization: gold is highest at the end ({turn.end.mean:.1%})"
    if turn.is_shown:
        verb = "over-optimized" if last.proxy.mean > peak.proxy.mean else "gold falls, but the proxy does too"
        return f"{method.name}: {verb}: {course}"
    if turn.drop.half_width is None:
        return f"{method.name}: one seed tells a course, and no more: {course}"
    return f"{method.name}: a fall that may be chance (its interval over seeds holds 0): {course}"


def notes(methods: Sequence[MethodCourse], samples: int, num_seeds: int) -> list[str]:
    """How to read the numbers."""
    told = [
        "gold: the share of answers that the verifier finds right; proxy: the score of the reward model, in standard "
        "deviations of its scores of the start's own answers, from their mean. On held-out problems, sampled as in "
        "training",
        "KL of a policy is measured (the exact sum over next-token distributions, on its own answers); that of "
        "best-of-n is log n − (n − 1)/n, an upper bound where answers repeat, as they do when most are short",
        f"best-of-n is the mean over all subsets of the {samples} answers to a problem, for n = 1, 2, 4, ...",
    ]
    if num_seeds > 1:
        told.append(
            "± and bands: 95 % Student-t intervals over seeds; a seed has its own reward model, pairs and policies. "
            "The peak of a seed is chosen by the other seeds when the fall from it is measured"
        )
    if any(method.shape == "training" for method in methods):
        told.append(
            "the shapes are those of Gao et al. (2022), fitted to each seed by least squares; a share has a floor and "
            "a ceiling that they do not know of"
        )
    return told


def to_data(methods: Sequence[MethodCourse]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "methods": {
            method.name: {
                "seeds": {
                    str(c.seed): [asdict(p) | {"distance": p.distance} for p in c.points] for c in method.courses
                },
                "mean": [
                    {"at": p.at, "distance": p.distance, "gold": summary_data(p.gold), "proxy": summary_data(p.proxy)}
                    for p in method.means
                ],
                "form": FORMS[method.shape],
                "alpha": summary_data(method.alpha),
                "beta": summary_data(method.beta),
                "fits": [asdict(fit) for fit in method.fits],
                "turn_over": _turn_data(method.turn),
            }
            for method in methods
        }
    }


def _turn_data(turn: TurnOver | None) -> dict[str, Any] | None:
    if turn is None:
        return None
    found: dict[str, Any] = {"peak_at": turn.peak_at, "is_shown": turn.is_shown}
    return found | {name: summary_data(getattr(turn, name)) for name in ("start", "peak", "end", "drop")}


def distances(method: MethodCourse, count: int = 60) -> list[float]:
    """Distances at which a fit is drawn: evenly from just above 0 to the farthest mean point."""
    last = max((point.distance for point in method.means), default=0.0)
    return [last * (i + 1) / count for i in range(count)] if last > 0 and math.isfinite(last) else []
