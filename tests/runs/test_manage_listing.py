"""Lists of many runs: comparisons, filters, orders, disk use; and runs side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import make_comparison, make_run

from posttrain.errors import UsageError
from posttrain.runs.directory import RunDirectory, change_tags, lock_run
from posttrain.runs.listing import (
    ABSENT,
    Filter,
    check_states,
    disk_bytes,
    list_runs,
    put_side_by_side,
    show_run,
    sort_runs,
    summarize_comparison,
)
from posttrain.store.headline import REWARD
from posttrain.store.metrics import MetricsLog


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder, "a", accuracies={0: 0.1, 3: 0.5}, created="2026-01-03")
    make_run(folder, "b", steps=(1,), state="failed", created="2026-01-01")
    make_run(folder, "c", accuracies={1: 0.9, 2: 0.4}, created="2026-01-02", model="runs/a")
    change_tags(folder / "a", ["good", "keep"])
    change_tags(folder / "c", ["good"])
    return folder


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("created", "bca"),
        ("name", "abc"),
        ("accuracy", "acb"),  # 0.5, 0.4, and one that was never evaluated
        ("reward", "acb"),  # 3/8, 2/8, 1/8
        ("loss", "bca"),  # 1, 1/2, 1/3
    ],
)
def test_orders(root: Path, key: str, names: str) -> None:
    runs = list_runs(root)
    if key in ("step", "reward", "loss"):  # c stands at step 2
        make_run(root, "d", steps=(2,), created="2026-01-02")
        runs = [run for run in list_runs(root) if run.name != "c"]
        names = names.replace("c", "d")
    assert "".join(run.name for run in sort_runs(runs, key)) == names


def test_an_unknown_order_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no 'accurcy' to sort by. Did you mean 'accuracy'"):
        sort_runs(list_runs(root), "accurcy")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Filter(), "bca"),
        (Filter(states=("failed",)), "b"),
        (Filter(states=("failed", "finished")), "bca"),
        (Filter(tags=("good",)), "ca"),
        (Filter(tags=("good", "keep")), "a"),
        (Filter(names=("a", "[bx]")), "ba"),
        (Filter(states=("finished",), tags=("keep",), names=("c",)), ""),
    ],
)
def test_filters(root: Path, wanted: Filter, names: str) -> None:
    assert "".join(run.name for run in list_runs(root) if wanted(run)) == names
    assert bool(wanted) == (wanted != Filter())


def test_states_are_checked() -> None:
    assert check_states(["dead", "failed"]) == ("dead", "failed")
    with pytest.raises(UsageError, match=r"no state 'finshed'. Did you mean 'finished'"):
        check_states(["finshed"])


def test_comparisons_at_a_glance(root: Path) -> None:
    folder = make_comparison(root, "compare-x", num_seeds=2)
    item = summarize_comparison(root, "compare-x")
    assert (item.name, item.state, item.num_cells, item.num_finished) == ("compare-x", "finished", 4, 4)
    assert item.methods == ("grpo", "dapo")
    assert [run.name for run in item.runs][:2] == ["compare-x/start", "compare-x/cells/dapo-seed0"]
    assert item.disk_bytes == disk_bytes(folder)
    assert [run.name for run in list_runs(root)] == ["b", "c", "a"]
    assert len(list_runs(root, with_cells=True)) == 8
    with lock_run(folder):
        assert summarize_comparison(root, "compare-x").state == "running"


def test_a_comparison_counts_the_cells_that_its_file_asks_for(root: Path) -> None:
    folder = make_comparison(root, "compare-x")
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"rows": {"grpo": {}, "ppo": {}}, "seeds": 2}))
    item = summarize_comparison(root, "compare-x")
    assert (item.state, item.num_cells, item.num_finished, len(item.runs)) == ("unfinished", 4, 1, 3)
    (folder / "sweep.yaml").write_text("rows: 3")
    damaged = summarize_comparison(root, "compare-x")
    assert (damaged.state, damaged.num_finished) == ("damaged", 0)
    assert "sweep.yaml: damaged" in str(damaged.problem)


def test_disk_use_by_kind(root: Path) -> None:
    (root / "a" / "rollouts.db").write_bytes(b"x" * 700)
    (root / "a" / "rollouts.db-wal").write_bytes(b"x" * 50)
    used = show_run(root / "a")["disk"]
    assert used["rollouts"] == sum(item.stat().st_size for item in (root / "a").glob("rollouts.db*")) >= 750
    assert used["checkpoints"] == disk_bytes(root / "a" / "checkpoints")
    assert sum(used.values()) == disk_bytes(root / "a")


def change(root: Path, name: str, **sections: Any) -> None:
    path = root / name / "recipe.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))


def test_only_what_differs_is_shown(root: Path) -> None:
    change(root, "c", train={"steps": 10, "lr": 0.01}, description="another", rewards=[{"name": "correct"}])
    change(root, "a", rewards=[])
    found = put_side_by_side([root / "a", root / "c"])
    assert found.recipe == {
        "model.name": ["tiny", "runs/a"],
        "train.lr": [0.001, 0.01],
        "rewards.0.name": [ABSENT, "correct"],
    }
    assert found.num_equal_keys == 4  # task.name, objective.name, objective.clip_high, train.steps
    assert [run.name for run in found.runs] == ["a", "c"]


def test_put_side_by_side_gives_the_last_results_and_the_time(root: Path) -> None:
    found = put_side_by_side([root / "a", root / "b", root / "c"])
    name = "stories/validation"
    assert found.last == {
        name: [{"name": name, "step": 3, "accuracy": 0.5}, None, {"name": name, "step": 2, "accuracy": 0.4}]
    }
    assert found.metrics == {"reward": [0.375, 0.125, 0.375], "loss": [1 / 3, 1.0, 1 / 3]}
    assert found.seconds == [8.0, 2.0, 8.0]  # steps of 2 s and evaluations of 1 s


def test_runs_are_told_and_sorted_by_what_each_optimizes(tmp_path: Path) -> None:
    """Of a run without gold answers nothing is called accuracy; within a headline the better stands first."""
    for name, reward in (("low", 0.2), ("high", 0.9)):
        run = RunDirectory(make_run(tmp_path, name))
        status = run.read_status()
        assert status is not None
        numbers = {"reward": reward, "kl_from_start": 2.0}
        run.write_status(replace(status, headline=REWARD, held_out=numbers, evaluation="hh/test"))
        log = MetricsLog(run.folder / "metrics.jsonl")
        for step, value in ((0, -0.5), (1, 2 * reward), (2, reward)):
            log.append(step, {"eval/hh/test/reward": value, "eval/hh/test/kl_from_start": 2.0 * step})
        log.close()
    make_run(tmp_path, "sums", accuracies={1: 0.25})
    runs = list_runs(tmp_path)
    assert {run.name: run.told for run in runs} == {
        "low": "reward 0.200, KL 2.00", "high": "reward 0.900, KL 2.00", "sums": "25.0%",
    }  # fmt: skip
    assert [run.name for run in sort_runs(runs, "headline")] == ["high", "low", "sums"]
    assert next(run.name for run in sort_runs(runs, "accuracy")) == "sums"
    found = put_side_by_side([tmp_path / "high", tmp_path / "sums"])
    assert [headline.metric for headline in found.headlines] == ["reward", "accuracy"]
    assert [item and (item["step"], item["reward"]) for item in found.last["hh/test"]] == [(2, 0.9), None]
