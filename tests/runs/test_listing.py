"""Lists of runs: at a glance, in full, in order, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import make_run, make_sweep

from posttrain.runs.directory import RunDirectory, lock_run
from posttrain.runs.listing import disk_bytes, list_runs, put_side_by_side, show_run, summarize_run, summarize_sweep
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder, "a", accuracies={0: 0.25, 3: 0.5}, created="2026-01-03", best=1)
    make_run(folder, "b", steps=(1,), state="failed", created="2026-01-01")
    make_run(folder, "c", accuracies={1: 0.9, 2: 0.4}, created="2026-01-02", model="runs/a")
    (folder / "notes").mkdir()
    return folder


def names(runs: list[Any]) -> str:
    return "".join(run.name for run in runs)


def test_a_run_of_a_recipe_alone_and_one_that_was_killed_are_dead(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", state="running", steps=())
    assert summarize_run(folder).state == "dead"
    with lock_run(folder):
        assert summarize_run(folder).state == "running"
    (folder / "status.json").unlink()
    run = summarize_run(folder)
    assert (run.state, run.step, run.steps) == ("dead", 0, 10)


def test_everything_about_one_run(root: Path) -> None:
    folder = root / "a"
    example = Example("e", (Message("user", "?"),))
    rollouts = [Rollout(example, (1,), Completion((1,), (-1.0,), "stop"), "", {}, 0.0, 2, 0, 0, i) for i in range(3)]
    with RolloutStore(folder / "rollouts.db") as store:
        store.record(rollouts)
        store.record(rollouts[:1], evaluation="stories/validation")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    shown = show_run(folder)
    assert (shown["name"], shown["recipe"], shown["message"]) == ("a", "tiny/grpo", None)
    checkpoint = disk_bytes(folder / "checkpoints" / "step-000001")
    assert shown["checkpoints"][0] == {"step": 1, "disk_bytes": checkpoint, "best": True}
    assert [(c["step"], c["best"]) for c in shown["checkpoints"]] == [(1, True), (2, False), (3, False)]
    assert shown["evaluations"] == [
        {"name": "stories/validation", "step": 0, "accuracy": 0.25},
        {"name": "stories/validation", "step": 3, "accuracy": 0.5},
    ]
    assert shown["rollouts"] == {2: 3}
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before  # showing writes nothing


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "bca"),
        ({"sort": "name"}, "abc"),
        ({"sort": "metric"}, "acb"),
        ({"states": ["failed", "finished"]}, "bca"),
        ({"patterns": ["a", "[bx]"]}, "ba"),
    ],
)
def test_orders_and_filters(root: Path, options: dict[str, Any], expected: str) -> None:
    assert names(list_runs(root, **options)) == expected
    assert list_runs(root / "none") == []


def test_sweeps_at_a_glance(root: Path) -> None:
    folder = make_sweep(root, "sweep-x", num_seeds=2)
    sweep = summarize_sweep(root, "sweep-x")
    assert (sweep.name, sweep.is_running, sweep.num_runs, sweep.num_finished) == ("sweep-x", False, 5, 5)
    assert sweep.disk_bytes == disk_bytes(folder)
    assert names(list_runs(root)) == "bca"
    assert len(list_runs(root, patterns=["sweep-x/cells/*"])) == 4
    with lock_run(folder):
        assert summarize_sweep(root, "sweep-x").is_running


def test_runs_are_shown_and_sorted_by_their_primary_metric(tmp_path: Path) -> None:
    """A run without gold answers has no accuracy; with the same metric the better stands first."""
    for name, reward in (("low", 0.2), ("high", 0.9)):
        run = RunDirectory(make_run(tmp_path, name))
        status = run.read_status()
        assert status is not None
        numbers = {"reward": reward, "kl_initial": 2.0}
        run.write_status(replace(status, primary_metric="reward", held_out=numbers, evaluation="hh/test"))
        log = MetricsLog(run.folder / "metrics.jsonl")
        log.append(2, {"eval/hh/test/reward": reward, "eval/hh/test/kl_initial": 4.0})
        log.close()
    make_run(tmp_path, "sums", accuracies={1: 0.25})
    runs = list_runs(tmp_path, sort="metric")
    assert [(run.name, run.result) for run in runs] == [
        ("high", "reward 0.900 · KL from initial model 2.000"),
        ("low", "reward 0.200 · KL from initial model 2.000"),
        ("sums", "accuracy 25.0%"),
    ]
    found = put_side_by_side([tmp_path / "high", tmp_path / "sums"])
    assert [run.primary_metric for run in found.runs] == ["reward", "accuracy"]
    assert [item and (item["step"], item["reward"]) for item in found.last["hh/test"]] == [(2, 0.9), None]
