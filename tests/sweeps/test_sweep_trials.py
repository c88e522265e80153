"""Running the trials of a sweep, with fakes of `posttrain train` and `posttrain evaluate`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import STUDIED, FakeRunner, doings, starts, status_of

from closeness import approx
from posttrain.cli import parse
from posttrain.errors import DataError, RunConflict, RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.reports.sweep_page import write_sweep
from posttrain.runs import directory
from posttrain.runs.children import Child, threads_per_child
from posttrain.runs.directory import RunDirectory, lock_run
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.plan import SweepPlan, load_sweep
from posttrain.sweeps.report import collect_sweep
from posttrain.sweeps.runner import SweepOutcome, read_states, trial_command
from refusing import refuses

TEXT = """\
base:
  task: {name: stories, size: 40}
  rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
  train: {steps: 2}
  eval: {every: 1, num_examples: 5}
rows: {good: {objective: grpo}, other: {objective: reinforce}}
seeds: 1
"""
NEEDS = """\
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
rows:
  proxy: {task: {name: stories, size: 40}, rollout: {num_prompts: 8, group_size: 4, select: best_and_worst},
          objective: bradley_terry, train: {steps: 2}, eval: {every: 0}}
  grpo: {recipe: rl/grpo, needs: proxy, train: {steps: 2}, eval: {num_kl_prompts: 4}}
best_of_n: {task: stories, n: 5, samples: 4}
seeds: 2
"""
MakePlan = Callable[..., SweepPlan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    def make(*overrides: tuple[str, str], text: str = TEXT, **wanted: Any) -> SweepPlan:
        (tmp_path / "mine.yaml").write_text(text)
        return load_sweep(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


@pytest.fixture(autouse=True)
def unset_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def run_chain(make_plan: MakePlan, **options: Any) -> tuple[SweepPlan, SweepOutcome, FakeRunner]:
    """Rows that need one another, with evaluations between them."""
    plan, fake = make_plan(text=NEEDS), FakeRunner(options.pop("doing", None), STUDIED)
    return plan, fake.run(plan, **options), fake


def test_run_trials_one_job_every_trial_in_order(make_plan: MakePlan) -> None:
    plan, fake = make_plan(num_seeds=2), FakeRunner()
    outcome = fake.run(plan, jobs=1)
    threads = count_cpus()
    assert (outcome.failures, outcome.interrupted) == ({}, False)
    assert fake.lines[0] == f"4 trials, 1 at a time, threads per trial: {threads}"
    assert fake.events == [(trial.name, word) for trial in plan.trials for word in ("started", "finished")]
    assert [starts(plan, trial.name) for trial in plan.trials] == [[f"finish {threads}"]] * 4
    assert fake.lines[-1].endswith("accuracy 50.0% (0 left)")
    assert (plan.folder / "sweep.yaml").read_text() == plan.to_yaml()


def test_threads_are_those_of_the_environment(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plan, fake = make_plan(), FakeRunner()
    fake.run(plan, jobs=1)
    assert [starts(plan, trial.name) for trial in plan.trainings] == [["finish 7"]] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested parallel regions: the outer one first
    assert threads_per_child(2) == 4


def test_a_failing_trial_stops_no_other_and_is_tried_again(make_plan: MakePlan) -> None:
    plan, fake = make_plan(), FakeRunner({"good": "fail"})
    outcome = fake.run(plan, jobs=1)
    assert list(outcome.failures) == ["good-seed0"]
    assert "some place (" in outcome.failures["good-seed0"]
    assert ("other-seed0", "finished") in fake.events
    sweep = collect_sweep(plan, outcome, "posttrain sweep mine.yaml")
    rows = sweep.parts["rows"].data["rows"]
    assert [(name, row["trials"][0]["state"]) for name, row in rows.items()] == [
        ("other", "finished"),
        ("good", "failed"),
    ]
    write_sweep(sweep, plan.folder)
    assert "good-seed0: the process exited with code 1" in (plan.folder / "table.md").read_text()
    again = FakeRunner()
    outcome = again.run(plan, jobs=1)
    assert (outcome.failures, again.names("continued")) == ({}, ["good-seed0"])
    assert doings(plan, "good-seed0") == ["fail", "resume"]


def test_a_signal_ends_the_trials_and_the_same_command_goes_on(
    make_plan: MakePlan, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, fake = make_plan(num_seeds=2), FakeRunner({"good": "wait"})

    def interrupt() -> None:
        while not (plan.trainings[0].folder / "metrics.jsonl").exists():  # written when it can be interrupted
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    outcome = fake.run(plan, jobs=1)
    assert outcome.interrupted
    assert outcome.failures == {}  # being stopped is no failure
    assert fake.names("started") == ["good-seed0"]  # no other was begun
    assert status_of(plan.trainings[0].folder) == "interrupted"
    message = "stopping after active trials have saved; repeat to stop immediately"
    assert message in capfd.readouterr().err
    again = FakeRunner()
    assert not again.run(plan, jobs=2).interrupted
    assert doings(plan, "good-seed0") == ["wait", "resume"]
    assert [row.step for row in MetricsLog(plan.trainings[0].folder / "metrics.jsonl").read()] == [0, 2]
    more = FakeRunner()
    more.run(make_plan(num_seeds=3), jobs=2)  # what is finished is kept
    assert more.lines[0].endswith("; 4 already finished")
    assert sorted(more.names("started", "continued")) == ["good-seed2", "other-seed2"]


def test_an_error_on_our_side_leaves_no_process_behind(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, fake = make_plan(), FakeRunner({"good": "wait"})

    def poll(child: Child) -> None:
        if (plan.trainings[0].folder / "metrics.jsonl").exists():
            raise RuntimeError("the terminal went away")

    with monkeypatch.context() as patched:
        patched.setattr(Child, "poll", poll)
        with refuses(RuntimeError, "terminal"):
            fake.run(plan, jobs=1)
    assert status_of(plan.trainings[0].folder) == "interrupted"


def test_trials_of_another_recipe_are_refused_and_nothing_changes(make_plan: MakePlan, tmp_path: Path) -> None:
    FakeRunner().run(make_plan(), jobs=2)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changed, fake = make_plan(("train.lr", "0.5")), FakeRunner()
    with pytest.raises(RunConflict) as caught:
        fake.run(changed)
    assert "good-seed0" in str(caught.value)
    assert "other-seed0" in str(caught.value)
    assert fake.lines == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_trial_in_another_process_and_other_folders_are_refused(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "TIMEOUT_SECONDS", 0.1)
    plan = make_plan()
    FakeRunner().run(plan)
    with lock_run(plan.trainings[1].folder), pytest.raises(RunConflict) as caught:
        FakeRunner().run(plan)
    assert f"other-seed0: another process is using it (pid {os.getpid()} on " in str(caught.value)
    assert "the same command" in str(caught.value)
    assert "elete" not in str(caught.value)  # it is at work
    monkeypatch.setattr(directory, "TIMEOUT_SECONDS", 600.0)  # another sweep at work is not waited for
    with lock_run(plan.folder), pytest.raises(RunConflict, match=rf"using this run \(pid {os.getpid()} on "):
        FakeRunner().run(plan)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    for place in (tmp_path / "other", tmp_path / "mine.yaml"):
        with refuses(RunConflict, "is not a sweep"):
            FakeRunner().run(load_sweep(str(tmp_path / "mine.yaml"), folder=place))


def test_the_command_is_posttrain_train(make_plan: MakePlan, no_code_allowed: None) -> None:
    trial = make_plan().trainings[0]
    command = trial_command(trial, True)
    namespace = parse(command[3:])
    assert (namespace.command, namespace.run, namespace.resume, namespace.quiet) == ("train", "good-seed0", True, True)
    assert command[3:] == [
        *("train", str(trial.folder.with_name("good-seed0.yaml")), "--runs-dir", str(trial.folder.parent)),
        *("--run", "good-seed0", "--quiet", "--resume"),
    ]
    assert trial_command(trial, False) == command[:-1]


@pytest.mark.parametrize("primary", ["accuracy", "reward"])
def test_a_reward_of_its_own_is_not_compared_with_the_others(primary: str, make_plan: MakePlan) -> None:
    """Such a row has no primary metric and no curve where that is the reward."""
    text = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    plan = make_plan(text=text)
    outcome = FakeRunner().run(plan)
    for trial in plan.trainings if primary == "reward" else ():
        assert trial.status is not None
        RunDirectory(trial.folder).write_status(
            replace(trial.status, primary_metric="reward", held_out={"reward": 0.5})
        )
    part = collect_sweep(plan, outcome, "posttrain sweep").parts["rows"]
    assert part.data["primary_metric"] == primary
    rows = part.data["rows"]
    assert rows["good"]["summaries"]["reward"]["mean"] == 0.5
    assert {"reward", "start_reward", "mean_reward"} & rows["other"]["summaries"].keys() == set()
    if primary == "accuracy":
        assert rows["other"]["summaries"]["accuracy"]["mean"] == 0.5
    else:
        assert rows["good"]["summaries"]["gain"]["mean"] == 0.4
        assert (rows["other"]["trials"][0]["points"], list(rows)[-1]) == ([], "other")


def test_every_trial_begins_after_what_it_needs(make_plan: MakePlan) -> None:
    plan, outcome, fake = run_chain(make_plan, jobs=3)
    assert (outcome.failures, outcome.interrupted, set(read_states(plan).values())) == ({}, False, {"finished"})
    threads = max(1, count_cpus() // 3)
    assert fake.lines[0] == f"7 trials, 3 at a time, threads per trial: {threads}"
    assert fake.events[:2] == [("start", "started"), ("start", "finished")]
    assert starts(plan, "start") == [f"finish {count_cpus()}"]  # nothing else runs before it
    for trial in plan.trials:
        for name in trial.needs:
            assert fake.events.index((name, "finished")) < fake.events.index((trial.name, "started"))
    words = json.loads((plan.folder / "chosen" / "proxy-seed1.command.json").read_text())
    assert words == list(plan.evaluations("best_of_n")[1].command)
    status = plan.folder / "cells" / "grpo-seed1" / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    _, outcome, again = run_chain(make_plan)
    assert (again.names("started", "continued"), outcome.failures) == (["grpo-seed1"], {})


def test_a_failure_stops_only_what_needs_it(make_plan: MakePlan) -> None:
    plan, outcome, _ = run_chain(make_plan, doing={"proxy-seed0": "fail"})
    lost = "not started, because proxy-seed0 failed"
    assert list(outcome.failures) == ["proxy-seed0", "grpo-seed0", "proxy-seed0-best-of-n"]
    assert list(outcome.failures.values())[1:] == [lost, lost]
    assert {name for name, state in read_states(plan).items() if state != "finished"} == set(outcome.failures)
    found = collect_sweep(plan, outcome, "again")
    assert found.problems[0].startswith("proxy-seed0: the process exited with code 1")
    assert found.parts["overoptimization"].data["methods"]["grpo"]["curves"].keys() == {1}


def test_without_a_start_there_is_nothing(make_plan: MakePlan) -> None:
    with refuses(RunFailure, "failed: the process"):
        run_chain(make_plan, doing={"start": "fail"})
    with refuses(RunFailure, "nothing to report"):
        collect_sweep(make_plan(text=NEEDS), SweepOutcome(), "again")


def test_what_belongs_to_something_else_is_refused(make_plan: MakePlan) -> None:
    """Recipes say nothing of how the start was trained, so nothing else would tell."""
    plan, _, _ = run_chain(make_plan)
    for override, message in (
        (("rows.grpo.train.lr", "1"), "train.lr"),
        (("best_of_n.n", "6"), "best_of_n"),
    ):
        with refuses(RunConflict, message):
            FakeRunner().run(make_plan(override, text=NEEDS))
    assert plan.start is not None
    shutil.rmtree(plan.start.folder)
    with refuses(RunConflict, "proxy-seed0"):
        FakeRunner().run(plan)
    assert not plan.start.folder.exists()  # nothing was begun


def test_from_records_to_files(make_plan: MakePlan) -> None:
    plan, outcome, _ = run_chain(make_plan)
    report = write_sweep(collect_sweep(plan, outcome, "posttrain sweep x"), plan.folder)
    data = json.loads((plan.folder / "results.json").read_text())
    assert list(data["methods"]) == ["best of n", "grpo"]
    grpo = data["methods"]["grpo"]
    assert [p["gold"]["mean"] for p in grpo["means"]] == [0.1, 0.8, 0.3]
    # scores 1, 2, 0, 0.5: mean 0.875; the proxy is in their standard deviations
    deviation = (sum((s - 0.875) ** 2 for s in (1.0, 2.0, 0.0, 0.5)) / 4) ** 0.5
    assert grpo["means"][2]["proxy"]["mean"] == approx((3.0 - 0.875) / deviation)
    assert [p["gold"]["mean"] for p in data["methods"]["best of n"]["means"]] == [0.5, approx(0.5), 0.0]
    assert grpo["peak"]["at"] == 1
    assert "| grpo | 2 |" in (plan.folder / "table.md").read_text()
    assert (plan.folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    page = report.read_text()
    assert page.count("<svg viewBox=") == 3 + 2  # gold and proxy, then the learning of the reward models
    assert page.index("Gold and proxy") < page.index("<h2>Reward models</h2>")
    assert "posttrain sweep x" in page


def test_answers_that_are_not_those_of_the_sweep_are_refused(make_plan: MakePlan) -> None:
    plan, outcome, _ = run_chain(make_plan)
    path = plan.folder / "chosen" / "proxy-seed1" / "items.jsonl"
    item = json.loads(path.read_text())
    for items, message in (
        ([item | {"samples": item["samples"][:2]}], "items.jsonl:1"),
        ([item | {"samples": []}], "answers do not match"),
        ([item, item | {"id": "b"}], "sweep's problems"),
    ):
        path.write_text("".join(f"{json.dumps(one)}\n" for one in items))
        with refuses(DataError, message):
            collect_sweep(plan, outcome, "posttrain sweep mine")
