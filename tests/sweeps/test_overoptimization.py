"""Best-of-n in closed form against brute force, its KL against enumeration, fits against made-up truths."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations, product

import numpy as np
import pytest

from made_up_items import make_sample
from posttrain.evals.items import Item
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.best_of_n import powers_of_two
from posttrain.sweeps.overoptimization import (
    Curve,
    Fit,
    Point,
    best_of_n_kl,
    best_of_n_points,
    choosing_points,
    describe_method,
    find_peak,
    findings,
    fit_shape,
    fitted,
    in_units_of,
    mean_curve,
    notes,
    score_scale,
    tables,
    to_data,
    training_points,
)


def scored(index: int, outcomes: str, scores: list[float | None]) -> Item:
    samples = tuple(make_sample(o, score=s) for o, s in zip(outcomes, scores, strict=True))
    return Item(f"made/{index}", index, "?", "1", {}, samples)


def enumerated_kl(probabilities: list[float], n: int) -> float:
    """KL(best of n ‖ base) where outcome i has a higher score than every outcome before it, over all n-tuples."""
    best = [0.0] * len(probabilities)
    for drawn in product(range(len(probabilities)), repeat=n):
        best[max(drawn)] += math.prod(probabilities[i] for i in drawn)
    assert sum(best) == pytest.approx(1.0)
    return math.fsum(q * math.log(q / p) for q, p in zip(best, probabilities, strict=True))


def uniform_kl(size: int, n: int) -> float:
    """The same for ``size`` equally likely outcomes: the best of n is among the first i with chance (i / size)^n."""
    best = [(i / size) ** n - ((i - 1) / size) ** n for i in range(1, size + 1)]
    return math.fsum(q * math.log(q * size) for q in best if q > 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_the_kl_of_best_of_n_is_the_limit_of_many_different_answers(n: int) -> None:
    assert best_of_n_kl(n) == pytest.approx(uniform_kl(200_000, n), abs=1e-3)
    gaps = [best_of_n_kl(n) - uniform_kl(size, n) for size in (5, 50, 500)]
    assert gaps[0] >= gaps[1] - 1e-9
    assert gaps[1] >= gaps[2] - 1e-9
    assert gaps[2] >= -1e-9
    assert n == 1 or gaps[0] > 0.01  # few answers: the formula is a bound


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_it_is_a_bound_for_any_distribution_of_few_answers(n: int) -> None:
    uniform = enumerated_kl([0.25] * 4, n)
    assert uniform == pytest.approx(uniform_kl(4, n))
    for weights in ([0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4):
        assert enumerated_kl(weights, n) <= best_of_n_kl(n) + 1e-12


def test_the_kl_by_hand() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(math.log(2) - 0.5)
    assert best_of_n_kl(64) == pytest.approx(3.174508)


def brute_force(item: Item, n: int) -> tuple[float, float]:
    """Mean gold and proxy of the best of every subset of n; of tied ones each is taken equally often."""
    lowest = min(s.score for s in item.samples if s.score is not None)
    gold, proxy = [], []
    for subset in combinations(item.samples, n):
        order = [-math.inf if s.score is None else s.score for s in subset]
        tied = [s for s, score in zip(subset, order, strict=True) if score == max(order)]
        gold.append(statistics.fmean(float(s.is_right) for s in tied))
        proxy.append(statistics.fmean(lowest if s.score is None else s.score for s in tied))
    return statistics.fmean(gold), statistics.fmean(proxy)


@pytest.mark.parametrize("seed", range(5))
def test_best_of_n_is_the_mean_over_all_subsets(seed: int) -> None:
    rng = random.Random(seed)
    items = []
    for index in range(4):
        scores: list[float | None] = [rng.choice([None, 0.0, 0.5, 0.5, 1.0, rng.random()]) for _ in range(7)]
        scores[0] = -0.3
        items.append(scored(index, "".join(rng.choice("rwn") for _ in range(7)), scores))
    for point in best_of_n_points(items, range(1, 8)):
        found = [brute_force(item, point.at) for item in items]
        assert point.gold == pytest.approx(statistics.fmean(g for g, _ in found))
        assert point.proxy == pytest.approx(statistics.fmean(p for _, p in found))
        assert point.kl == best_of_n_kl(point.at)


def test_it_is_unbiased_for_fresh_answers() -> None:
    """Best of 3 of 6 drawn from 40 possible answers: its mean over many draws is that of 3 fresh ones, exactly."""
    rng = random.Random(1)
    population = [(rng.choice([0.0, 1.0, 2.0, 3.0]), rng.random() < 0.4) for _ in range(40)]
    exact = 0.0
    for score, right in population:
        below = sum(s < score for s, _ in population)
        tied = sum(s == score for s, _ in population)
        chance = ((below + tied) ** 3 - below**3) / 40**3  # that the best score of three is this one
        exact += chance / tied * right
    draws = []
    for _ in range(4000):
        drawn = [rng.choice(population) for _ in range(6)]
        item = scored(0, "".join("r" if right else "w" for _, right in drawn), [s for s, _ in drawn])
        draws.append(best_of_n_points([item], [3])[0].gold)
    error = statistics.stdev(draws) / math.sqrt(len(draws))
    assert abs(statistics.fmean(draws) - exact) < 4 * error
    assert error < 0.01


def test_an_item_without_answers_is_left_out_and_powers_end_with_all() -> None:
    items = [scored(0, "rw", [1.0, 0.0]), Item("made/1", 1, "?", "1")]
    assert [(p.gold, p.proxy) for p in best_of_n_points(items, [1, 2])] == [(0.5, 0.5), (1.0, 1.0)]
    assert (powers_of_two(64), powers_of_two(6)) == ([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 6])


def test_scores_in_units_of_the_start() -> None:
    items = [scored(0, "rw", [1.0, 3.0]), scored(1, "rw", [5.0, None])]
    mean, deviation = score_scale(items)
    assert (mean, deviation) == (3.0, pytest.approx(math.sqrt(8 / 3)))
    curve = in_units_of(Curve("a", 0, [Point(0, 0.0, 0.5, 3.0), Point(1, 1.0, 0.5, 3.0 + deviation)]), (3.0, deviation))
    assert [p.proxy for p in curve.points] == [0.0, pytest.approx(1.0)]
    assert score_scale([scored(0, "rw", [2.0, 2.0])]) == (2.0, 1.0)
    assert score_scale([scored(0, "rw", [None, None])]) == (0.0, 1.0)


def curve(seed: int, golds: list[float], kls: list[float] | None = None, first: int = 0) -> Curve:
    distances = kls or [float(i * i) for i in range(len(golds))]
    points = [Point(first + i, kl, g, 2 * g) for i, (g, kl) in enumerate(zip(golds, distances, strict=True))]
    return Curve("made", seed, points)


def test_means_are_over_the_points_of_all_seeds() -> None:
    found = mean_curve([curve(0, [0.1, 0.5, 0.9]), curve(1, [0.3, 0.7], [0.0, 4.0])])
    assert [(p.at, p.distance) for p in found] == [(0, 0.0), (1, 1.5)]  # mean of √1 and √4
    assert [p.gold.mean for p in found] == [pytest.approx(0.2), pytest.approx(0.6)]
    assert found[1].proxy.mean == pytest.approx(1.2)
    assert found[1].gold.half_width == pytest.approx(12.7062 * 0.1, rel=1e-4)  # t of one degree, 0.2 / √2 / √2
    assert mean_curve([]) == []


@pytest.mark.parametrize("shape", ["best_of_n", "training"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.8, 0.3), (-0.1, -0.2), (0.5, 0.0)])
def test_a_fit_finds_the_shape_that_made_the_points(shape, alpha: float, beta: float) -> None:
    true = Fit(alpha, beta, 1.0)
    points = [Point(i, (0.4 * i) ** 2, 0.1 + fitted(true, shape, 0.4 * i), 0.0) for i in range(7)]
    found = fit_shape(points, shape)
    assert found is not None
    assert (found.alpha, found.beta) == (pytest.approx(alpha), pytest.approx(beta, abs=1e-9))
    assert found.explained == pytest.approx(1.0)
    d = 1.7
    second = d * d if shape == "best_of_n" else d * math.log(d)
    assert fitted(true, shape, d) == pytest.approx(alpha * d - beta * second)
    assert fitted(true, shape, 0.0) == 0.0


@pytest.mark.parametrize("shape", ["best_of_n", "training"])
def test_a_fit_is_that_of_least_squares(shape) -> None:
    rng = random.Random(3)
    points = [Point(i, (0.3 * i) ** 2, 0.2 + rng.random(), 0.0) for i in range(9)]
    d = np.array([p.distance for p in points[1:]])
    columns = np.stack([d, -d * d if shape == "best_of_n" else -d * np.log(d)], axis=1)
    y = np.array([p.gold - points[0].gold for p in points[1:]])
    (alpha, beta), (residual,), *_ = np.linalg.lstsq(columns, y, rcond=None)
    found = fit_shape(points, shape)
    assert found is not None
    assert (found.alpha, found.beta) == (pytest.approx(alpha), pytest.approx(beta))
    assert found.explained == pytest.approx(1 - residual / ((y - y.mean()) ** 2).sum())


def test_two_distances_are_needed_for_a_fit() -> None:
    assert fit_shape([Point(0, 0.0, 0.1, 0.0), Point(1, 4.0, 0.5, 0.0)], "training") is None
    assert fit_shape([Point(0, 0.0, 0.1, 0.0), *[Point(i, 4.0, 0.5, 0.0) for i in (1, 2)]], "best_of_n") is None


def test_the_fall_from_the_peak_is_measured_where_the_other_seeds_have_theirs() -> None:
    a, b = curve(0, [0.1, 0.9, 0.5, 0.2]), curve(1, [0.1, 0.4, 0.8, 0.3])
    found = find_peak([a, b])
    assert found is not None
    assert found.peak_at == 1  # sums 1.3 and 1.3: the earlier one
    assert (found.peak.mean, found.start.mean, found.end.mean) == (pytest.approx(0.65), 0.1, 0.25)
    # seed 0 at the peak of seed 1 (step 2): 0.5 - 0.2; seed 1 at that of seed 0 (step 1): 0.4 - 0.3
    assert found.drop.mean == pytest.approx(0.2)
    assert found.drop.half_width == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert not found.is_shown


def test_a_fall_is_shown_by_seeds_that_agree() -> None:
    falls = [curve(seed, [0.1, 0.8 + 0.01 * seed, 0.3]) for seed in range(3)]
    found = find_peak(falls)
    assert found is not None
    assert (found.peak_at, found.drop.mean) == (1, pytest.approx(0.51))
    assert found.is_shown
    rises = find_peak([curve(seed, [0.1, 0.5, 0.8 + 0.01 * seed]) for seed in range(3)])
    assert rises is not None
    assert (rises.peak_at, rises.drop.mean, rises.is_shown) == (2, 0.0, False)


def test_one_seed_shows_nothing() -> None:
    found = find_peak([curve(0, [0.1, 0.9, 0.2])])
    assert found is not None
    assert (found.peak_at, found.drop.mean, found.drop.half_width, found.is_shown) == (
        1,
        pytest.approx(0.7),
        None,
        False,
    )
    assert find_peak([curve(0, [0.1])]) is None


def evaluated(step: int, task: str = "stories/validation", **results: float) -> MetricsRow:
    return MetricsRow(step, {f"eval/{task}/{name}": value for name, value in results.items()}, {})


def measured(step: int, kl: float, gold: float, proxy: float, task: str = "stories/validation") -> MetricsRow:
    return evaluated(
        step, task, accuracy=0.5, kl_from_start=kl, sampled_accuracy=gold, sampled_reward=proxy, sampled_num_tokens=9.0
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
    assert points == [Point(0, 0.0, 0.1, -1.0), Point(2, 1.0, 0.4, 0.5), Point(4, 2.25, 0.6, 1.5)]
    assert points[2].distance == 1.5
    assert training_points([MetricsRow(1, {"loss": 0.5}, {})]) == []


def test_points_of_choosing_go_up_to_all_answers() -> None:
    samples = tuple(make_sample(o, score=s) for o, s in (("w", 0.0), ("r", 1.0), ("w", 2.0), ("w", 0.5)))
    points = choosing_points([Item("made/0", 0, "?", "1", {}, samples)])
    assert [p.at for p in points] == [1, 2, 4]
    assert [p.gold for p in points] == [pytest.approx(0.25), pytest.approx(2 / 6), 0.0]
    assert points[2].proxy == 2.0
    assert points[1].kl == best_of_n_kl(2)


def falling(seed: int) -> Curve:
    shift = 0.01 * seed
    return Curve("grpo", seed, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.7 + shift, 1.0), Point(10, 4.0, 0.3, 1.2)])


def rising(seed: int) -> Curve:
    return Curve("dpo", seed, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.5 + 0.01 * seed, 1.0)])


def test_a_fall_under_a_rising_proxy_is_over_optimization() -> None:
    method = describe_method("grpo", "training", [falling(seed) for seed in range(3)])
    (told,) = findings([method])
    assert told == (
        "grpo: over-optimized: gold goes from 10.0% over 71.0% at √KL 1.00 to 30.0% at √KL 2.00; from that peak on the "
        "proxy goes from +1.00 to +1.20"
    )
    line = tables([method])[0].lines[0]
    assert line[:3] == ["grpo", "3", "2.00"]
    assert line[4:8] == ["10.0 ± 0.0 %", "71.0 ± 2.5 %", "1.00", "30.0 ± 0.0 %"]
    assert line[8] == "+41.0 ± 2.5"  # 0.70, 0.71, 0.72 less 0.30; 4.303 · 0.01 / √3
    data = to_data([method])["methods"]["grpo"]
    assert data["turn_over"]["is_shown"] is True
    assert data["seeds"]["1"][1]["gold"] == pytest.approx(0.71)
    assert data["mean"][1]["gold"]["mean"] == pytest.approx(0.71)


def test_what_is_no_over_optimization_is_called_so() -> None:
    rises = describe_method("dpo", "training", [rising(seed) for seed in range(3)])
    both_fall = [
        Curve("x", s, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.7 + 0.01 * s, 1.0), Point(9, 4.0, 0.3, 0.5)])
        for s in range(3)
    ]
    noisy = [
        Curve("y", s, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.5, 1.0), Point(9, 4.0, last, 1.5)])
        for s, last in enumerate((0.1, 0.49, 0.52))
    ]
    told = findings(
        [
            rises,
            describe_method("x", "training", both_fall),
            describe_method("y", "training", noisy),
            describe_method("z", "training", [falling(0)]),
        ]
    )
    assert told[0] == "dpo: no over-optimization up to √KL 1.00: gold is highest at the end (51.0 ± 2.5 %)"
    assert told[1].startswith("x: gold falls, but the proxy does too:")
    assert told[2].startswith("y: a fall that may be chance")
    assert told[3].startswith("z: one seed gives a curve, and no interval")


def test_shapes_are_fitted_seed_by_seed() -> None:
    method = describe_method("grpo", "training", [falling(seed) for seed in range(3)])
    assert len(method.fits) == 3
    assert method.alpha is not None
    # at d = 1 the logarithm is 0, so α is nearly the gain there: the fit goes through both points exactly
    assert method.alpha.mean == pytest.approx(0.61)
    shape = tables([method])[1].lines[0]
    assert shape[:3] == ["grpo", "d (α − β log d)", "0.61 ± 0.02"]
    assert shape[4] == "1.00"


def test_notes_say_what_intervals_are_of() -> None:
    method = describe_method("grpo", "training", [falling(0)])
    assert not any("Student" in note for note in notes([method], 64, 1))
    assert any("Student" in note for note in notes([method], 64, 3))
    assert any("64 answers" in note for note in notes([method], 64, 1))
