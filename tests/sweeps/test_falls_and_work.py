"""Rows that fell after a peak, and sentences about the work that a sweep's runs did."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeness import approx
from posttrain.evaluation.statistics import wilson_interval
from posttrain.recipes.recipe import load_recipe
from posttrain.store.metric_names import ACCURACY, metric_of
from posttrain.store.metrics import EvaluationPoint
from posttrain.sweeps.file import SHELF, shipped_sweeps
from posttrain.sweeps.learning import Peak, RowResult, TrialResult, rank_rows, rows_part
from posttrain.sweeps.made import describe_made, describe_work
from posttrain.sweeps.plan import load_sweep


def row_of(name: str, *curves: list[float], n: int = 300) -> RowResult:
    """A row with a finished trial for each curve of accuracies, at steps 0, 10, 20, ..."""
    trials = []
    for seed, curve in enumerate(curves):
        points = []
        for place, share in enumerate(curve):
            low, high = wilson_interval(share * n, n)
            results = {"accuracy": share, "accuracy_low": low, "accuracy_high": high, "n": float(n)}
            points.append(EvaluationPoint(10 * place, "stories", results))
        info = {"accuracy": curve[-1], "mean_accuracy": curve[-1], "gain": curve[-1] - curve[0]}
        trials.append(TrialResult(name, seed, "finished", 10 * len(curve), points, info))
    (row,) = rank_rows(trials, [name])
    return row


def test_fall_of_a_share_is_beyond_the_interval_at_the_peak() -> None:
    """86.7 % of 300 has Wilson's interval from 82.4 %: 80.7 % is a fall, 84 % is none; nor is a rise."""
    assert row_of("a", [0.07, 0.867, 0.807]).fall(ACCURACY) == Peak(10, 0.867, 0.807)
    assert row_of("a", [0.07, 0.867, 0.84]).fall(ACCURACY) is None
    assert row_of("a", [0.07, 0.5, 0.9]).fall(ACCURACY) is None
    assert row_of("a", [0.07, 0.02]).fall(ACCURACY) is None, "a start and an end have no peak between them"


def test_fall_is_that_of_the_mean_over_seeds() -> None:
    together = row_of("a", [0.1, 0.9, 0.9], [0.1, 0.9, 0.6])
    peak = together.fall(ACCURACY)
    assert peak is not None
    assert (peak.step, peak.value, peak.end) == approx((10, 0.9, 0.75))


def test_fall_of_a_number_needs_seeds() -> None:
    reward = metric_of("reward")

    def of(*curves: list[float]) -> RowResult:
        trials = [
            TrialResult(
                "a", seed, "finished", 20, [EvaluationPoint(10 * i, "t", {"reward": x}) for i, x in enumerate(c)]
            )
            for seed, c in enumerate(curves)
        ]
        return RowResult("a", trials, {})

    assert of([0.0, 3.0, 1.0]).fall(reward) is None, "one seed without an interval"
    assert of([0.0, 3.0, 1.0], [0.0, 3.1, 1.0]).fall(reward) == Peak(10, 3.05, 1.0)
    assert of([0.0, 3.0, 1.0], [0.0, 1.1, 1.0]).fall(reward) is None, "2.0 and 0.1 differ too much"


def test_table_shows_peaks_only_if_a_row_fell() -> None:
    fell, rose = row_of("fell", [0.07, 0.867, 0.807]), row_of("rose", [0.07, 0.5, 0.9])
    part = rows_part([rose, fell], "tiny-sft", ACCURACY, {"fell": "rl/a", "rose": "rl/b"})
    (table,) = part.tables
    place = table.header.index("peak")
    assert {line[0]: line[place] for line in table.lines} == {"rose": "–", "fell": "86.7% at 10", "start": "–"}
    assert part.findings == ["fell fell after its peak: accuracy 86.7% after 10 updates, 80.7% at the end"]
    assert {len(line) for line in table.lines} == {len(table.header)}
    assert part.data["rows"]["fell"]["fall"] == {"step": 10, "value": 0.867, "end": 0.807}
    (quiet,) = rows_part([rose], "tiny-sft", ACCURACY, {"rose": "rl/b"}).tables
    assert "peak" not in quiet.header


def test_describe_work_counts_what_overrides_make() -> None:
    """12 updates, 4 on each batch of 8 x 4 answers: 3 batches, 96 answers."""
    overrides = {
        "train.steps": "12",
        "train.num_minibatches": "4",
        "rollout.num_prompts": "8",
        "rollout.group_size": "4",
    }
    recipe = load_recipe("tiny/grpo", [*overrides.items(), ("eval.every", "0")]).resolve()
    assert describe_work(recipe) == ("12 updates at a rate of up to 3e-05, 96 sampled answers (4 updates on each 32)")
    rows = load_recipe("tiny/sft", [("train.steps", "3")]).resolve()
    assert describe_work(rows).startswith("3 updates at a rate of up to 0.0001, 48 rows read, 500 held-out items")


def test_describe_made_is_of_the_plan_with_its_overrides(tmp_path: Path) -> None:
    plan = load_sweep("tiny/grpo", [("train.steps", "5")], folder=tmp_path, over=("train.lr", ["1e-5", "2e-5"]))
    lines = describe_made(plan)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
        "5 updates at a rate of up to 1e-05",
        "5 updates at a rate of up to 2e-05",
    ]


@pytest.mark.parametrize("name", [name.removeprefix(SHELF) for name in shipped_sweeps()])
def test_descriptions_of_shipped_sweeps_name_no_number_that_a_key_changes(name: str, tmp_path: Path) -> None:
    plan = load_sweep(name, folder=tmp_path)
    shown = [work for line in describe_made(plan) for work in line.split() if work.replace(",", "").isdecimal()]
    said = plan.content.description.replace("(", " ").replace(")", " ").replace(".", " ").replace(";", " ").split()
    assert [word for word in said if word in shown and len(word) > 2] == []
