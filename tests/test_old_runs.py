"""A run that version 0.2.0 stored: listed, shown, compared, resumed, evaluated, and read in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from closeness import approx
from old_runs import UNTIL_STEP_4, copy_old_run
from posttrain.cli import main
from posttrain.recipes.older import OLDER_RECIPES, Older
from posttrain.recipes.recipe import Recipe
from posttrain.store.checkpoint_files import FORMAT, MANIFEST, seal
from posttrain.store.metrics import MetricsLog
from posttrain.strict_yaml import read_yaml, write_yaml
from small_runs import recorded
from store.test_schema import CHANGES, run_sql

Change = Callable[[Any], None]


def change_json(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_recipe(folder: Path, change: Change) -> None:
    """Change the stored recipe, and what the checkpoint keeps of it."""
    path = folder / "recipe.yaml"
    recipe, _ = read_yaml(path.read_text(), path.name)
    change(recipe)
    path.write_text(write_yaml(recipe))
    change_state(folder, lambda state: change(state["settings"]))


def change_state(folder: Path, change: Change) -> None:
    checkpoint = folder / "checkpoints/step-000002"
    change_json(checkpoint / "state.json", change)
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint, 2)


def add_unknown_keys(folder: Path) -> None:
    """Write what a later version of the same formats may write, into every file."""
    change_state(folder, lambda state: state.update({"later": {"deep": [1]}, "another": None}))
    change_json(folder / "status.json", lambda status: status.update({"later": [1, 2]}))
    change_json(folder / "env.json", lambda content: content.update({"later": "text"}))
    change_json(folder / "evaluation/stories-test/results.json", lambda content: content.update({"later": 1}))
    manifest = folder / "checkpoints/step-000002" / MANIFEST
    content = json.loads(manifest.read_text()) | {"later": "text"}
    manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = "made_up/later" if "loss" in row["metrics"] else "eval/stories/validation/later"
        row["metrics"][name] = 1.5
        lines.append(json.dumps(row | {"later": {"a": 1}}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    items = folder / "evaluation/stories-test/items.jsonl"
    rows = [json.loads(line) for line in items.read_text().splitlines()]
    items.write_text("".join(json.dumps(row | {"later": 1}) + "\n" for row in rows))


def remove_state_keys(folder: Path) -> None:
    """Leave in the checkpoint's state what a version without the later keys would have written."""

    def remove(state: dict[str, Any]) -> None:
        for key in set(state) - {"settings", "best", "evaluations"}:
            del state[key]

    change_state(folder, remove)


def resumed_steps(folder: Path) -> list[dict[str, float]]:
    return [
        row.metrics for row in MetricsLog(folder / "metrics.jsonl").read() if row.step > 2 and "loss" in row.metrics
    ]


def resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.reports.summary.write_summary", lambda folder: folder)  # pictures take long
    where = ["--runs-dir", str(folder.parent)]
    assert main(["runs", "resume", folder.name, *where, "--steps", "4", "--quiet"]) == 0


def check_as_trained(folder: Path) -> None:
    """Steps 3 and 4 are what version 0.2.0 computed, as far as it recorded it."""
    expected = [row.metrics for row in MetricsLog(UNTIL_STEP_4).read() if row.step > 2 and "loss" in row.metrics]
    steps = resumed_steps(folder)
    assert len(steps) == len(expected) == 2
    for step, before in zip(steps, expected, strict=True):
        assert {name: step[name] for name in before} == approx(before, rel=1e-3, abs=1e-6)
    assert [rollout.step for rollout in recorded(folder)[0]] == [step for step in (1, 2, 3, 4) for _ in range(16)]


@pytest.mark.parametrize("change", ["nothing", "unknown keys", *list(CHANGES)[1:3]])
def test_run_of_an_earlier_version_is_listed_shown_compared_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    folder, other = copy_old_run(tmp_path), copy_old_run(tmp_path, "other")
    if change == "unknown keys":
        add_unknown_keys(folder)
    else:
        run_sql(folder / "rollouts.db", CHANGES.get(change, ""))
    where = ["--runs-dir", str(tmp_path), "--json"]
    assert main(["runs", "list", *where]) == 0
    listed = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert (listed["old"]["state"], listed["old"]["step"], listed["old"]["problem"]) == ("finished", 2, None)
    assert main(["runs", "show", "old", *where]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["problem"], shown["rollouts"]) == ("finished", None, {"1": 16, "2": 16})
    assert [point["step"] for point in shown["evaluations"]] == [0, 2]
    assert [(one["step"], one["best"]) for one in shown["checkpoints"]] == [(2, True)]
    assert main(["runs", "compare", "old", "other", *where]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == {}
    run = pt.load_run("old", runs_dir=tmp_path)
    assert (run.status.state, len(run.metrics), len(run.rollouts(step=2))) == ("finished", 2, 16)
    assert run.metrics[1]["loss"] == approx(0.006459966767579317, rel=1e-9)
    assert run.recipe == pt.load_run(other).recipe
    assert run.checkpoint("best").resolve() == (folder / "checkpoints/step-000002").resolve()


def test_run_of_an_earlier_version_resumes_as_that_version_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_old_run(tmp_path)
    resume(folder, monkeypatch)
    check_as_trained(folder)


def test_run_with_more_and_fewer_keys_and_columns_resumes_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that came since had other defaults then, keys that are gone did what is done now, and one has a new name."""
    folder = copy_old_run(tmp_path)

    def change(recipe: dict[str, Any]) -> None:
        del recipe["train"]["lr"]
        del recipe["objective"]["clip_low"]
        recipe["train"]["gone"] = False
        recipe["rollout"]["engine"]["gone"] = "off"
        recipe["task"]["most_value"] = recipe["task"].pop("max_value")

    change_recipe(folder, change)
    remove_state_keys(folder)
    add_unknown_keys(folder)
    for script in list(CHANGES.values())[1:3]:
        run_sql(folder / "rollouts.db", script)
    differences = Older(
        sections=OLDER_RECIPES.sections,
        added={"train.lr": 1e-3, "grpo.clip_low": 0.2},
        removed={"train.gone": False, "native.gone": "off"},
        renamed={"stories.most_value": "max_value"},
    )
    monkeypatch.setattr(Recipe, "older", differences)
    resume(folder, monkeypatch)
    check_as_trained(folder)
    assert [step["lr"] for step in resumed_steps(folder)] == [1e-3, 1e-3]
    stored = pt.load_run(folder).recipe
    assert (stored["train"]["lr"], "gone" in stored["train"], stored["task"]["max_value"]) == (1e-3, False, 99)


def test_evaluation_of_an_earlier_version_is_compared_and_its_model_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = copy_old_run(tmp_path), copy_old_run(tmp_path, "other")
    add_unknown_keys(folder)
    both = [str(run / "evaluation/stories-test") for run in (folder, other)]
    assert main(["evaluate", "--compare", *both, "--json", "--quiet", "--out", str(tmp_path / "compared")]) == 0
    again = ["evaluate", str(folder), "--limit", "3", "--max-tokens", "8", "--quiet", "--out", str(tmp_path / "again")]
    assert main(again) == 0
    before = json.loads((other / "evaluation/stories-test/results.json").read_text())["results"]
    now = json.loads((tmp_path / "again/results.json").read_text())["results"]
    assert {name: now[name] for name in before if name != "seconds"} == {
        name: value for name, value in before.items() if name != "seconds"
    }
    capsys.readouterr()


def test_report_of_a_run_of_an_earlier_version_is_written(tmp_path: Path) -> None:
    page = pt.load_run(copy_old_run(tmp_path)).report
    assert "A small run of version 0.2.0" in page.read_text()


def write_later_recipe(folder: Path) -> None:
    change_recipe(folder, lambda recipe: recipe["train"].update(made_up=1))
    change_json(folder / "env.json", lambda content: content["starts"][-1]["versions"].update(posttrain="0.9.1"))


LATER: dict[str, Callable[[Path], None]] = {
    "rollouts.db": lambda folder: run_sql(folder / "rollouts.db", "PRAGMA user_version = 12;"),
    "manifest.json": lambda folder: write_later_manifest(folder),
    "train.made_up": write_later_recipe,
}


def write_later_manifest(folder: Path) -> None:
    path = folder / "checkpoints/step-000002" / MANIFEST
    content = json.loads(path.read_text()) | {"format": FORMAT + 8}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("what", LATER)
def test_run_of_a_later_version_is_refused_by_name(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_old_run(tmp_path)
    LATER[what](folder)
    kept = [*(folder / "checkpoints/step-000002").iterdir()]
    if what == "rollouts.db":
        kept.append(folder / what)
    before = {path: path.read_bytes() for path in kept}
    where = ["--runs-dir", str(tmp_path)]
    assert main(["runs", "list", *where]) == 0
    capsys.readouterr()
    assert main(["runs", "resume", "old", *where, "--steps", "4", "--quiet"]) in (1, 2)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert what in last
    assert {"rollouts.db": "12", "manifest.json": f"{FORMAT + 8}", "train.made_up": "0.9.1"}[what] in last
    assert {path: path.read_bytes() for path in before} == before
