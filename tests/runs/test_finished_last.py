"""A run is finished when all of its files are there: killed before, it goes on and writes what is missing."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.training import write_run_summary
from posttrain.cli import main
from posttrain.recipes.recipe import Recipe
from posttrain.runs import launch as launching
from posttrain.runs.directory import RunDirectory
from posttrain.sweeps.runner import run_trials
from posttrain.training.files import Observer
from small_runs import Events, one_layer_recipe

FILES = ("curves.png", "results.json", "report.html")
# Where a run may die between its last checkpoint and its end, and the files that are there then.
PLACES = {
    "posttrain.reports.summary.draw_png": 0,
    "posttrain.reports.summary.write_results": 1,
    "posttrain.reports.summary.render_report": 2,
    "posttrain.reports.summary.write_html": 2,
}
SWEEP = """\
start: {recipe: tiny/sft, task: {size: 40}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
base:
  recipe: tiny/grpo
  task: {size: 40}
  rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
  train: {steps: 2, warmup_steps: 0}
  eval: {every: 1, num_examples: 4, num_kl_prompts: 4, max_tokens: 8}
rows: {grpo: rl/grpo}
seeds: 1
"""
KILLED = """
import os, signal, sys
import posttrain.reports.summary as summary
if "cells" in " ".join(sys.argv):
    summary.render_report = lambda report: os.kill(os.getpid(), signal.SIGKILL)
from posttrain.cli import main
from posttrain.recipes.recipe import Recipe
sys.exit(main(sys.argv[1:]))
"""


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the run does afterwards counts."""


def there(folder: Path) -> list[str]:
    return [name for name in FILES if (folder / name).is_file()]


def state_of(folder: Path) -> str:
    status = RunDirectory(folder).read_status()
    assert status is not None
    return status.state


def train_here(recipe: Recipe, root: Path, observer: Observer, *, resume: bool = False, **options: Any) -> None:
    start = launching.RunStart(root=root, name="it", resume=resume)
    launching.launch(recipe, start, observer=observer, summarize=write_run_summary, **options)


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are files without content: to draw them takes longer than the run."""
    monkeypatch.setattr("posttrain.reports.summary.draw_png", lambda panels, title, path: path.write_bytes(b""))
    monkeypatch.setattr("posttrain.reports.page.draw_svg", lambda panel: "")


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize(("how", "place"), [*(("killed", place) for place in PLACES), ("stopped", [*PLACES][2])])
def test_run_that_ends_before_its_report_is_not_finished_and_writes_it_when_resumed(
    how: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = one_layer_recipe("grpo", train={"steps": 2, "lr": 1e-3})
    folder, events = tmp_path / "it", Events()
    end: Any = launching._Record.end

    def die(*about: object, **more: object) -> None:
        raise Killed if how == "killed" else KeyboardInterrupt

    def end_unless_killed(self: Any, error: BaseException | None, **more: Any) -> None:
        if not isinstance(error, Killed):  # who is killed writes no status
            end(self, error, **more)

    with monkeypatch.context() as patch:
        patch.setattr(place, die)
        patch.setattr(launching._Record, "end", end_unless_killed)
        with pytest.raises(Killed if how == "killed" else KeyboardInterrupt):
            train_here(recipe, tmp_path, events)
    assert there(folder) == list(FILES[: PLACES[place]])
    assert state_of(folder) == ("running" if how == "killed" else "interrupted")
    assert events.of("finish") == [], "nobody was told that it has finished"

    train_here(recipe, tmp_path, events, resume=True)
    assert there(folder) == list(FILES)
    assert state_of(folder) == "finished"
    assert json.loads((folder / "results.json").read_text())["state"] == "finished"
    assert [event["reason"] for event in events.of("finish")] == ["finished"]


@pytest.mark.usefixtures("quick_pictures")
def test_finished_is_told_when_status_and_report_are_there(tmp_path: Path) -> None:
    seen: list[tuple[str, list[str]]] = []

    def observe(event: str, info: dict[str, Any]) -> None:
        if event == "finish":
            seen.append((state_of(tmp_path / "it"), there(tmp_path / "it")))

    train_here(one_layer_recipe("sft", train={"steps": 1, "lr": 1e-3}), tmp_path, observe)
    assert seen == [("finished", list(FILES))]


@pytest.mark.usefixtures("quick_pictures")
def test_run_that_is_stopped_has_the_same_state_in_its_status_and_its_results(tmp_path: Path) -> None:
    events = Events()
    recipe = one_layer_recipe("sft", train={"steps": 3, "lr": 1e-3})
    train_here(recipe, tmp_path, events, should_stop=lambda: bool(events.of("step")))
    assert state_of(tmp_path / "it") == "stopped"
    assert json.loads((tmp_path / "it" / "results.json").read_text())["state"] == "stopped"
    assert [event["reason"] for event in events.of("finish")] == ["stopped"]


@pytest.mark.slow
def test_trial_that_is_killed_before_its_report_gets_it_from_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(SWEEP)
    Path("killed.py").write_text(KILLED)

    def command(trial: Any, resume: bool) -> list[str]:
        return [sys.executable, "killed.py", *trial.command]

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.api.sweep.run_trials", partial(run_trials, command=command))
        assert main(["sweep", "mine.yaml", "--quiet"]) != 0
    (trial,) = Path("runs/sweep-mine/cells").glob("*-seed0")
    assert there(trial) == list(FILES[:2])
    assert state_of(trial) == "running"
    assert main(["sweep", "mine.yaml", "--quiet"]) == 0
    assert there(trial) == list(FILES)
    assert state_of(trial) == "finished"
