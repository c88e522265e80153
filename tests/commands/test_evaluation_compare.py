"""`posttrain evaluate --compare A B`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.evaluation.plan import EvaluationRequest, choose_common_task, choose_drawing, make_plan
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.sampling.models import ModelSource


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    rows = [{"prompt": f"What is {a} + 1?", "answer": "3" if a % 3 else "2"} for a in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`posttrain evaluate` on twelve sums; every answer is the one given."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, answer: str = "It is 3.") -> int:
        task = ["--task", "jsonl", "--task.path", str(problems), "--task.split", "all", "--template", "plain"]
        engine = ["--engine", "scripted", "--engine.texts", json.dumps([answer]), "--quiet"]
        return main(["evaluate", *arguments, *task, *engine])

    return run


def test_two_folders(evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("tiny", "--out", "a", answer="It is 2.") == 0
    assert evaluate("tiny", "--out", "b", answer="It is 3.") == 0
    assert main(["evaluate", "--compare", "a", "b"]) == 0
    shown = capsys.readouterr().out
    assert "only A right 4 · only B right 8" in shown
    assert "they also differ in engine" in shown
    assert "b is better than a by 33.3 points, which may be chance, [-16.7, 83.3]" in shown
    content = json.loads((tmp_path / "evaluations" / "compare-a-b" / "comparison.json").read_text())
    assert content["n"] == 12
    assert content["table"] == {"both": 0, "only_a": 4, "only_b": 8, "neither": 0}
    assert content["differences"]["accuracy"]["difference"] == approx(1 / 3)
    assert content["mcnemar_p"] == approx(2 * (1 + 12 + 66 + 220 + 495) / 4096)
    assert (len(content["gained"]), len(content["lost"])) == (8, 4)
    assert content["outcome"] in shown
    assert len(content["cautions"]) == 1  # twelve items are few
    assert content["cautions"][0] in shown


def test_two_models_are_measured_alike_first(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "copy")
    task = ["--task", "jsonl", "--task.path", str(problems), "--task.split", "all", "--template", "plain"]
    assert main(["evaluate", "--compare", "tiny", "copy", *task, "--max-tokens", "6"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("│ tiny") == 1
    assert "copy and tiny have equal accuracy, [0.0, 0.0], p = 1, on 12 items" in shown
    folder = tmp_path / "evaluations" / "tiny+copy-jsonl-all-plain"
    assert (folder / "comparison.json").is_file()
    settings = [json.loads((folder / name / "results.json").read_text())["settings"] for name in ("tiny", "copy")]
    assert [s["max_tokens"] for s in settings] == [6, 6]


def test_what_cannot_be_compared(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("tiny", "--out", "a") == 0
    assert evaluate("tiny", "--out", "short", "--max-tokens", "3") == 0
    assert evaluate("tiny", "--out", "few", "--limit", "5") == 0
    for arguments, message in (
        (["a", "short"], "max_tokens"),
        (["a", "few"], "only in A and 0"),
        (["a", "tiny"], "tiny is not"),
        (["a", "short", "few"], "not 3"),
        (["tiny", "nowhere/at/all", "--task", "stories"], "'nowhere/at/all'"),
    ):
        assert main(["evaluate", "--compare", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_runs_of_one_task_are_compared_on_that_of_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    policy, demonstrations = load_recipe("tiny/grpo"), load_recipe("tiny/sft")
    runs = [
        ModelSource(name, name, str(TINY), Path(name), recipe)
        for name, recipe in (("sft", demonstrations), ("grpo", policy))
    ]
    request = EvaluationRequest(runs, choose_drawing(n=5), alike=True)
    trials = make_plan(request).trials
    assert [trial.source.label for trial in trials] == ["sft", "grpo"]
    assert [trial.task_component.options["seed"] for trial in trials] == [2, 2]
    assert trials[0].data == trials[1].data
    apart = make_plan(replace(request, alike=False)).trials
    assert [trial.task_component.options["seed"] for trial in apart] == [1, 2]
    assert choose_common_task([ModelSource("x", "x", "x")]) == [None]
