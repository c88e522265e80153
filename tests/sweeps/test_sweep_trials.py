"""How the trials of a sweep are run: with small replacements of `posttrain train` and `posttrain evaluate`."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import STUDIED, FakeRunner, doings, starts, status_of

from posttrain.errors import DataError, RunConflict, RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.reports.sweeps import write_sweep
from posttrain.runs import directory
from posttrain.runs.children import thread_settings, threads_per_child
from posttrain.runs.directory import RunDirectory, lock_run
from posttrain.store.headline import ACCURACY, REWARD
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps import runner
from posttrain.sweeps.load import load_sweep
from posttrain.sweeps.plan import Plan, read_states
from posttrain.sweeps.report import collect_sweep
from posttrain.sweeps.runner import Outcome, last_error, run_trials, trial_command

TEXT = """\
base:
  task: {name: stories, size: 40}
  rollout: {prompts: 2, group: 2, max_tokens: 8}
  train: {steps: 2}
  eval: {every: 1, n: 5}
rows: {good: {objective: grpo}, other: {objective: reinforce}}
seeds: 1
"""


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> Plan:
        (tmp_path / "mine.yaml").write_text(TEXT)
        return load_sweep(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


@pytest.fixture(autouse=True)
def say_nothing_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_every_trial_runs(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(num_seeds=2), FakeRunner()
    outcome = stand.run(plan, jobs=2)
    assert (outcome.failures, outcome.interrupted, outcome.num_jobs) == ({}, False, 2)
    threads = max(1, count_cpus() // 2)
    assert stand.plan_facts == {"num_trials": 4, "num_finished": 0, "num_jobs": 2, "num_threads": threads}
    for trial in plan.trainings:
        assert starts(plan, trial.name) == [f"finish {threads}"]
        assert [e for e, name in stand.told if name == trial.name] == ["begin", "end"]
    assert (plan.folder / "sweep.yaml").read_text() == plan.to_yaml()


def test_threads_are_those_of_the_environment(
    tmp_path: Path, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plan, stand = make_plan(), FakeRunner()
    outcome = stand.run(plan, jobs=1)
    assert (outcome.num_threads, stand.plan_facts["num_threads"]) == (7, 7)
    assert [starts(plan, trial.name) for trial in plan.trainings] == [["finish 7"]] * 2
    assert thread_settings(2) == {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7"}
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert thread_settings(2) == {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "3"}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_settings(2) == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested parallel regions: the outer one first
    assert (threads_per_child(2), thread_settings(2)["OMP_NUM_THREADS"]) == (4, "4,2")


def test_one_job_runs_trials_in_order_and_no_two_at_once(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(num_seeds=2), FakeRunner()
    stand.run(plan, jobs=1)
    turns = [(event, name) for event, name in stand.told if event in ("begin", "end")]
    assert turns == [(event, trial.name) for trial in plan.trainings for event in ("begin", "end")]


def test_a_failing_trial_stops_no_other_and_is_tried_again(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(), FakeRunner({"good": "fail"})
    outcome = stand.run(plan, jobs=1)
    assert outcome.failures == {"good-seed0": "it broke at"}
    assert ("end", "other-seed0") in stand.told
    sweep = collect_sweep(plan, outcome, "posttrain sweep mine.yaml")
    assert [(row.name, row.trials[0].state) for row in sweep.rows] == [("other", "finished"), ("good", "failed")]
    assert sweep.rows[1].trials[0].problem == "it broke at"
    write_sweep(sweep, plan.folder)
    assert "good, seed 0: failed after 0 steps: it broke at" in (plan.folder / "table.md").read_text()
    again = FakeRunner()
    outcome = again.run(plan, jobs=1)
    assert outcome.failures == {}
    assert again.names("begin") == ["good-seed0"]
    assert doings(plan, "good-seed0") == ["fail", "resume"]
    results = collect_sweep(plan, outcome, "posttrain sweep mine.yaml")
    assert [row.trials[0].state for row in results.rows] == ["finished", "finished"]
    assert {row.name: row.trials[0].problem for row in results.rows} == {"good": None, "other": None}


def test_finished_trials_are_kept_and_new_seeds_added(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    FakeRunner().run(make_plan(), jobs=2)
    stand, plan = FakeRunner(), make_plan(num_seeds=2)
    stand.run(plan, jobs=2)
    assert stand.plan_facts["num_finished"] == 2
    assert sorted(name for event, name in stand.told if event == "begin") == ["good-seed1", "other-seed1"]
    assert len(starts(plan, "good-seed0")) == 1


def test_a_trial_that_was_killed_after_its_last_step_goes_on(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    """Nothing is left to do after it."""
    plan = make_plan()
    FakeRunner().run(plan)
    status = plan.trainings[1].folder / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    again = FakeRunner()
    assert again.run(plan).failures == {}
    ends = [facts["remaining"] for event, facts in again.events if event == "end"]
    assert (again.names("end"), ends) == (["other-seed0"], [0.0])


def test_a_signal_ends_the_trials_and_the_same_command_goes_on(
    make_plan: Callable[..., Plan], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.0)
    plan, stand = make_plan(num_seeds=2), FakeRunner({"good": "wait"})

    asked: list[str] = []

    def observe(event: str, facts: dict[str, Any]) -> None:
        stand.observe(event, facts)
        if event == "progress" and doings(plan, "good-seed0") == ["wait"] and not asked:
            asked.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run_trials(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert outcome.interrupted
    assert outcome.failures == {}  # being stopped is no failure
    assert stand.names("begin") == ["good-seed0"]  # no other was begun
    assert status_of(plan.trainings[0].folder) == "interrupted"
    assert capfd.readouterr().err == (
        "\nstopping when what is at work has saved what it has; once more to stop at once\n"  # this process has no step
    )
    again = FakeRunner()
    outcome = again.run(plan, jobs=2)
    assert not outcome.interrupted
    assert doings(plan, "good-seed0") == ["wait", "resume"]
    steps = [row.step for row in MetricsLog(plan.trainings[0].folder / "metrics.jsonl").read()]
    assert steps == [0, 2]
    assert [event for event, name in again.told if name == "good-seed0" and event != "progress"] == ["begin", "end"]


def test_an_error_on_our_side_leaves_no_process_behind(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.0)
    plan, stand = make_plan(), FakeRunner({"good": "wait"})

    def observe(event: str, facts: dict[str, Any]) -> None:
        if event == "progress" and doings(plan, "good-seed0") == ["wait"]:
            raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        run_trials(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert status_of(plan.trainings[0].folder) == "interrupted"


def test_trials_of_another_recipe_are_refused_and_nothing_changes(
    tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    FakeRunner().run(make_plan(), jobs=2)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changed, stand = make_plan(("train.lr", "0.5")), FakeRunner()
    with pytest.raises(RunConflict) as caught:
        stand.run(changed)
    assert "good-seed0: made by another recipe; it differs in train.lr (0.0001 there, 0.5 now)" in str(caught.value)
    assert "other-seed0" in str(caught.value)
    assert stand.events == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_trial_in_another_process_and_a_strange_folder_are_refused(
    tmp_path: Path, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 0.1)
    plan = make_plan()
    FakeRunner().run(plan)
    with lock_run(plan.trainings[1].folder), pytest.raises(RunConflict) as caught:
        FakeRunner().run(plan)
    assert f"other-seed0: another process is working in it (pid {os.getpid()} on " in str(caught.value)
    assert "Wait for it or stop it; the same command then goes on" in str(caught.value)
    assert "delete" not in str(caught.value)  # what is at work is no rubbish
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 600.0)  # another sweep at work is not waited for
    with lock_run(plan.folder), pytest.raises(RunConflict, match=rf"in this run \(pid {os.getpid()} on "):
        FakeRunner().run(plan)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("dear")
    strange = load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "strange")
    with pytest.raises(RunConflict, match="something else than a sweep"):
        FakeRunner().run(strange)
    with pytest.raises(RunConflict, match="a file, not a folder"):
        FakeRunner().run(load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_the_start_is_trained_first_and_once(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(("start", "{recipe: tiny/sft, train: {steps: 2}}")), FakeRunner()
    stand.run(plan, jobs=2)
    begun = stand.names("begin")
    assert begun[0] == "start"
    assert stand.told.index(("end", "start")) < stand.told.index(("begin", "good-seed0"))
    again = FakeRunner()
    again.run(plan)
    assert again.told == []


def test_without_a_start_nothing_is_compared(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(("start", "tiny/sft")), FakeRunner({"start": "fail"})
    with pytest.raises(RunFailure, match="the start of the sweep failed: it broke at"):
        stand.run(plan)
    assert stand.names("begin") == ["start"]


def test_what_a_process_said_last(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("posttrain: of an earlier start\n")
    start = log.stat().st_size
    assert last_error(log, start, 1) == "ended with exit code 1 and said nothing"
    with log.open("a") as file:
        file.write("Traceback ...\nValueError: no\n\n")
    assert last_error(log, start, 1) == "ValueError: no"
    assert last_error(log, 0, 1) == "of an earlier start"
    assert last_error(log, start, -40) == "ended by signal 40"  # of those without a name of their own
    assert last_error(log, start, -signal.SIGKILL) == "ended by SIGKILL (out of memory?)"


def test_the_command_is_posttrain_train(make_plan: Callable[..., Plan]) -> None:
    trial = make_plan().trainings[0]
    command = trial_command(trial, True)
    shown = subprocess.run([*command[:3], "train", "--help"], capture_output=True, text=True, check=True, timeout=60)
    for option in (word for word in command if word.startswith("--")):
        assert option in shown.stdout
    assert command[3:] == [
        *("train", str(trial.folder.with_name("good-seed0.yaml")), "--runs-dir", str(trial.folder.parent)),
        *("--run", "good-seed0", "--quiet", "--resume"),
    ]
    assert trial_command(trial, False) == command[:-1]


def test_trials_of_a_start_that_is_gone_are_not_mixed_with_others(tmp_path: Path) -> None:
    """Their recipes say nothing of how the start was trained, so nothing else would tell."""
    (tmp_path / "mine.yaml").write_text(f"start: tiny/sft\n{TEXT}")
    plan = load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    stand = FakeRunner()
    run_trials(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    assert plan.start is not None
    shutil.rmtree(plan.start.folder)
    with pytest.raises(RunConflict) as caught:
        run_trials(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    for trial in plan.trainings:
        earlier = f"{trial.folder}: made from an earlier start, which is gone or not finished"
        assert earlier in str(caught.value)
    assert not plan.start.folder.exists()  # nothing was begun


def test_a_reward_of_its_own_is_not_put_next_to_the_others(tmp_path: Path) -> None:
    own = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    (tmp_path / "mine.yaml").write_text(own)
    plan = load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    outcome = run_trials(plan, jobs=1, command=FakeRunner().command, poll_seconds=0.02)
    rows = {row.name: row for row in collect_sweep(plan, outcome, "posttrain sweep").rows}
    assert rows["good"].summaries["reward"].mean == 0.5
    assert "reward" not in rows["other"].summaries
    assert rows["other"].summaries["accuracy"].mean == 0.5
    assert [point.reward for point in rows["other"].trials[0].curve] == [None, None]


def test_the_headline_is_what_the_trials_have_stored(tmp_path: Path) -> None:
    """By reward, a method with a reward of its own has nothing to be ranked by, and no curve."""
    own = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    (tmp_path / "mine.yaml").write_text(own)
    plan = load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    outcome = run_trials(plan, jobs=1, command=FakeRunner().command, poll_seconds=0.02)
    assert collect_sweep(plan, outcome, "posttrain sweep").headline == ACCURACY
    for trial in plan.trainings:
        assert trial.status is not None
        RunDirectory(trial.folder).write_status(replace(trial.status, headline=REWARD, held_out={"reward": 0.5}))
    sweep = collect_sweep(plan, outcome, "posttrain sweep")
    rows = {row.name: row for row in sweep.rows}
    assert sweep.headline == REWARD
    assert rows["good"].summaries["start_reward"].mean == 0.1
    assert (rows["good"].summaries["gain"].mean, rows["good"].trials[0].curve[-1].value) == (0.4, 0.5)
    assert {"reward", "gain", "mean_reward"} & rows["other"].summaries.keys() == set()
    assert (rows["other"].trials[0].curve, sweep.rows[-1].name) == ([], "other")


# Rows that need one another, with evaluations between them.

NEEDS = """\
start: {recipe: tiny/sft, train: {steps: 2, warmup_steps: 0}}
rows:
  proxy: {task: {name: stories, size: 40}, rollout: {prompts: 8, group: 4, select: best_and_worst},
          objective: bradley_terry, train: {steps: 2}, eval: {every: 0}}
  grpo: {recipe: rl/grpo, needs: proxy, train: {steps: 2}, eval: {drift_prompts: 4}}
best_of_n: {task: stories, n: 5, samples: 4}
seeds: 2
"""


@pytest.fixture
def make_chain(tmp_path: Path) -> Callable[..., Plan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> Plan:
        (tmp_path / "mine.yaml").write_text(NEEDS)
        return load_sweep(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


def run(plan: Plan, jobs: int = 2, doing: dict[str, str] | None = None) -> tuple[Outcome, FakeRunner]:
    fake = FakeRunner(doing, STUDIED)
    return fake.run(plan, jobs=jobs), fake


def unfinished_trials(plan: Plan) -> list[str]:
    return [name for name, state in read_states(plan).items() if state != "finished"]


def test_every_trial_begins_after_what_it_needs(make_chain) -> None:
    plan = make_chain()
    outcome, fake = run(plan, jobs=3)
    assert (outcome.failures, outcome.interrupted, unfinished_trials(plan)) == ({}, False, [])
    threads = max(1, count_cpus() // 3)
    assert fake.plan_facts == {"num_trials": 6, "num_finished": 0, "num_jobs": 3, "num_threads": threads}
    order = [told for told in fake.told if told[0] in ("begin", "end")]
    for trial in plan.trials:
        for name in trial.needs:
            assert order.index(("end", name)) < order.index(("begin", trial.name))
    assert (plan.folder / "sweep.yaml").read_text() == plan.to_yaml()
    words = json.loads((plan.folder / "chosen" / "proxy-seed1.command.json").read_text())
    assert words == list(plan.evaluations("best_of_n")[1].command)


def test_finished_trials_are_left_and_unfinished_ones_go_on(make_chain) -> None:
    plan = make_chain()
    run(plan)
    status = plan.folder / "cells" / "grpo-seed1" / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    outcome, fake = run(plan)
    assert fake.names("begin") == ["grpo-seed1"]
    assert doings(plan, "grpo-seed1") == ["finish", "resume"]
    assert [doings(plan, trial.name) for trial in plan.trials if trial.name != "grpo-seed1"] == [["finish"]] * 6
    assert outcome.failures == {}


def test_a_failure_stops_only_what_needs_it(make_chain) -> None:
    plan = make_chain()
    outcome, fake = run(plan, doing={"proxy-seed0": "fail"})
    assert outcome.failures == {
        "proxy-seed0": "it broke at",
        "grpo-seed0": "not begun, because proxy-seed0 failed",
        "proxy-seed0-best-of-4": "not begun, because proxy-seed0 failed",
    }
    assert set(fake.names("dropped")) == {"grpo-seed0", "proxy-seed0-best-of-4"}
    assert set(unfinished_trials(plan)) == set(outcome.failures)
    found = collect_sweep(plan, outcome, "again")
    assert found.problems[0] == "proxy-seed0: it broke at"
    assert found.parts["overoptimization"].data["methods"]["grpo"]["seeds"].keys() == {"1"}


def test_without_a_start_there_is_nothing(make_chain) -> None:
    plan = make_chain()
    with pytest.raises(RunFailure, match="the start of the sweep failed: it broke at"):
        run(plan, doing={"start": "fail"})
    with pytest.raises(RunFailure, match="nothing to report yet"):
        collect_sweep(plan, Outcome({}, False, 1, 1), "again")


def test_what_belongs_to_something_else_is_refused(make_chain, tmp_path: Path) -> None:
    plan = make_chain()
    run(plan)
    for override, message in (
        (("rows.grpo.train.lr", "1"), "made by another recipe; it differs in train.lr"),
        (("best_of_n.n", "6"), "made with other settings of best_of_n"),
    ):
        with pytest.raises(RunConflict, match=message):
            run_trials(make_chain(override))
    (plan.folder / "start" / "status.json").unlink()
    with pytest.raises(RunConflict, match="made from an earlier start, which is gone or not finished"):
        run_trials(plan)
    other = load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path)
    with pytest.raises(RunConflict, match="holds something else than a sweep"):
        run_trials(other)
    with pytest.raises(RunConflict, match="this is a file"):
        run_trials(load_sweep(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_from_records_to_files(make_chain) -> None:
    plan = make_chain()
    outcome, _ = run(plan)
    found = collect_sweep(plan, outcome, "posttrain sweep x")
    report = write_sweep(found, plan.folder)
    data = json.loads((plan.folder / "results.json").read_text())
    assert list(data["methods"]) == ["best of n", "grpo"]
    grpo = data["methods"]["grpo"]
    assert [p["gold"]["mean"] for p in grpo["mean"]] == [0.1, 0.8, 0.3]
    # scores 1, 2, 0, 0.5: mean 0.875; the proxy is told in their standard deviations
    deviation = (sum((s - 0.875) ** 2 for s in (1.0, 2.0, 0.0, 0.5)) / 4) ** 0.5
    assert grpo["mean"][2]["proxy"]["mean"] == pytest.approx((3.0 - 0.875) / deviation)
    assert [p["gold"]["mean"] for p in data["methods"]["best of n"]["mean"]] == [0.5, pytest.approx(0.5), 0.0]
    assert grpo["turn_over"]["peak_at"] == 1
    assert "| grpo | 2 |" in (plan.folder / "table.md").read_text()
    assert (plan.folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    page = report.read_text()
    assert page.count("<svg viewBox=") == 4
    assert "posttrain sweep x" in page


def test_answers_that_are_not_those_of_the_study_are_refused(make_chain) -> None:
    plan = make_chain()
    outcome, _ = run(plan)
    collect_sweep(plan, outcome, "posttrain sweep mine")
    path = plan.folder / "chosen" / "proxy-seed1" / "items.jsonl"
    item = json.loads(path.read_text())
    for samples, message in (
        (item["samples"][:2], r"items\.jsonl:1: 2 answers, where"),
        ([], "not answers to"),
    ):
        path.write_text(json.dumps(item | {"samples": samples}) + "\n")
        with pytest.raises(DataError, match=message):
            collect_sweep(plan, outcome, "posttrain sweep mine")
    path.write_text(f"{json.dumps(item)}\n{json.dumps(item | {'id': 'b'})}\n")
    with pytest.raises(DataError, match="not answers to the problems of this sweep"):
        collect_sweep(plan, outcome, "posttrain sweep mine")


def changed(name: str, before: str, after: str) -> Callable[[Path], None]:
    """A file of the sweep with other text in it."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1))

    return change


def cut_line(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:-1]))

    return cut


def double(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() * 2) and None


METRICS = "cells/grpo-seed1/metrics.jsonl"
ITEMS, RESULTS = "chosen/proxy-seed1/items.jsonl", "chosen/proxy-seed1/results.json"
DAMAGES = {
    "metrics cut": (cut_line(METRICS), "metrics.jsonl: 2 lines, and 3 stood there when the run ended"),
    "metrics doubled": (double(METRICS), "metrics.jsonl: 6 lines, and 3 stood there when the run ended"),
    "no metrics": (lambda folder: (folder / METRICS).unlink(), "metrics.jsonl: 0 lines, and 3 stood there"),
    "another run's metrics": (
        changed("cells/grpo-seed1/status.json", '"accuracy": 0.5', '"accuracy": 0.25'),
        "its last evaluation is not that of status.json; they differ in accuracy",
    ),
    "answers cut": (cut_line(ITEMS), "of 1 items, and items.jsonl has 0"),
    "answers doubled": (double(ITEMS), "of 1 items, and items.jsonl has 2"),
    "no answers": (lambda folder: (folder / ITEMS).unlink(), "results.json: damaged (FileNotFoundError"),
    "cut results": (changed(RESULTS, "}}", "}"), "results.json: damaged (JSONDecodeError"),
    "no count": (changed(RESULTS, '"n"', '"m"'), "results.json: damaged (KeyError: 'n')"),
    "a list": (lambda folder: (folder / RESULTS).write_text("[]") and None, "results.json: damaged (AttributeError"),
    "of another seed": (changed(RESULTS, '"seed": 1', '"seed": 0'), "of 0, where 1 was asked for"),
    "of other weights": (changed(RESULTS, "out/start", "out/other"), "/other/checkpoints/step-000002, where "),
    "by another scorer": (changed(RESULTS, "cells/proxy-seed1", "cells/proxy-seed0"), "/proxy-seed0, where "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_finished_trials_whose_records_are_not_all_there_are_refused(name: str, make_chain) -> None:
    """Else they would give other figures without a word."""
    plan = make_chain()
    run(plan)
    run_folder, choice = plan.folder / "cells" / "grpo-seed1", plan.evaluations("best_of_n")[1]
    state = run_folder / "checkpoints" / "step-000002" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"records": {"metrics": 3}, "best": math.nan}))
    told = json.loads((run_folder / "status.json").read_text())
    (run_folder / "status.json").write_text(json.dumps(told | {"evaluation": "x"}))
    settings = {"checkpoint": plan.start.weights, "seed": 1, "best_of": str(plan.folder / "cells" / "proxy-seed1")}
    (choice.folder / "results.json").write_text(json.dumps({"results": {"n": 1, "kl": math.nan}, "settings": settings}))
    assert unfinished_trials(plan) == []
    change, words = DAMAGES[name]
    change(plan.folder)
    before = {path: path.read_bytes() for path in plan.folder.rglob("*") if path.is_file()}
    with pytest.raises(RunConflict) as refusal:
        run(plan)
    assert words in str(refusal.value)
    assert str(refusal.value).endswith("under another name with --run NAME, or delete these trials first")
    assert {path: path.read_bytes() for path in plan.folder.rglob("*") if path.is_file()} == before
