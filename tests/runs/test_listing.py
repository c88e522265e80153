from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run
from posttrain.runs.listing import disk_bytes, list_runs, show_run, summarize_run
from posttrain.store.headline import ACCURACY
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout

MakeRecipe = Callable[..., Recipe]


def make_run(folder: Path, recipe: Recipe, state: str = "finished", step: int = 2) -> RunDirectory:
    folder.mkdir(parents=True)
    directory = RunDirectory(folder)
    directory.write_recipe(recipe)
    directory.write_environment("tiny/grpo", recipe.fingerprint())
    directory.write_status(
        RunStatus(state, step, 10, 1, "here", 5.0, None, ACCURACY, {"accuracy": 0.75}, "stories/validation")
    )
    log = MetricsLog(folder / "metrics.jsonl")
    log.append(0, {"eval/stories/validation/accuracy": 0.25, "eval/stories/validation/n": 8.0})
    for k in range(1, step + 1):
        log.append(k, {"reward": k / 8, "loss": 1 / k}, {"step_seconds": 0.5})
    log.append(step, {"eval/stories/validation/accuracy": 0.75, "eval/gsm8k/test/accuracy": 0.125})
    log.close()
    return directory


def test_a_run_at_a_glance(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    make_run(tmp_path / "a", make_recipe())
    (summary,) = list_runs(tmp_path)
    assert (summary.name, summary.path, summary.state) == ("a", tmp_path / "a", "finished")
    assert (summary.step, summary.steps) == (2, 10)
    assert (summary.recipe, summary.objective, summary.model) == ("tiny/grpo", "grpo", "tiny")
    assert summary.metrics == {"reward": 0.25, "loss": 0.5}  # of the last step, not of the evaluation after it
    assert (summary.value, summary.told, summary.problem) == (0.75, "75.0%", None)
    assert summary.disk_bytes == sum(p.stat().st_size for p in (tmp_path / "a").iterdir())


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted", "running"])
def test_running_needs_a_live_process(tmp_path: Path, make_recipe: MakeRecipe, state: str) -> None:
    folder = make_run(tmp_path / "a", make_recipe(), state).folder
    assert summarize_run(folder).state == ("dead" if state == "running" else state)
    with lock_run(folder):
        assert summarize_run(folder).state == "running"
    assert summarize_run(folder).state == ("dead" if state == "running" else state)


def test_a_run_killed_before_its_first_status_is_dead(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    (tmp_path / "a").mkdir()
    RunDirectory(tmp_path / "a").write_recipe(make_recipe())
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.step, summary.steps, summary.recipe) == ("dead", 0, 10, "?")
    assert summary.problem is None


@pytest.mark.parametrize("name", ["recipe.yaml", "status.json", "env.json", "metrics.jsonl"])
def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path, make_recipe: MakeRecipe, name: str) -> None:
    make_run(tmp_path / "a", make_recipe())
    make_run(tmp_path / "b", make_recipe())
    (tmp_path / "a" / name).write_text("{ [ broken\n")
    by_name = {summary.name: summary for summary in list_runs(tmp_path)}
    assert by_name["a"].state == "damaged"
    assert name in str(by_name["a"].problem)
    assert by_name["b"].state == "finished"
    assert show_run(tmp_path / "a")["state"] == "damaged"


def test_oldest_first_and_other_folders_left_out(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    for name, created in (("a", "2025-03-01"), ("b", "2025-01-01"), ("c", "2025-02-01")):
        path = make_run(tmp_path / name, make_recipe()).environment_path
        path.write_text(f'{{"recipe": "r", "created": "{created}", "starts": []}}')
    (tmp_path / "notes").mkdir()
    assert [summary.name for summary in list_runs(tmp_path)] == ["b", "c", "a"]
    assert list_runs(tmp_path / "none") == []


def test_everything_about_one_run(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    folder = make_run(tmp_path / "a", make_recipe()).folder
    for step in (1, 2):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:06d}" / "weights").write_bytes(b"x" * 100 * step)
    os.symlink("step-000001", folder / "checkpoints" / "best")
    example = Example("e", (Message("user", "?"),))
    rollouts = [Rollout(example, (1,), Completion((1,), (-1.0,), "stop"), "", {}, 0.0, 2, 0, 0, i) for i in range(3)]
    with RolloutStore(folder / "rollouts.db") as store:
        store.record(rollouts)
        store.record(rollouts[:1], evaluation="stories/validation")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    shown = show_run(folder)
    assert shown["name"] == "a"
    assert shown["recipe_text"] == make_recipe().to_yaml()
    assert (shown["first_metrics"], shown["metrics"]) == ({"reward": 0.125, "loss": 1.0}, {"reward": 0.25, "loss": 0.5})
    assert [(c["step"], c["disk_bytes"], c["best"]) for c in shown["checkpoints"]] == [(1, 100, True), (2, 200, False)]
    assert shown["evaluations"] == [
        {"name": "stories/validation", "step": 0, "accuracy": 0.25, "n": 8.0},
        {"name": "stories/validation", "step": 2, "accuracy": 0.75},
        {"name": "gsm8k/test", "step": 2, "accuracy": 0.125},
    ]
    assert (shown["rollouts"], shown["evaluation_rollouts"]) == ({2: 3}, {"stories/validation at 2": 1})
    assert (shown["status"]["held_out"], shown["status"]["headline"]["metric"]) == ({"accuracy": 0.75}, "accuracy")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before  # showing writes nothing


def test_links_are_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "weights").write_bytes(b"x" * 1000)
    os.symlink("step", tmp_path / "best")
    os.symlink("step/weights", tmp_path / "link")
    assert disk_bytes(tmp_path) == 1000
