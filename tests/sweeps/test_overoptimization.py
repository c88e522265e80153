"""Best-of-n in closed form against brute force, its KL against exact ones, and whether gold turns over."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations

import pytest

from closeness import approx
from made_up_items import make_sample
from posttrain.evaluation.items import Item
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.best_of_n import (
    BEST_OF_N,
    CurvePoint,
    best_of_n_kl,
    best_of_n_points,
    collect_curves,
    describe_method,
    overoptimization_part,
    powers_of_two,
    score_scale,
    training_points,
)


def scored(index: int, outcomes: str, scores: list[float | None]) -> Item:
    samples = tuple(make_sample(o, score=s) for o, s in zip(outcomes, scores, strict=True))
    return Item(f"made/{index}", index, "?", "1", {}, samples)


def uniform_kl(size: int, n: int) -> float:
    """For ``size`` equally likely outcomes: the best of n is among the first i with chance (i / size)^n."""
    best = [(i / size) ** n - ((i - 1) / size) ** n for i in range(1, size + 1)]
    return math.fsum(q * math.log(q * size) for q in best if q > 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_the_kl_of_best_of_n_is_the_limit_of_many_different_answers(n: int) -> None:
    assert best_of_n_kl(n) == approx(uniform_kl(200_000, n), abs=1e-3)
    gaps = [best_of_n_kl(n) - uniform_kl(size, n) for size in (5, 50, 500)]
    assert gaps[0] >= gaps[1] - 1e-9
    assert gaps[1] >= gaps[2] - 1e-9
    assert gaps[2] >= -1e-9
    assert n == 1 or gaps[0] > 0.01  # few answers: the formula is a bound
    assert (best_of_n_kl(2), best_of_n_kl(64)) == (approx(math.log(2) - 0.5), approx(3.174508))


def brute_force(item: Item, n: int) -> tuple[float, float]:
    """Mean gold and proxy of the best of every subset of n; of tied ones each is taken equally often."""
    lowest = min(s.score for s in item.samples if s.score is not None)
    gold, proxy = [], []
    for subset in combinations(item.samples, n):
        order = [-math.inf if s.score is None else s.score for s in subset]
        tied = [s for s, score in zip(subset, order, strict=True) if score == max(order)]
        gold.append(statistics.fmean(float(s.is_correct) for s in tied))
        proxy.append(statistics.fmean(lowest if s.score is None else s.score for s in tied))
    return statistics.fmean(gold), statistics.fmean(proxy)


@pytest.mark.parametrize("seed", range(3))
def test_best_of_n_is_the_mean_over_all_subsets(seed: int) -> None:
    rng = random.Random(seed)
    items = []
    for index in range(4):
        scores: list[float | None] = [rng.choice([None, 0.0, 0.5, 0.5, 1.0, rng.random()]) for _ in range(7)]
        scores[0] = -0.3
        items.append(scored(index, "".join(rng.choice("rwn") for _ in range(7)), scores))
    for point in best_of_n_points(items, range(1, 8)):
        found = [brute_force(item, point.at) for item in items]
        assert point.gold == approx(statistics.fmean(g for g, _ in found))
        assert point.proxy == approx(statistics.fmean(p for _, p in found))
        assert point.kl == best_of_n_kl(point.at)


def test_an_item_without_answers_is_left_out_and_powers_end_with_all() -> None:
    items = [scored(0, "rw", [1.0, 0.0]), Item("made/1", 1, "?", "1")]
    assert [(p.gold, p.proxy) for p in best_of_n_points(items, [1, 2])] == [(0.5, 0.5), (1.0, 1.0)]
    for size, powers in ((64, [1, 2, 4, 8, 16, 32, 64]), (6, [1, 2, 4, 6])):
        assert powers_of_two([scored(0, "r" * size, [0.0] * size), items[1]]) == powers


def test_score_scale_is_mean_and_deviation_of_all_samples() -> None:
    items = [scored(0, "rw", [1.0, 3.0]), scored(1, "rw", [5.0, None])]
    assert score_scale(items) == (3.0, approx(math.sqrt(8 / 3)))
    assert score_scale([scored(0, "rw", [2.0, 2.0])]) == (2.0, 1.0)
    assert score_scale([scored(0, "rw", [None, None])]) == (0.0, 1.0)


def curve(golds: list[float], kls: list[float] | None = None) -> list[CurvePoint]:
    distances = kls or [float(i * i) for i in range(len(golds))]
    return [CurvePoint(i, kl, g, 2 * g) for i, (g, kl) in enumerate(zip(golds, distances, strict=True))]


def test_means_are_over_the_points_of_all_seeds() -> None:
    found = describe_method("made", {0: curve([0.1, 0.5, 0.9]), 1: curve([0.3, 0.7], [0.0, 4.0])}).means
    assert [(p.at, p.distance) for p in found] == [(0, 0.0), (1, 1.5)]  # mean of √1 and √4
    assert [p.gold.mean for p in found] == [approx(0.2), approx(0.6)]
    assert found[1].proxy.mean == approx(1.2)
    assert found[1].gold.half_width == approx(12.7062 * 0.1, rel=1e-4)  # t of one degree, 0.2 / √2 / √2


def test_the_fall_from_the_peak_is_measured_where_the_other_seeds_have_theirs() -> None:
    found = describe_method("made", {0: curve([0.1, 0.9, 0.5, 0.2]), 1: curve([0.1, 0.4, 0.8, 0.3])})
    assert found.peak is not None
    assert found.drop is not None
    assert found.peak.at == 1  # sums 1.3 and 1.3: the earlier one
    assert found.peak.gold.mean == approx(0.65)
    # seed 0 at the peak of seed 1 (step 2): 0.5 - 0.2; seed 1 at that of seed 0 (step 1): 0.4 - 0.3
    assert found.drop.mean == approx(0.2)
    assert found.drop.half_width == approx(12.7062 * 0.1, rel=1e-4)
    assert not found.is_shown


@pytest.mark.parametrize(
    ("curves", "peak_at", "drop", "is_shown"),
    [
        ([[0.1, 0.8 + 0.01 * seed, 0.3] for seed in range(3)], 1, 0.51, True),
        ([[0.1, 0.5, 0.8 + 0.01 * seed] for seed in range(3)], 2, 0.0, False),
        ([[0.1, 0.9, 0.2]], 1, 0.7, False),  # one seed shows nothing
    ],
)
def test_a_fall_is_shown_by_seeds_that_agree(
    curves: list[list[float]], peak_at: int, drop: float, is_shown: bool
) -> None:
    found = describe_method("made", {seed: curve(golds) for seed, golds in enumerate(curves)})
    assert found.peak is not None
    assert found.drop is not None
    assert (found.peak.at, found.drop.mean, found.is_shown) == (peak_at, approx(drop), is_shown)
    assert describe_method("made", {0: curve([0.1])}).peak is None


def evaluated(step: int, task: str = "stories/validation", **results: float) -> MetricsRow:
    return MetricsRow(step, {f"eval/{task}/{name}": value for name, value in results.items()}, {})


def measured(step: int, kl: float, gold: float, proxy: float, task: str = "stories/validation") -> MetricsRow:
    return evaluated(
        step,
        task,
        accuracy=0.5,
        kl_initial=kl,
        sampled_accuracy=gold,
        sampled_reward=proxy,
        sampled_completion_length=9.0,
    )


def test_points_of_training_are_the_evaluations_that_measured_drift() -> None:
    rows = [
        measured(0, 0.0, 0.1, -1.0),
        measured(0, 0.0, 0.9, 9.0, task="other/test"),
        MetricsRow(1, {"loss": 0.5}, {}),
        evaluated(2, accuracy=0.5),
        measured(4, 2.25, 0.7, 1.0),
        measured(2, 1.0, 0.4, 0.5),
        measured(4, 2.25, 0.6, 1.5),  # a resumed run repeats an evaluation; the later one stands
    ]
    points = training_points(rows)
    assert points == [CurvePoint(0, 0.0, 0.1, -1.0), CurvePoint(2, 1.0, 0.4, 0.5), CurvePoint(4, 2.25, 0.6, 1.5)]
    assert points[2].distance == 1.5
    assert training_points([MetricsRow(1, {"loss": 0.5}, {})]) == []


def test_collect_curves_best_of_n_first_and_the_proxy_in_units_of_its_seed() -> None:
    samples = tuple(make_sample(o, score=s) for o, s in (("w", 0.0), ("r", 1.0), ("w", 2.0), ("w", 0.5)))
    items = [Item("made/0", 0, "?", "1", {}, samples)]
    mean, deviation = score_scale(items)
    best, grpo = collect_curves({0: items}, [("grpo", 0, [measured(0, 0.0, 0.1, mean)]), ("grpo", 1, [])])
    assert (best.name, grpo.name, list(grpo.curves)) == (BEST_OF_N, "grpo", [0])  # seed 1 has no scale
    points = best.curves[0]
    assert [p.at for p in points] == [1, 2, 4]
    assert [p.gold for p in points] == [approx(0.25), approx(2 / 6), 0.0]
    assert points[2].proxy == approx((2.0 - mean) / deviation)
    assert points[1].kl == best_of_n_kl(2)
    assert grpo.curves[0][0].proxy == 0.0


def points(*values: tuple[int, float, float, float]) -> list[CurvePoint]:
    return [CurvePoint(0, 0.0, 0.1, 0.0), *(CurvePoint(*value) for value in values)]


def falling(seed: int) -> list[CurvePoint]:
    return points((5, 1.0, 0.7 + 0.01 * seed, 1.0), (10, 4.0, 0.3, 1.2))


def test_a_fall_under_a_rising_proxy_is_over_optimization() -> None:
    method = describe_method("grpo", {seed: falling(seed) for seed in range(3)})
    part = overoptimization_part([method])
    assert part.findings == [
        "grpo: over-optimized: gold starts at 10.0%, peaks at 71.0% (√KL 1.00) and ends at 30.0% (√KL 2.00); "
        "after the peak the proxy moves from +1.00 to +1.20"
    ]
    line = part.tables[0].lines[0]
    assert line[:3] == ["grpo", "3", "2.00"]
    # 0.70, 0.71, 0.72 less 0.30; 4.303 · 0.01 / √3
    assert line[4:] == ["10.0%", "71.0 ± 2.5%", "1.00", "30.0%", "41.0 ± 2.5%"]
    data = part.data["methods"]["grpo"]
    assert data["is_shown"] is True
    assert data["curves"][1][1]["gold"] == approx(0.71)
    assert data["means"][1]["gold"]["mean"] == approx(0.71)


def test_what_is_no_over_optimization_is_called_so() -> None:
    seeds = range(3)
    methods = {
        "dpo": {s: points((5, 1.0, 0.5 + 0.01 * s, 1.0)) for s in seeds},
        "x": {s: points((5, 1.0, 0.7 + 0.01 * s, 1.0), (9, 4.0, 0.3, 0.5)) for s in seeds},
        "y": {s: points((5, 1.0, 0.5, 1.0), (9, 4.0, (0.1, 0.49, 0.52)[s], 1.5)) for s in seeds},
        "z": {0: falling(0)},
    }
    found = overoptimization_part([describe_method(name, curves) for name, curves in methods.items()]).findings
    assert found[0] == "dpo: no over-optimization up to √KL 1.00: gold peaks at the end (51.0 ± 2.5%)"
    assert found[1].startswith("x: gold falls, but so does the proxy:")
    assert found[2].startswith("y: the fall may be chance")
    assert found[3].startswith("z: a single seed, so no interval")
