"""How the cells of a comparison are run: with small stand-ins for `posttrain train`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner, doings, starts, status_of

from posttrain.errors import RunConflict, RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.reports.sweeps import write_comparison
from posttrain.runs import directory
from posttrain.runs.children import thread_settings, threads_per_child
from posttrain.runs.directory import RunDirectory, lock_run
from posttrain.store.headline import ACCURACY, REWARD
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.compare import ComparisonPlan, load_comparison
from posttrain.sweeps.comparison import collect_comparison
from posttrain.sweeps.runner import last_error, part_command, run_sweep

TEXT = """\
base:
  task: {name: stories, size: 40}
  rollout: {prompts: 2, group: 2, max_tokens: 8}
  train: {steps: 2}
  eval: {every: 1, n: 5}
methods: {good: {objective: grpo}, other: {objective: reinforce}}
seeds: 1
"""


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., ComparisonPlan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> ComparisonPlan:
        (tmp_path / "mine.yaml").write_text(TEXT)
        return load_comparison(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


@pytest.fixture(autouse=True)
def say_nothing_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_every_cell_runs_and_tells_its_evaluations(tmp_path: Path, make_plan: Callable[..., ComparisonPlan]) -> None:
    plan, stand = make_plan(num_seeds=2), FakeRunner()
    outcome = stand.run(plan, jobs=2)
    assert (outcome.failures, outcome.interrupted, outcome.num_jobs) == ({}, False, 2)
    threads = max(1, count_cpus() // 2)
    assert stand.plan_facts == {"num_parts": 4, "num_finished": 0, "num_jobs": 2, "num_threads": threads}
    for cell in plan.cells:
        assert starts(plan, cell.name) == [f"finish {threads}"]
        assert [e for e, name in stand.told if name == cell.name] == ["begin", "evaluation", "evaluation", "end"]
    assert (plan.folder / "compare.yaml").read_text() == plan.to_yaml()


def test_threads_are_those_of_the_environment(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plan, stand = make_plan(), FakeRunner()
    outcome = stand.run(plan, jobs=1)
    assert (outcome.num_threads, stand.plan_facts["num_threads"]) == (7, 7)
    assert [starts(plan, cell.name) for cell in plan.cells] == [["finish 7"]] * 2
    assert thread_settings(2) == {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7"}
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert thread_settings(2) == {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "3"}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_settings(2) == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested parallel regions: the outer one first
    assert (threads_per_child(2), thread_settings(2)["OMP_NUM_THREADS"]) == (4, "4,2")


def test_one_job_runs_cells_in_order_and_no_two_at_once(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan]
) -> None:
    plan, stand = make_plan(num_seeds=2), FakeRunner()
    stand.run(plan, jobs=1)
    turns = [(event, name) for event, name in stand.told if event in ("begin", "end")]
    assert turns == [(event, cell.name) for cell in plan.cells for event in ("begin", "end")]


def test_a_failing_cell_stops_no_other_and_is_tried_again(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan]
) -> None:
    plan, stand = make_plan(), FakeRunner({"good": "fail"})
    outcome = stand.run(plan, jobs=1)
    assert outcome.failures == {"good-seed0": "it broke at"}
    assert ("end", "other-seed0") in stand.told
    comparison = collect_comparison(plan, outcome, "posttrain compare mine.yaml")
    assert [(row.name, row.cells[0].state) for row in comparison.rows] == [("other", "finished"), ("good", "failed")]
    assert comparison.rows[1].cells[0].problem == "it broke at"
    write_comparison(comparison, plan.folder)
    assert "good, seed 0: failed after 0 steps: it broke at" in (plan.folder / "table.md").read_text()
    again = FakeRunner()
    outcome = again.run(plan, jobs=1)
    assert outcome.failures == {}
    assert again.names("begin") == ["good-seed0"]
    assert doings(plan, "good-seed0") == ["fail", "resume"]
    results = collect_comparison(plan, outcome, "posttrain compare mine.yaml")
    assert [row.cells[0].state for row in results.rows] == ["finished", "finished"]
    assert {row.name: row.cells[0].problem for row in results.rows} == {"good": None, "other": None}


def test_finished_cells_are_kept_and_new_seeds_added(tmp_path: Path, make_plan: Callable[..., ComparisonPlan]) -> None:
    FakeRunner().run(make_plan(), jobs=2)
    stand, plan = FakeRunner(), make_plan(num_seeds=2)
    stand.run(plan, jobs=2)
    assert stand.plan_facts["num_finished"] == 2
    assert sorted(name for event, name in stand.told if event == "begin") == ["good-seed1", "other-seed1"]
    assert len(starts(plan, "good-seed0")) == 1


def test_a_cell_that_was_killed_after_its_last_step_goes_on(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan]
) -> None:
    """Nothing is left to do of it, so that no time that remains can be told."""
    plan = make_plan()
    FakeRunner().run(plan)
    status = plan.cells[1].folder / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    again = FakeRunner()
    assert again.run(plan).failures == {}
    ends = [facts["remaining"] for event, facts in again.events if event == "end"]
    assert (again.names("end"), ends) == (["other-seed0"], [None])


def test_a_signal_ends_the_cells_and_the_same_command_goes_on(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan], capfd: pytest.CaptureFixture[str]
) -> None:
    plan, stand = make_plan(num_seeds=2), FakeRunner({"good": "wait"})

    def observe(event: str, facts: dict[str, Any]) -> None:
        stand.observe(event, facts)
        if event == "evaluation" and facts["part"].name == "good-seed0":
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run_sweep(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert outcome.interrupted
    assert outcome.failures == {}  # being stopped is no failure
    assert stand.names("begin") == ["good-seed0"]  # no other was begun
    assert status_of(plan.cells[0].folder) == "interrupted"
    assert capfd.readouterr().err == (
        "\nstopping when what is at work has saved what it has; once more to stop at once\n"  # this process has no step
    )
    again = FakeRunner()
    outcome = again.run(plan, jobs=2)
    assert not outcome.interrupted
    assert doings(plan, "good-seed0") == ["wait", "resume"]
    steps = [row.step for row in MetricsLog(plan.cells[0].folder / "metrics.jsonl").read()]
    assert steps == [0, 2]
    # what had been told before is not told again
    told = [event for event, name in again.told if name == "good-seed0"]
    assert told == ["begin", "evaluation", "end"]


def test_an_error_on_our_side_leaves_no_process_behind(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan]
) -> None:
    plan, stand = make_plan(), FakeRunner({"good": "wait"})

    def observe(event: str, facts: dict[str, Any]) -> None:
        if event == "evaluation":
            raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        run_sweep(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert status_of(plan.cells[0].folder) == "interrupted"


def test_cells_of_another_recipe_are_refused_and_nothing_changes(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan]
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


def test_a_cell_in_another_process_and_a_strange_folder_are_refused(
    tmp_path: Path, make_plan: Callable[..., ComparisonPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 0.1)
    plan = make_plan()
    FakeRunner().run(plan)
    with lock_run(plan.cells[1].folder), pytest.raises(RunConflict) as caught:
        FakeRunner().run(plan)
    assert f"other-seed0: another process is working in it (pid {os.getpid()} on " in str(caught.value)
    assert "Wait for it or stop it; the same command then goes on" in str(caught.value)
    assert "delete" not in str(caught.value)  # what is at work is no rubbish
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 600.0)  # another comparison at work is not waited for
    with lock_run(plan.folder), pytest.raises(RunConflict, match=rf"in this run \(pid {os.getpid()} on "):
        FakeRunner().run(plan)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("dear")
    strange = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "strange")
    with pytest.raises(RunConflict, match="something else than a comparison"):
        FakeRunner().run(strange)
    with pytest.raises(RunConflict, match="a file, not a folder"):
        FakeRunner().run(load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_the_start_is_trained_first_and_once(tmp_path: Path, make_plan: Callable[..., ComparisonPlan]) -> None:
    plan, stand = make_plan(("start", "{recipe: tiny/sft, train: {steps: 2}}")), FakeRunner()
    stand.run(plan, jobs=2)
    begun = stand.names("begin")
    assert begun[0] == "start"
    assert stand.told.index(("end", "start")) < stand.told.index(("begin", "good-seed0"))
    again = FakeRunner()
    again.run(plan)
    assert again.told == []


def test_without_a_start_nothing_is_compared(tmp_path: Path, make_plan: Callable[..., ComparisonPlan]) -> None:
    plan, stand = make_plan(("start", "tiny/sft")), FakeRunner({"start": "fail"})
    with pytest.raises(RunFailure, match="the start of the comparison failed: it broke at"):
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


def test_the_command_is_posttrain_train(make_plan: Callable[..., ComparisonPlan]) -> None:
    cell = make_plan().cells[0]
    command = part_command(cell, True)
    shown = subprocess.run([*command[:3], "train", "--help"], capture_output=True, text=True, check=True, timeout=60)
    for option in (word for word in command if word.startswith("--")):
        assert option in shown.stdout
    assert command[3:] == [
        *("train", str(cell.folder.with_name("good-seed0.yaml")), "--runs-dir", str(cell.folder.parent)),
        *("--run", "good-seed0", "--quiet", "--resume"),
    ]
    assert part_command(cell, False) == command[:-1]


def test_cells_of_a_start_that_is_gone_are_not_mixed_with_others(tmp_path: Path) -> None:
    """Their recipes say nothing of how the start was trained, so nothing else would tell."""
    (tmp_path / "mine.yaml").write_text(f"start: tiny/sft\n{TEXT}")
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    stand = FakeRunner()
    run_sweep(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    assert plan.start is not None
    shutil.rmtree(plan.start.folder)
    with pytest.raises(RunConflict) as caught:
        run_sweep(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    for cell in plan.cells:
        earlier = f"{cell.folder}: made from an earlier start, which is gone or not finished"
        assert earlier in str(caught.value)
    assert not plan.start.folder.exists()  # nothing was begun


def test_a_reward_of_its_own_is_not_put_beside_the_others(tmp_path: Path) -> None:
    own = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    (tmp_path / "mine.yaml").write_text(own)
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    outcome = run_sweep(plan, jobs=1, command=FakeRunner().command, poll_seconds=0.02)
    rows = {row.name: row for row in collect_comparison(plan, outcome, "posttrain compare").rows}
    assert rows["good"].summaries["reward"].mean == 0.5
    assert "reward" not in rows["other"].summaries
    assert rows["other"].summaries["accuracy"].mean == 0.5
    assert [point.reward for point in rows["other"].cells[0].curve] == [None, None]


def test_the_headline_is_what_the_cells_have_stored(tmp_path: Path) -> None:
    """By reward, a method with a reward of its own has nothing to be ranked by, and no curve."""
    own = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    (tmp_path / "mine.yaml").write_text(own)
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    outcome = run_sweep(plan, jobs=1, command=FakeRunner().command, poll_seconds=0.02)
    assert collect_comparison(plan, outcome, "posttrain compare").headline == ACCURACY
    for cell in plan.cells:
        assert cell.status is not None
        RunDirectory(cell.folder).write_status(replace(cell.status, headline=REWARD, held_out={"reward": 0.5}))
    comparison = collect_comparison(plan, outcome, "posttrain compare")
    rows = {row.name: row for row in comparison.rows}
    assert comparison.headline == REWARD
    assert rows["good"].summaries["start_reward"].mean == 0.1
    assert (rows["good"].summaries["gain"].mean, rows["good"].cells[0].curve[-1].value) == (0.4, 0.5)
    assert {"reward", "gain", "mean_reward"} & rows["other"].summaries.keys() == set()
    assert (rows["other"].cells[0].curve, comparison.rows[-1].name) == ([], "other")
