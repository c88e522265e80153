"""From records of runs to tables and sentences of an over-optimization study, with numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_up_items import make_sample
from posttrain.evals.items import Item
from posttrain.reports.charts.study import draw_best_of_n, draw_overoptimization
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.best_of_n import choose
from posttrain.sweeps.overoptimization import (
    Course,
    Point,
    best_of_n_kl,
    choosing_points,
    describe_method,
    distances,
    findings,
    notes,
    tables,
    to_data,
    training_points,
)


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


def falling(seed: int) -> Course:
    shift = 0.01 * seed
    return Course("grpo", seed, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.7 + shift, 1.0), Point(10, 4.0, 0.3, 1.2)])


def rising(seed: int) -> Course:
    return Course("dpo", seed, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.5 + 0.01 * seed, 1.0)])


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
        Course("x", s, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.7 + 0.01 * s, 1.0), Point(9, 4.0, 0.3, 0.5)])
        for s in range(3)
    ]
    noisy = [
        Course("y", s, [Point(0, 0.0, 0.1, 0.0), Point(5, 1.0, 0.5, 1.0), Point(9, 4.0, last, 1.5)])
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
    assert told[3].startswith("z: one seed tells a course, and no more")


def test_shapes_are_fitted_seed_by_seed() -> None:
    method = describe_method("grpo", "training", [falling(seed) for seed in range(3)])
    assert len(method.fits) == 3
    assert method.alpha is not None
    # at d = 1 the logarithm is 0, so α is nearly the gain there: the fit goes through both points exactly
    assert method.alpha.mean == pytest.approx(0.61)
    shape = tables([method])[1].lines[0]
    assert shape[:3] == ["grpo", "d (α − β log d)", "0.61 ± 0.02"]
    assert shape[4] == "1.00"
    assert distances(method, 4) == [0.5, 1.0, 1.5, 2.0]


def test_notes_say_what_intervals_are_of() -> None:
    method = describe_method("grpo", "training", [falling(0)])
    assert not any("Student" in note for note in notes([method], 64, 1))
    assert any("Student" in note for note in notes([method], 64, 3))
    assert any("64 answers" in note for note in notes([method], 64, 1))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    methods = [
        describe_method("best of n", "best_of_n", [falling(seed) for seed in range(2)]),
        describe_method("dpo", "training", [rising(0)]),
    ]
    path = draw_overoptimization(methods, "a study", tmp_path / "a.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    samples = tuple(make_sample(o, score=float(i)) for i, o in enumerate("wrrw"))
    found = choose({"orm": [[Item("made/0", 0, "?", "1", {}, samples)]]})
    path = draw_best_of_n(found, 1, "a study", tmp_path / "b.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
