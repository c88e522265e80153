"""How the cells of a comparison are run: with small stand-ins for `posttrain train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunConflict, RunFailure
from posttrain.reports.comparison import write_comparison
from posttrain.runs import directory
from posttrain.runs.children import thread_settings, threads_per_child
from posttrain.runs.directory import lock_run
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.cells import last_error, num_cores, run_cells, train_command
from posttrain.sweeps.compare import Cell, Plan, load_comparison
from posttrain.sweeps.comparison_files import collect_results

# What a training does to its directory, without training. argv: folder, recipe, what to do.
STAND_IN = """\
import json, os, pathlib, signal, sys, time
folder, recipe, what = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(exist_ok=True, parents=True)
(folder / "recipe.yaml").write_text(open(recipe).read())
with open(folder / "starts.txt", "a") as file:
    file.write(f"{what} {os.environ['OMP_NUM_THREADS']}\\n")

def status(state, step):
    facts = {"state": state, "step": step, "steps": 2, "pid": 1, "host": "here", "updated": 0, "accuracy": 0.5}
    (folder / "status.new").write_text(json.dumps(facts))
    os.replace(folder / "status.new", folder / "status.json")  # as a run does: its reader never sees a part

def evaluate(step, accuracy):
    facts = {"n": 20, "accuracy": accuracy, "reward": accuracy}
    line = {"step": step, "metrics": {f"eval/x/{k}": v for k, v in facts.items()}, "timing": {}}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")

def stop(number, frame):
    status("interrupted", 1)
    sys.exit(130)

signal.signal(signal.SIGINT, stop)
if what != "resume":
    status("running", 0)
    evaluate(0, 0.1)
if what == "fail":
    print("a warning")
    print("posttrain: it broke at\\n  some place", file=sys.stderr)
    sys.exit(1)
if what == "wait":
    time.sleep(60)
evaluate(2, 0.5)
status("finished", 2)
"""

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
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(*overrides: tuple[str, str], **wanted: Any) -> Plan:
        (tmp_path / "mine.yaml").write_text(TEXT)
        return load_comparison(str(tmp_path / "mine.yaml"), overrides, folder=tmp_path / "out", **wanted)

    return make


class Stand:
    """Commands that run the stand-in, and the events that were told. ``doing``: by method."""

    def __init__(self, tmp_path: Path, **doing: str) -> None:
        self.script = tmp_path / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.doing = doing
        self.events: list[tuple[str, str]] = []
        self.plan_facts: dict[str, Any] = {}

    def command(self, cell: Cell, resume: bool) -> list[str]:
        what = "resume" if resume else self.doing.get(cell.method, "finish")
        recipe = cell.folder.with_name(f"{cell.name}.yaml")
        return [sys.executable, "-S", str(self.script), str(cell.folder), str(recipe), what]

    def observe(self, event: str, facts: dict[str, Any]) -> None:
        if event == "plan":
            self.plan_facts = facts
        else:
            self.events.append((event, facts["cell"].name if "cell" in facts else ""))

    def run(self, plan: Plan, **options: Any) -> Any:
        return run_cells(plan, observer=self.observe, command=self.command, poll_seconds=0.02, **options)


def starts(plan: Plan, name: str) -> list[str]:
    return (plan.folder / "cells" / name / "starts.txt").read_text().splitlines()


@pytest.fixture(autouse=True)
def say_nothing_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_every_cell_runs_and_tells_its_evaluations(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(num_seeds=2), Stand(tmp_path)
    outcome = stand.run(plan, jobs=2)
    assert (outcome.failures, outcome.interrupted, outcome.num_jobs) == ({}, False, 2)
    threads = max(1, num_cores() // 2)
    assert stand.plan_facts == {"num_cells": 4, "num_finished": 0, "num_jobs": 2, "num_threads": threads}
    for cell in plan.cells:
        assert starts(plan, cell.name) == [f"finish {threads}"]
        assert [e for e, name in stand.events if name == cell.name] == ["begin", "evaluation", "evaluation", "end"]
    assert (plan.folder / "compare.yaml").read_text() == plan.to_yaml()


def test_threads_are_those_of_the_environment(
    tmp_path: Path, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plan, stand = make_plan(), Stand(tmp_path)
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


def test_one_job_runs_cells_in_order_and_no_two_at_once(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(num_seeds=2), Stand(tmp_path)
    stand.run(plan, jobs=1)
    turns = [(event, name) for event, name in stand.events if event in ("begin", "end")]
    assert turns == [(event, cell.name) for cell in plan.cells for event in ("begin", "end")]


def test_a_failing_cell_stops_no_other_and_is_tried_again(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(), Stand(tmp_path, good="fail")
    outcome = stand.run(plan, jobs=1)
    assert outcome.failures == {"good-seed0": "it broke at"}
    assert ("end", "other-seed0") in stand.events
    comparison = collect_results(plan, outcome, "posttrain compare mine.yaml")
    assert [(row.name, row.cells[0].state) for row in comparison.rows] == [("other", "finished"), ("good", "failed")]
    assert comparison.rows[1].cells[0].problem == "it broke at"
    write_comparison(comparison, plan.folder)
    assert "good, seed 0: failed after 0 steps: it broke at" in (plan.folder / "table.md").read_text()
    again = Stand(tmp_path)
    outcome = again.run(plan, jobs=1)
    assert outcome.failures == {}
    assert [name for event, name in again.events if event == "begin"] == ["good-seed0"]
    assert [line.split()[0] for line in starts(plan, "good-seed0")] == ["fail", "resume"]
    results = collect_results(plan, outcome, "posttrain compare mine.yaml")
    assert [row.cells[0].state for row in results.rows] == ["finished", "finished"]
    assert {row.name: row.cells[0].problem for row in results.rows} == {"good": None, "other": None}


def test_finished_cells_are_kept_and_new_seeds_added(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    Stand(tmp_path).run(make_plan(), jobs=2)
    stand, plan = Stand(tmp_path), make_plan(num_seeds=2)
    stand.run(plan, jobs=2)
    assert stand.plan_facts["num_finished"] == 2
    assert sorted(name for event, name in stand.events if event == "begin") == ["good-seed1", "other-seed1"]
    assert len(starts(plan, "good-seed0")) == 1


def test_a_signal_ends_the_cells_and_the_same_command_goes_on(
    tmp_path: Path, make_plan: Callable[..., Plan], capfd: pytest.CaptureFixture[str]
) -> None:
    plan, stand = make_plan(num_seeds=2), Stand(tmp_path, good="wait")

    def observe(event: str, facts: dict[str, Any]) -> None:
        stand.observe(event, facts)
        if event == "evaluation" and facts["cell"].name == "good-seed0":
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run_cells(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert outcome.interrupted
    assert outcome.failures == {}  # being stopped is no failure
    assert [name for event, name in stand.events if event == "begin"] == ["good-seed0"]  # no other was begun
    assert json.loads((plan.cells[0].folder / "status.json").read_text())["state"] == "interrupted"
    assert "with a checkpoint" in capfd.readouterr().err
    again = Stand(tmp_path)
    outcome = again.run(plan, jobs=2)
    assert not outcome.interrupted
    assert [line.split()[0] for line in starts(plan, "good-seed0")] == ["wait", "resume"]
    steps = [row.step for row in MetricsLog(plan.cells[0].folder / "metrics.jsonl").read()]
    assert steps == [0, 2]
    # what had been told before is not told again
    told = [event for event, name in again.events if name == "good-seed0"]
    assert told == ["begin", "evaluation", "end"]


def test_an_error_on_our_side_leaves_no_process_behind(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(), Stand(tmp_path, good="wait")

    def observe(event: str, facts: dict[str, Any]) -> None:
        if event == "evaluation":
            raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        run_cells(plan, jobs=1, observer=observe, command=stand.command, poll_seconds=0.02)
    assert json.loads((plan.cells[0].folder / "status.json").read_text())["state"] == "interrupted"


def test_cells_of_another_recipe_are_refused_and_nothing_changes(
    tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    Stand(tmp_path).run(make_plan(), jobs=2)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changed, stand = make_plan(("train.lr", "0.5")), Stand(tmp_path)
    with pytest.raises(RunConflict) as caught:
        stand.run(changed)
    assert "good-seed0: made by another recipe; it differs in train.lr (0.0001 there, 0.5 now)" in str(caught.value)
    assert "other-seed0" in str(caught.value)
    assert stand.events == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_cell_in_another_process_and_a_strange_folder_are_refused(
    tmp_path: Path, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 0.1)
    plan = make_plan()
    Stand(tmp_path).run(plan)
    with lock_run(plan.cells[1].folder), pytest.raises(RunConflict) as caught:
        Stand(tmp_path).run(plan)
    assert f"other-seed0: another process is working in it (pid {os.getpid()} on " in str(caught.value)
    assert "Wait for it or stop it; the same command then goes on" in str(caught.value)
    assert "delete" not in str(caught.value)  # what is at work is no rubbish
    monkeypatch.setattr(directory, "PATIENCE_SECONDS", 600.0)  # another comparison at work is not waited for
    with lock_run(plan.folder), pytest.raises(RunConflict, match=rf"in this run \(pid {os.getpid()} on "):
        Stand(tmp_path).run(plan)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("dear")
    strange = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "strange")
    with pytest.raises(RunConflict, match="something else than a comparison"):
        Stand(tmp_path).run(strange)
    with pytest.raises(RunConflict, match="a file, not a folder"):
        Stand(tmp_path).run(load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "mine.yaml"))


def test_the_start_is_trained_first_and_once(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(("start", "{recipe: tiny/sft, train: {steps: 2}}")), Stand(tmp_path)
    stand.run(plan, jobs=2)
    begun = [name for event, name in stand.events if event == "begin"]
    assert begun[0] == "start"
    assert stand.events.index(("end", "start")) < stand.events.index(("begin", "good-seed0"))
    again = Stand(tmp_path)
    again.run(plan)
    assert again.events == []


def test_without_a_start_nothing_is_compared(tmp_path: Path, make_plan: Callable[..., Plan]) -> None:
    plan, stand = make_plan(("start", "tiny/sft")), Stand(tmp_path, start="fail")
    with pytest.raises(RunFailure, match="the start of the comparison failed: it broke at"):
        stand.run(plan)
    assert [name for event, name in stand.events if event == "begin"] == ["start"]


def test_what_a_process_said_last(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("posttrain: of an earlier start\n")
    start = log.stat().st_size
    assert last_error(log, start, 1) == "ended with exit code 1 and said nothing"
    with log.open("a") as file:
        file.write("Traceback ...\nValueError: no\n\n")
    assert last_error(log, start, 1) == "ValueError: no"
    assert last_error(log, 0, 1) == "of an earlier start"
    assert last_error(log, start, -signal.SIGKILL) == "ended by SIGKILL (out of memory?)"


def test_the_command_is_posttrain_train(make_plan: Callable[..., Plan]) -> None:
    cell = make_plan().cells[0]
    command = train_command(cell, True)
    shown = subprocess.run([*command[:3], "train", "--help"], capture_output=True, text=True, check=True, timeout=60)
    for option in (word for word in command if word.startswith("--")):
        assert option in shown.stdout
    assert command[3:] == [
        *("train", str(cell.folder.with_name("good-seed0.yaml")), "--runs-dir", str(cell.folder.parent)),
        *("--run", "good-seed0", "--quiet", "--resume"),
    ]
    assert train_command(cell, False) == command[:-1]


def test_cells_of_a_start_that_is_gone_are_not_mixed_with_others(tmp_path: Path) -> None:
    """Their recipes say nothing of how the start was trained, so nothing else would tell."""
    (tmp_path / "mine.yaml").write_text(f"start: tiny/sft\n{TEXT}")
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    stand = Stand(tmp_path)
    run_cells(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    assert plan.start is not None
    shutil.rmtree(plan.start.folder)
    with pytest.raises(RunConflict, match=r"start: the start is gone or new, and 2 cells were trained from an earlier"):
        run_cells(plan, jobs=1, command=stand.command, poll_seconds=0.02)
    assert not plan.start.folder.exists()  # nothing was begun


def test_a_reward_of_its_own_is_not_put_beside_the_others(tmp_path: Path) -> None:
    own = TEXT.replace("other: {objective: reinforce}", "other: {objective: reinforce, rewards: [is_number]}")
    (tmp_path / "mine.yaml").write_text(own)
    plan = load_comparison(str(tmp_path / "mine.yaml"), folder=tmp_path / "out")
    outcome = run_cells(plan, jobs=1, command=Stand(tmp_path).command, poll_seconds=0.02)
    rows = {row.name: row for row in collect_results(plan, outcome, "posttrain compare").rows}
    assert rows["good"].summaries["reward"].mean == 0.5
    assert "reward" not in rows["other"].summaries
    assert rows["other"].summaries["accuracy"].mean == 0.5
    assert [point.reward for point in rows["other"].cells[0].curve] == [None, None]
