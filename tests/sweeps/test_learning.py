"""Results of the runs of a sweep: numbers of a trial, rows over seeds, and their table."""

from __future__ import annotations

import json
import math

import pytest

from closeness import approx
from made_up_trials import evaluation, make_sweep, make_trial, trial_rows, two_rows
from posttrain.evaluation.statistics import wilson_interval
from posttrain.store.metric_names import REWARD, choose_primary_metric
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.learning import TrialResult, rank_rows, read_trial, rows_part
from posttrain.sweeps.plan import load_sweep
from posttrain.sweeps.report import numeric_key
from posttrain.sweeps.results import SweepResults


def test_facts_of_a_trial_by_hand() -> None:
    trial = make_trial("a", 3, [0.1, 0.3, 0.4])
    assert (trial.row, trial.seed, trial.step, trial.points[0].name) == ("a", 3, 4, "stories/validation")
    info = trial.info
    assert info["accuracy"] == 0.4
    assert info["start_accuracy"] == 0.1
    assert info["gain"] == approx(0.3)
    assert info["reward"] == 0.5
    assert info["mean_accuracy"] == approx(0.275)  # (0.2 · 2 + 0.35 · 2) / 4 updates
    assert info["train_seconds"] == 8.0  # four updates of two seconds
    assert info["sampled_tokens"] == 400.0  # 200 a second for half a second, four times
    assert info["trained_tokens"] == 320.0
    assert (info["kl_initial"], info["entropy"], info["margin_last"]) == (0.1, 0.8, 0.4)
    assert [(p.step, p.results["accuracy"]) for p in trial.points] == [(0, 0.1), (2, 0.3), (4, 0.4)]


def test_what_was_not_recorded_is_not_there() -> None:
    row = MetricsRow(1, {"loss": 1.0, "trained_tokens": 7.0}, {"step_seconds": 1.0})  # supervised: nothing is sampled
    trial = read_trial([row], "sft", 0, "finished")
    assert trial.info == {"train_seconds": 1.0, "trained_tokens": 7.0}
    assert (trial.start, trial.points) == ({}, [])
    late = read_trial([evaluation(2, 0.5, entropy=math.nan)], "a", 0, "finished")
    assert late.start == {}
    assert {"gain", "start_accuracy", "entropy", "kl_initial"} & set(late.info) == set()


def test_a_step_evaluated_twice_counts_once_with_its_last_results() -> None:
    rows = [evaluation(0, 0.1), evaluation(2, 0.2), evaluation(2, 0.3)]
    assert [p.results["accuracy"] for p in read_trial(rows, "a", 0, "finished").points] == [0.1, 0.3]


def test_of_several_tasks_the_first_counts() -> None:
    other = MetricsRow(2, {"eval/gsm8k/test/accuracy": 0.9}, {})
    trial = read_trial([*trial_rows([0.1, 0.2]), other], "a", 0, "finished")
    assert trial.info["accuracy"] == 0.2


def test_rows_are_sorted_by_mean_and_leave_out_what_did_not_finish() -> None:
    trials = [
        make_trial("a", 0, [0.1, 0.4]),
        make_trial("b", 0, [0.1, 0.6]),
        make_trial("c", 0, [0.1, 0.9], "failed"),
        make_trial("a", 1, [0.1, 0.5]),
        make_trial("b", 1, [0.1, 1.0], "unfinished"),
    ]
    rows = rank_rows(trials, ["a", "b", "c"])
    assert [row.name for row in rows] == ["b", "a", "c"]
    assert rows[0].summaries["accuracy"].mean == 0.6  # not the unfinished seed
    assert rows[1].summaries["accuracy"].mean == approx(0.45)
    half = 12.706205 * 0.05 * math.sqrt(2) / math.sqrt(2)  # t(1) · s / √2 with s = 0.05 · √2
    assert rows[1].summaries["accuracy"].half_width == approx(half, abs=1e-6)
    assert rows[2].summaries == {}


def test_the_table_by_hand() -> None:
    sweep = two_rows()
    table = sweep.tables[0]
    assert table.header == [
        *("method", "seeds", "accuracy", "over the run", "gain, points", "reward", "train seconds", "sampled tokens"),
        *("trained tokens", "KL from initial model", "entropy", "completion length", "margin last"),
    ]
    assert table.lines[0][:3] == ["b", "2", "70.0%"]
    # t(1) · s / √2 with s = 0.1 · √2: 127 points
    assert table.lines[1] == [
        *("a", "2", "50.0 ± 127.1%", "35.0 ± 95.3%", "+40.0", "0.600", "8.0", "400", "320"),
        *("0.100", "0.800", "30.0", "0.400"),
    ]
    low, high = wilson_interval(2, 20)
    assert table.lines[2][:6] == ["start", "–", f"10.0% [{low:.1%}, {high:.1%}]", "–", "–", "0.200"]
    notes = "\n".join(sweep.notes)
    assert "95 % Student-t interval over seeds" in notes
    assert "start: tiny/sft, before the first update, with Wilson's 95 % interval for 20 problems" in notes
    assert make_sweep([make_trial("a", 0, [0.1, 0.4])]).tables[0].lines[0][2] == "40.0%"  # one seed has no interval


def test_failed_and_unfinished_trials_are_shown() -> None:
    trials = [
        make_trial("a", 0, [0.1, 0.4]),
        make_trial("a", 1, [0.1, 0.2], "failed"),
        make_trial("b", 0, [0.1, 0.2], "unfinished"),
    ]
    sweep = make_sweep(trials)
    table = sweep.tables[0]
    assert table.lines[0][:3] == ["a", "1 of 2", "40.0%"]
    assert table.lines[1][:4] == ["b", "0 of 1", "unfinished", "–"]


def test_markdown_and_json_have_everything() -> None:
    sweep = two_rows()
    text, data = sweep.to_markdown(), json.loads(sweep.to_json())
    assert "| b | 2 | 70.0% | 47.5 ± 31.8% | +60.0 |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 5  # header, rule, two rows, start
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "- b (rl/b) differs from the base in: train.lr = 0.1 (base: 0.2)" in text
    assert "```\nposttrain sweep test.yaml --seeds 2\n```" in text
    assert list(data["rows"]) == ["b", "a"]
    assert data["rows"]["a"]["summaries"]["accuracy"]["mean"] == 0.5
    assert data["rows"]["a"]["trials"][1]["points"][2]["results"]["accuracy"] == 0.6
    assert data["start"]["results"]["accuracy"] == 0.1


def by_reward() -> SweepResults:
    """``a`` ends at reward 0.4 with KL 2, ``b`` at 0.9 with KL 8; both start at −0.1."""

    def rows(last: float, kl: float) -> list[MetricsRow]:
        def output(step: int, **results: float) -> MetricsRow:
            info = {"n": 20.0, "num_graded": 0.0, "format": 1.0, "completion_length": 9.0} | results
            return MetricsRow(step, {f"eval/hh/test/{name}": value for name, value in info.items()})

        steps = [MetricsRow(k, {"loss": 0.5, "trained_tokens": 80.0}, {"step_seconds": 2.0}) for k in (1, 2)]
        start = output(0, reward=-0.1, reward_low=-0.2, reward_high=0.0, kl_initial=0.0)
        return [start, *steps, output(2, reward=last, kl_initial=kl)]

    trials = [
        read_trial(rows(*at), name, 0, "finished", primary=REWARD)
        for name, at in (("a", (0.4, 2.0)), ("b", (0.9, 8.0)))
    ]
    return make_sweep(trials, REWARD, "sft")


def test_without_gold_answers_rows_are_ranked_by_reward() -> None:
    sweep = by_reward()
    table = sweep.tables[0]
    assert table.header[:8] == [
        *("method", "seeds", "reward", "over the run", "gain", "train seconds", "trained tokens"),
        "KL from initial model",
    ]
    assert table.header.count("reward") == 1
    assert [line[:5] for line in table.lines] == [
        ["b", "1", "0.900", "0.400", "+1.000"],
        ["a", "1", "0.400", "0.150", "+0.500"],
        ["start", "–", "-0.100 [-0.200, 0.000]", "–", "–"],
    ]
    assert "with the 95 % interval for 20 prompts" in "\n".join(sweep.notes)
    data = json.loads(sweep.to_json())
    assert (data["primary_metric"], data["rows"]["b"]["summaries"]["reward"]["mean"]) == ("reward", 0.9)


def test_where_lower_is_better_the_lowest_is_first_and_a_fall_is_a_gain() -> None:
    loss = choose_primary_metric({"x": {"loss": 2.0}}, named=None, samples=False)
    assert loss is not None

    def trial(name: str, last: float) -> TrialResult:
        output = [MetricsRow(step, {"eval/x/loss": value, "eval/x/n": 5.0}) for step, value in ((0, 3.0), (2, last))]
        return read_trial(output, name, 0, "finished", primary=loss)

    rows = rank_rows([trial("a", 2.5), trial("b", 2.0)], ["a", "b"], loss)
    assert [row.name for row in rows] == ["b", "a"]
    assert rows[0].summaries["gain"].mean == 1.0
    part = rows_part(rows, "tiny/sft", loss, {"a": "x", "b": "x"})
    assert [line[2] for line in part.tables[0].lines] == ["2.000", "2.500", "3.000"]  # the start has no interval


def test_of_one_seed_or_equal_ones_the_interval_is_that_over_the_problems() -> None:
    def trial(seed: int, last: float) -> TrialResult:
        bounds = {"accuracy_low": 0.25, "accuracy_high": 0.75}
        return read_trial([evaluation(0, 0.1), evaluation(2, last, **bounds)], "a", seed, "finished")

    def shown(*trials: TrialResult) -> str:
        return make_sweep(trials).tables[0].lines[0][2]

    assert shown(trial(0, 0.5)) == shown(trial(0, 0.5), trial(1, 0.5)) == "50.0% [25.0%, 75.0%]"
    assert shown(trial(0, 0.5), trial(1, 0.50008)) == "50.00 ± 0.05%"  # so many places that it is not ± 0.0


@pytest.mark.parametrize(
    ("key", "values", "places"),
    [
        ("train.lr", ["1e-4", "0.01"], {"lr-1e-4": 1e-4, "lr-0.01": 0.01}),
        ("train.max_grad_norm", ["0.5", "1.0"], {"max_grad_norm-0.5": 0.5, "max_grad_norm-1.0": 1.0}),
        ("train.schedule", ["linear", "cosine"], None),
        ("rollout.drop_uniform_groups", ["true", "false"], None),
    ],
)
def test_numeric_key_of_a_sweep_over_values_is_that_key_where_all_are_numbers(
    key: str, values: list[str], places: dict[str, float] | None
) -> None:
    plan = load_sweep("tiny/grpo", folder="runs/x", over=(key, values))
    assert numeric_key(plan) == (None if places is None else (key, places))
