from __future__ import annotations

import math

import pytest

from made_up_cells import cell_rows, evaluation, make_cell
from posttrain.evals.statistics import wilson_interval
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.comparison import band_over_seeds, find_baseline, rank_methods, read_cell


def test_facts_of_a_cell_by_hand() -> None:
    cell = make_cell("a", 3, [0.1, 0.3, 0.4])
    assert (cell.method, cell.seed, cell.step, cell.evaluation) == ("a", 3, 4, "stories/validation")
    facts = cell.facts
    assert facts["accuracy"] == 0.4
    assert facts["start_accuracy"] == 0.1
    assert facts["gain"] == pytest.approx(0.3)
    assert facts["reward"] == 0.5
    assert facts["mean_accuracy"] == pytest.approx(0.275)  # (0.2 · 2 + 0.35 · 2) / 4 updates
    assert facts["train_seconds"] == 8.0  # four updates of two seconds
    assert facts["evaluation_seconds"] == 9.0  # three evaluations of three
    assert facts["sampled_tokens"] == 400.0  # 200 a second for half a second, four times
    assert facts["trained_tokens"] == 320.0
    assert (facts["kl_from_start"], facts["entropy"]) == (0.1, 0.8)
    assert (facts["margin_first"], facts["margin_last"]) == (0.1, 0.4)


def test_the_curve_has_the_seconds_of_training_alone() -> None:
    curve = make_cell("a", 0, [0.1, 0.3, 0.4]).curve
    assert [(p.step, p.seconds, p.value, p.kl) for p in curve] == [
        (0, 0.0, 0.1, 0.0),
        (2, 4.0, 0.3, 0.05),
        (4, 8.0, 0.4, 0.1),
    ]
    assert [p.reward for p in curve] == pytest.approx([0.2, 0.4, 0.5])


def test_recorded_tokens_count_before_rates() -> None:
    timing = {"step_seconds": 1.0, "generated_tokens": 70.0, "generate_seconds": 1.0, "generate_tokens_per_second": 9.0}
    assert read_cell([MetricsRow(1, {"tokens": 5.0}, timing)], "a", 0, "finished").facts["sampled_tokens"] == 70.0


def test_what_was_not_recorded_is_not_there() -> None:
    row = MetricsRow(1, {"loss": 1.0, "tokens": 7.0}, {"step_seconds": 1.0})  # supervised: nothing is sampled
    cell = read_cell([row], "sft", 0, "finished")
    assert cell.facts == {"train_seconds": 1.0, "trained_tokens": 7.0}
    assert (cell.start, cell.curve, cell.evaluation) == ({}, [], None)
    late = read_cell([evaluation(2, 0.5, entropy=math.nan)], "a", 0, "finished")
    assert late.start == {}
    assert {"gain", "start_accuracy", "entropy", "kl_from_start"} & set(late.facts) == set()
    assert late.curve[0].kl is None


def test_a_step_evaluated_twice_counts_once_with_its_last_results() -> None:
    rows = [evaluation(0, 0.1), evaluation(2, 0.2), evaluation(2, 0.3)]
    assert [p.value for p in read_cell(rows, "a", 0, "finished").curve] == [0.1, 0.3]


def test_of_several_tasks_the_first_counts() -> None:
    other = MetricsRow(2, {"eval/gsm8k/test/accuracy": 0.9}, {})
    cell = read_cell([*cell_rows([0.1, 0.2]), other], "a", 0, "finished")
    assert cell.facts["accuracy"] == 0.2


def test_rows_are_sorted_by_mean_and_leave_out_what_did_not_finish() -> None:
    cells = [
        make_cell("a", 0, [0.1, 0.4]),
        make_cell("b", 0, [0.1, 0.6]),
        make_cell("c", 0, [0.1, 0.9], "failed", "boom"),
        make_cell("a", 1, [0.1, 0.5]),
        make_cell("b", 1, [0.1, 1.0], "unfinished"),
    ]
    rows = rank_methods(cells, ["a", "b", "c"])
    assert [row.name for row in rows] == ["b", "a", "c"]
    assert rows[0].summaries["accuracy"].mean == 0.6  # not the unfinished seed
    assert rows[1].summaries["accuracy"].mean == pytest.approx(0.45)
    half = 12.706205 * 0.05 * math.sqrt(2) / math.sqrt(2)  # t(1) · s / √2 with s = 0.05 · √2
    assert rows[1].summaries["accuracy"].half_width == pytest.approx(half, abs=1e-6)
    assert rows[2].summaries == {}


def test_the_baseline_has_the_interval_of_its_problems() -> None:
    baseline = find_baseline([make_cell("a", 0, [0.1, 0.4]), make_cell("b", 0, [0.1, 0.6])], "start")
    assert baseline is not None
    assert baseline.interval == pytest.approx(wilson_interval(2, 20))
    assert baseline.varies is None
    varied = find_baseline([make_cell("a", 0, [0.1, 0.4]), make_cell("a", 1, [0.2, 0.6])], "start")
    assert varied is not None
    assert varied.varies == (0.1, 0.2)
    assert find_baseline([], "start") is None


def test_a_band_is_mean_lowest_and_highest_at_the_steps_that_all_have() -> None:
    short = make_cell("a", 0, [0.1, 0.3])
    long = make_cell("a", 1, [0.2, 0.5, 0.6])
    band = band_over_seeds([short, long, make_cell("a", 2, [0.9, 0.9], "failed")])
    assert band.steps == [0, 2]
    assert band.means == pytest.approx([0.15, 0.4])
    assert (band.low, band.high) == ([0.1, 0.3], [0.2, 0.5])
    assert band.seconds == [0.0, 4.0]
    assert band.kls == pytest.approx([0.0, 0.05])
    assert band_over_seeds([]).steps == []
