"""Comparisons: what is trained, what is chosen, what is recorded, and what the tables say."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.errors import DataError, RecipeError, RunConflict, RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory, new_status
from posttrain.runs.launch import RunResult, RunStart
from posttrain.store.locks import hold
from posttrain.sweeps.comparison import runner
from posttrain.sweeps.comparison.plan import (
    FIRST_FINAL_SEED,
    ComparisonPlan,
    choose_rates,
    describe_design,
    load_comparison,
    names_comparison,
)
from posttrain.sweeps.comparison.records import TrialRecord, read_recorded, record_path
from posttrain.sweeps.comparison.report import collect_comparison
from posttrain.sweeps.comparison.runner import load_records, make_comparison
from posttrain.sweeps.runner import SweepOutcome

SMALL = [
    ("train.steps", "2"),
    ("train.warmup_steps", "0"),
    ("rollout.num_prompts", "4"),
    ("rollout.group_size", "4"),
    ("task.size", "64"),
    ("comparison.over.values", "[2]"),
    ("comparison.rates", "[1.0e-4, 1.0e-5]"),
    ("comparison.tuning.seeds", "1"),
    ("comparison.tuning.problems", "6"),
    ("comparison.tuning.every", "2"),
    ("comparison.tuning.cpu_seconds", "[1]"),
    ("comparison.final.problems", "6"),
    ("comparison.final.every", "1"),
    ("comparison.final.cpu_seconds", "[2]"),
]
MakePlan = Callable[..., ComparisonPlan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    def make(*overrides: tuple[str, str], rows: tuple[str, ...] = ("dr-grpo",), num_seeds: int = 3) -> ComparisonPlan:
        own = dict(SMALL) | dict(overrides)
        return load_comparison(
            "methods", list(own.items()), folder=tmp_path / "sweep-methods", rows=rows, num_seeds=num_seeds
        )

    return make


class FakeTraining:
    """In the place of ``launch``: a run that is finished at once. ``doing``: by part of a name, fail or interrupt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, doing: dict[str, str] | None = None) -> None:
        self.names: list[str] = []
        self.recipes: list[Recipe] = []
        self.doing = dict(doing or {})
        monkeypatch.setattr(runner, "facts_of_run", self.facts)

    def __call__(self, recipe: Recipe, start: RunStart, *, observer: Any) -> RunResult:
        name = str(start.name)
        self.names.append(name)
        self.recipes.append(recipe)
        what = next((what for part, what in self.doing.items() if part in name), "finish")
        if what == "fail":
            raise RunFailure("it broke")
        directory = RunDirectory(Path(start.root) / name)
        directory.folder.mkdir(parents=True, exist_ok=True)
        directory.write_recipe(recipe)
        directory.write_status(replace(new_status(2, None), state="running" if what == "interrupt" else "finished"))
        (directory.folder / "metrics.jsonl").write_text("")
        observer("step", {})
        return RunResult(directory.folder, 2, "interrupted" if what == "interrupt" else "finished", {})

    @staticmethod
    def facts(folder: Path, rows: object) -> dict[str, Any]:
        """Right answers to four of six problems at the rate 1e-5, to two at 1e-4; one more of GRPO in even seeds."""
        right = 4 if "lr1e-05" in folder.name else 2
        right += "-grpo-" in folder.name and "dr-grpo" not in folder.name and folder.name[-1] in "02468"
        outcomes = "1" * right + "0" * (6 - right)
        return {"curve": [(0, 1 / 6), (2, right / 6)], "outcomes": outcomes, "sampled_tokens": 100.0}


def test_shipped_comparison_is_five_cpu_hours_and_says_what_it_can_find(tmp_path: Path) -> None:
    plan = load_comparison("methods", folder=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    runs, hours, problems, twin, power = describe_design(plan, [])
    rows = len(plan.rows)
    arms = 2 * rows - 1  # where there is one update a batch, a clip does nothing, and two rows are one
    assert runs.startswith(f"{arms * 3 * 2 + arms * 10} runs: {arms} of {rows} methods x 2 variants")
    assert twin.startswith("gspo-published equals gspo if updates a batch = 1")
    assert float(hours.split()[1]) <= 5.0
    assert "300 validation problems" in problems
    assert "500 test problems" in problems
    assert "1.32 (one comparison)" in power  # the issue of seeds: 10 find 1.33 standard deviations
    assert f"level 5% / {rows * (rows - 1) // 2}" in power


def test_trials_differ_in_what_they_are_named_after(make_plan: MakePlan) -> None:
    plan = make_plan()
    names = [trial.name for trial in plan.tuning()]
    assert names == [
        f"tuning-{row}-num_minibatches-2-lr{rate}-seed0" for row in ("grpo", "dr-grpo") for rate in ("0.0001", "1e-05")
    ]
    final = plan.final({("grpo", 0): 1e-5})
    assert [(trial.row, trial.seed) for trial in final] == [("grpo", FIRST_FINAL_SEED + seed) for seed in range(3)]
    for trial, split, every in ((plan.tuning()[0], "validation", 2), (final[0], "test", 1)):
        recipe = trial.recipe
        assert (recipe.train.lr, recipe.train.seed, recipe.train.num_minibatches) == (trial.rate, trial.seed, 2)
        assert [task.options["split"] for task in recipe.eval.tasks] == [split]
        assert (recipe.eval.every, recipe.eval.num_examples) == (every, 6)
    assert len({trial.fingerprint for trial in (*plan.tuning(), *final)}) == 7


def test_fingerprint_is_of_what_decides_the_result_and_of_no_default(make_plan: MakePlan) -> None:
    trial = make_plan().tuning()[0]
    recipe = trial.recipe.model_copy(deep=True)
    recipe.description = "another one"
    recipe.train.max_grad_norm = 1.0  # the default, now set
    assert replace(trial, recipe=recipe).fingerprint == trial.fingerprint
    recipe.train.max_grad_norm = 0.5
    assert replace(trial, recipe=recipe).fingerprint != trial.fingerprint


def test_the_best_rate_is_trained_with_fresh_seeds(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    train = FakeTraining(monkeypatch)
    outcome = make_comparison(plan, train=train)
    assert (outcome.failures, outcome.interrupted) == ({}, False)
    assert train.names[4:] == [
        f"final-{row}-num_minibatches-2-lr1e-05-seed{seed}" for seed in (100, 101, 102) for row in ("grpo", "dr-grpo")
    ]
    records = load_records(plan)
    assert len(records) == 10
    assert choose_rates(plan, records) == {("grpo", 0): 1e-5, ("dr-grpo", 0): 1e-5}
    assert not list((plan.folder / "cells").glob("*/recipe.yaml"))  # folders of runs go
    again = FakeTraining(monkeypatch)
    make_comparison(plan, train=again)
    assert again.names == []


def test_more_seeds_and_rows_are_added_to_what_is_there(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    make_comparison(make_plan(num_seeds=2), train=FakeTraining(monkeypatch))
    more = FakeTraining(monkeypatch)
    plan = make_plan(rows=("dr-grpo", "cispo"), num_seeds=3)
    assert describe_design(plan, load_records(plan))[0].endswith("; 7 remaining")
    make_comparison(plan, train=more)
    assert sum("cispo" in name for name in more.names) == 2 + 3
    assert len(more.names) == 7


def test_an_interrupted_comparison_goes_on(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    outcome = make_comparison(
        plan, train=FakeTraining(monkeypatch, {"tuning-dr-grpo-num_minibatches-2-lr1e-05": "interrupt"})
    )
    assert outcome.interrupted
    assert len(load_records(plan)) == 3
    train = FakeTraining(monkeypatch)
    assert not make_comparison(plan, train=train).interrupted
    assert train.names[0] == "tuning-dr-grpo-num_minibatches-2-lr1e-05-seed0"
    resumed = next(record for record in load_records(plan) if (record.row, record.rate) == ("dr-grpo", 1e-5))
    assert resumed.cpu_seconds is None  # those of the first attempt are not known


def test_a_failure_stops_no_other_and_its_method_is_not_tuned(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    outcome = make_comparison(
        plan, train=FakeTraining(monkeypatch, {"tuning-dr-grpo-num_minibatches-2-lr0.0001": "fail"})
    )
    assert list(outcome.failures) == ["tuning-dr-grpo-num_minibatches-2-lr0.0001-seed0"]
    records = load_records(plan)
    assert {record.row for record in records if record.stage == "final"} == {"grpo"}
    results = collect_comparison(plan, records, outcome, "a command")
    assert "it broke" in results.problems[0]
    make_comparison(plan, train=FakeTraining(monkeypatch))
    assert len(load_records(plan)) == 10


def test_records_of_another_recipe_are_refused_and_nothing_changes(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_comparison(make_plan(), train=FakeTraining(monkeypatch))
    train = FakeTraining(monkeypatch)
    with pytest.raises(RunConflict, match="--run NAME"):
        make_comparison(make_plan(("rollout.temperature", "0.9")), train=train)
    assert train.names == []


def test_a_trial_that_another_process_holds_is_waited_for(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(num_seeds=2)
    first = plan.tuning()[0]
    first.folder.parent.mkdir(parents=True)
    (plan.folder / "sweep.yaml").write_text(plan.to_yaml())
    held = ExitStack()
    held.enter_context(hold(first.folder.parent / f".{first.name}.lock"))
    train = FakeTraining(monkeypatch)

    def launch_and_release(recipe: Recipe, start: RunStart, **options: Any) -> RunResult:
        if len(train.names) == 2:
            held.close()
        return train(recipe, start, **options)

    make_comparison(plan, train=launch_and_release)
    assert train.names.index(first.name) == 3  # the last of the tuning
    assert len(load_records(plan)) == 8


def test_recorded_results_are_taken_over(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan()
    make_comparison(plan, train=FakeTraining(monkeypatch))
    path = tmp_path / "earlier.json"
    results = collect_comparison(plan, load_records(plan), SweepOutcome(), "a command")
    path.write_text(results.to_json())
    assert read_recorded(path) == load_records(plan)
    later = load_comparison(
        "methods",
        [*SMALL, ("comparison.recorded", str(path))],
        folder=tmp_path / "later",
        rows=("dr-grpo",),
        num_seeds=4,
    )
    train = FakeTraining(monkeypatch)
    make_comparison(later, train=train)
    assert sorted(name.rpartition("-")[2] for name in train.names) == ["seed103"] * 2
    path.write_text('{"trials": [{"row": 1}]}')
    with pytest.raises(DataError, match="trials"):
        make_comparison(later, train=train)
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        make_comparison(later, train=train)


def test_tables_say_what_was_measured(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    make_comparison(plan, train=FakeTraining(monkeypatch))
    results = collect_comparison(plan, load_records(plan), SweepOutcome(), "a command")
    methods, pairs, rates = results.tables
    grpo = dict(zip(methods.header, methods.lines[0], strict=True))
    # seeds 100 and 102 get five of six, 101 four: 14 of 18
    assert (grpo["method"], grpo["learning rate"], grpo["usable"]) == ("grpo", "1e-05*", "only 1e-05")
    assert grpo["right"].startswith("77.8% [")
    assert (grpo["peak"], grpo["worst seed"], grpo["over the run"]) == ("77.8%", "66.7%", "47.2%")
    assert grpo["better than grpo"] == "–"
    other = dict(zip(methods.header, methods.lines[1], strict=True))
    assert other["better than grpo"].startswith("17% [")  # two losses and a tie
    # from 1/6 to 4/6 in two steps: one half after 4/3
    assert (other["steps to 50%"], other["IQM"]) == ("1", "66.7% [66.7%, 66.7%]")
    assert [line[0] for line in pairs.lines] == ["dr-grpo − grpo"]
    assert pairs.lines[0][1].startswith("-11.1 [")
    assert rates.lines[0][1:] == ["83.3%", "50.0%", "1 of 2"]
    lines = "\n".join(results.findings)
    assert "0 of 1 pairs differ significantly at the end" in lines
    assert "standard deviations over seeds: 3.07 (one comparison)" in lines
    data = json.loads(results.to_json())
    assert len(data["trials"]) == 10
    assert [table["lines"] for table in data["tables"]] == [table.lines for table in results.tables]
    assert data["variants"]["updates a batch = 2"]["methods"]["grpo"]["accuracies"] == approx([5 / 6, 4 / 6, 5 / 6])


def test_one_seed_has_intervals_over_problems_and_no_pairs(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(num_seeds=1)
    assert "no difference can be tested" in describe_design(plan, [])[-1]
    make_comparison(plan, train=FakeTraining(monkeypatch))
    results = collect_comparison(plan, load_records(plan), SweepOutcome(), "a command")
    assert len(results.tables) == 2
    assert "83.3% [" in results.tables[0].lines[0][4]


def test_a_fall_from_the_peak_is_told(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    make_comparison(plan, train=FakeTraining(monkeypatch))
    records = [replace(record, curve=[(0, 0.1), (1, 0.9), (2, 0.6)]) for record in load_records(plan)]
    results = collect_comparison(plan, records, SweepOutcome(), "a command")
    assert "grpo fell: 90.0% at the peak, 60.0% at the end" in results.findings


def test_equal_rates_are_told_apart_by_the_curve_and_then_by_size(make_plan: MakePlan) -> None:
    plan = make_plan()

    def record(rate: float, height: float) -> TrialRecord:
        curve = [(0, 0.1), (1, height), (2, 0.5)]
        return TrialRecord(
            fingerprint="0" * 16, stage="tuning", row="grpo", variant=0, rate=rate, seed=0, curve=curve,
            outcomes="10", sampled_tokens=1.0,
        )  # fmt: skip

    assert choose_rates(plan, [record(1e-4, 0.4), record(1e-5, 0.4)]) == {("grpo", 0): 1e-5}
    assert choose_rates(plan, [record(1e-4, 0.5), record(1e-5, 0.4)]) == {("grpo", 0): 1e-4}
    assert choose_rates(plan, [record(1e-4, 0.5)]) == {}  # not tuned yet


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (("comparison.rates", "[1.0e-4, 1.0e-4]"), "comparison.rates"),
        (("comparison.over.values", "[2, 2]"), "comparison.over.values"),
        (("comparison.final.cpu_seconds", "[1, 2, 3]"), "comparison.final.cpu_seconds"),
        (("comparison.baseline", "grop"), "comparison.baseline"),
        (("rollout.nmu_prompts", "3"), "num_prompts"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_key(
    make_plan: MakePlan, override: tuple[str, str], key: str
) -> None:
    with pytest.raises(RecipeError, match=key):
        make_plan(override)


@pytest.mark.parametrize("key", ["train.lr", "train.seed"])
def test_what_every_trial_has_for_itself_is_refused(make_plan: MakePlan, key: str) -> None:
    with pytest.raises(UsageError, match=key):
        make_plan((key, "1"))


def test_rows_that_cannot_differ_are_refused(make_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="gspo-published: identical to gspo"):
        make_plan(("comparison.over.values", "[1]"), rows=("gspo", "gspo-published"))
    plan = make_plan(("comparison.over.values", "[1, 2]"), rows=("gspo", "gspo-published"))
    assert [(row.name, variant) for row, variant in plan.arms] == [
        ("grpo", 0), ("gspo", 0), ("grpo", 1), ("gspo", 1), ("gspo-published", 1)
    ]  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(plan.to_yaml())
    again = load_comparison(str(path), folder=plan.folder, num_seeds=3, rows=("gspo", "gspo-published"))
    assert [trial.fingerprint for trial in again.tuning()] == [trial.fingerprint for trial in plan.tuning()]


PAIRS = [
    ("train.steps", "2"),
    ("train.warmup_steps", "0"),
    ("comparison.rates", "[1.0e-5]"),
    ("comparison.pairs.n", "24"),
    ("comparison.pairs.batch_size", "4"),
    ("comparison.tuning.seeds", "1"),
    ("comparison.tuning.problems", "6"),
    ("comparison.tuning.every", "2"),
    ("comparison.final.problems", "6"),
    ("comparison.final.every", "1"),
]


def test_preference_methods_learn_from_pairs_of_one_sampling_run(tmp_path: Path) -> None:
    """The smallest form, really sampled and trained."""
    plan = load_comparison("preference-methods", PAIRS, folder=tmp_path / "x", rows=("kto",), num_seeds=2)
    assert make_comparison(plan).failures == {}
    answers = plan.pairs_folder / "items.jsonl"
    sampled = answers.read_bytes()
    records = load_records(plan)
    assert [(record.row, record.seed) for record in records] == [
        ("dpo", 0), ("kto", 0), ("dpo", 100), ("kto", 100), ("dpo", 101), ("kto", 101)
    ]  # fmt: skip
    assert {record.sampled_tokens for record in records} == {0.0}
    recipes = [trial.recipe for trial in plan.first_trials()]
    assert [recipe.objective.name for recipe in recipes] == ["dpo", "kto"]
    for recipe in recipes:
        assert recipe.rollout is None
        assert recipe.task.options["path"] == str(answers)
        assert recipe.data.batch_size == 4
    make_comparison(plan)
    assert answers.read_bytes() == sampled
    other = load_comparison(
        "preference-methods", [*PAIRS, ("comparison.pairs.samples", "4")], folder=tmp_path / "x", rows=("kto",)
    )
    with pytest.raises(RunConflict, match="different settings"):
        make_comparison(other)


@pytest.mark.parametrize(
    ("gone", "instead"), [("all-preference", "preference-methods"), ("sweep/all-policy-gradient", "methods")]
)
def test_sweeps_at_one_rate_are_gone_and_name_what_took_their_place(gone: str, instead: str) -> None:
    with pytest.raises(UsageError, match=f"posttrain sweep {instead}"):
        names_comparison(gone, [], None)


def test_which_files_are_comparisons() -> None:
    assert names_comparison("methods", [], None)
    assert not names_comparison("ppo-grpo-dpo", [], None)
    assert not names_comparison("tiny/grpo", [], ("train.lr", ["1"]))


def test_command_dry_run_and_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, really trained: two methods at one rate, two seeds each."""
    small = dict(SMALL) | {"comparison.rates": "[1.0e-4]"}
    words = ["sweep", "methods", "--rows", "dr-grpo", "--seeds", "2", "--runs-dir", str(tmp_path)]
    words += [word for key, value in small.items() for word in (f"--{key}", value)]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "6 runs" in shown.out + shown.err
    assert not list(tmp_path.iterdir())
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "power" in shown.out + shown.err
    folder = tmp_path / "sweep-methods"
    assert {path.name for path in folder.iterdir()} >= {"report.html", "table.md", "results.json", "records"}
    trials = json.loads((folder / "results.json").read_text())["trials"]
    assert len(trials) == 6
    for trial in trials:
        assert trial["curve"][-1][1] == approx(trial["outcomes"].count("1") / 6)
        assert trial["cpu_seconds"] > 0
        assert trial["sampled_tokens"] > 16
    record = record_path(folder, "final-grpo-num_minibatches-2-lr0.0001-seed100")
    record.unlink()
    assert main(words) == 0
    again = json.loads((folder / "results.json").read_text())["trials"]
    for old, new in zip(trials, again, strict=True):  # a run in another process, and after others, is the same run
        for key in ("curve", "outcomes", "sampled_tokens", "fingerprint"):
            assert old[key] == new[key]
