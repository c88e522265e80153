"""`posttrain compare` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.cli import main, parse
from posttrain.commands.sweeps.view import SweepProgress
from posttrain.sweeps.compare import load_comparison

EXAMPLE = Path(__file__).parent.parent / "sweeps" / "comparison.yaml"


def test_a_comparison_from_start_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(tmp_path / "runs")
    arguments = ["compare", str(EXAMPLE), "--runs-dir", runs, "--methods", "wide", "--seeds", "1", "--jobs", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "compare-comparison"
    assert "start: finished in" in out
    assert "wide-seed0: step 2/2" in out
    assert "(1 of 1)" in out
    results = json.loads((folder / "results.json").read_text())
    cell = results["methods"]["wide"]["cells"][0]
    assert (cell["state"], cell["step"], [p["step"] for p in cell["curve"]]) == ("finished", 2, [0, 1, 2])
    assert results["differs"] == {"wide": ["train.lr = 0.0002 (base: 0.0001)"]}
    assert results["start"]["label"] == "tiny/sft with overrides"
    assert results["common"]["rollouts"] == "2 prompts × 2 answers of at most 8 tokens, for each step"
    assert results["command"].startswith("posttrain compare ")
    # the cell began with the last weights of the start, and is an ordinary run
    recipe = (folder / "cells" / "wide-seed0" / "recipe.yaml").read_text()
    assert f"name: {folder / 'start' / 'checkpoints' / 'step-000002'}" in recipe
    environment = json.loads((folder / "cells" / "wide-seed0" / "env.json").read_text())
    plan = load_comparison(str(EXAMPLE), folder=folder, methods=["wide"], num_seeds=1)
    assert environment["starts"][0]["fingerprint"] == plan.cells[0].recipe.fingerprint()
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert "| wide | 1 |" in (folder / "table.md").read_text()
    assert "data:image/png;base64," in (folder / "report.html").read_text()
    # the same command again trains nothing
    before = (folder / "cells" / "wide-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == f"comparison: {folder}\n"
    assert main([*arguments, "--quiet", "--format", "json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in tables[0]["rows"]] == ["wide", "start"]
    assert (folder / "cells" / "wide-seed0" / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_failed_cell_ends_in_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("start:", "#").replace("objective: reinforce", "model: {name: no/such/model}")
    (tmp_path / "mine.yaml").write_text(text.replace("advantage: centered", "objective: reinforce"))
    arguments = ["compare", str(tmp_path / "mine.yaml"), "--methods", "plain", "--seeds", "1"]
    assert main([*arguments, "--runs-dir", str(tmp_path / "runs"), "--run", "bad"]) == 1
    out = capsys.readouterr().out
    assert "plain-seed0: failed: model.name: there is no folder 'no/such/model'" in out
    assert "plain, seed 0: failed after 0 steps" in " ".join(out.split())
    assert "failed" in (tmp_path / "runs" / "bad" / "table.md").read_text()
    assert not (tmp_path / "runs" / "bad" / "comparison.png").exists()


def test_a_dry_run_prints_a_file_that_makes_the_same_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs-dir", str(tmp_path / "runs"), "--run", "x"]
    assert main(["compare", str(EXAMPLE), *runs, "--dry-run", "--train.lr", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "# wide (tiny/grpo with overrides) differs from the base in train.lr" in printed
    (tmp_path / "again.yaml").write_text(printed)
    plan = load_comparison(str(tmp_path / "again.yaml"), folder=tmp_path / "runs" / "x")
    wanted = load_comparison(str(EXAMPLE), [("train.lr", "0.5")], folder=tmp_path / "runs" / "x")
    assert [c.recipe.fingerprint() for c in plan.cells] == [c.recipe.fingerprint() for c in wanted.cells]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["tiny/grpo"], "this is a recipe of one run; train it with: posttrain train"),
        ([str(EXAMPLE), "--methods", "grpo,wyde"], "has no method 'wyde'. Did you mean 'wide'?"),
        ([str(EXAMPLE), "--train.lrr", "1"], "base: command line: train.lrr"),
        ([str(EXAMPLE), "--run", "a/b"], "a run's name is made of letters"),
        ([str(EXAMPLE), "--methds", "a"], "base: command line: methds: a recipe has no key 'methds'"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


def test_options_are_told_from_overrides() -> None:
    words = ["compare", "x", "--methods", "a, b", "--methods.a.train.lr", "1e-4", "--seeds", "2", "--train.steps=5"]
    namespace = parse(words)
    assert (namespace.methods, namespace.seeds, namespace.jobs) == (["a", "b"], 2, None)
    assert namespace.overrides == [("methods.a.train.lr", "1e-4"), ("train.steps", "5")]


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    cell = load_comparison(str(EXAMPLE), folder="runs/x").cells[0]
    view = SweepProgress(Console(highlight=False, width=200), False, "runs")
    view("plan", {"num_parts": 6, "num_finished": 2, "num_jobs": 2, "num_threads": 1})
    view("begin", {"part": cell, "resumed": True})
    view("evaluation", {"part": cell, "step": 1, "told": "25.0% right", "remaining": 130.0})
    view("end", {"part": cell, "seconds": 65.0, "told": "50.0% right", "remaining": None})
    view("failure", {"part": cell, "message": "too hot", "log": "a.log"})
    view("stop", {"num_working": 1})
    view("stop", {"num_working": 2})
    assert capsys.readouterr().out.splitlines() == [
        "6 runs, 2 at a time, 1 thread each; 2 finished already",
        "grpo-seed0: goes on",
        "grpo-seed0: step 1/2, 25.0% right; 2m 10s left",
        "grpo-seed0: finished in 1m 05s, 50.0% right (3 of 6)",
        "grpo-seed0: failed: too hot (a.log)",
        "1 run at work",
        "2 runs at work",
    ]


def test_only_failures_are_shown_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    cell = load_comparison(str(EXAMPLE), folder="runs/x").cells[0]
    view = SweepProgress(Console(highlight=False, width=200), True, "runs")
    view("plan", {"num_parts": 6, "num_finished": 0, "num_jobs": 2, "num_threads": 1})
    view("begin", {"part": cell, "resumed": False})
    view("failure", {"part": cell, "message": "too hot", "log": "a.log"})
    assert capsys.readouterr().out == "grpo-seed0: failed: too hot (a.log)\n"
