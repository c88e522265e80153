"""`posttrain evaluate`: tables, files, going on where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.evaluation.files import read_finished
from posttrain.evaluation.items import read_items


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Six sums with a level each; the answers are 1 to 6."""
    path = tmp_path / "test.jsonl"
    rows = [{"prompt": f"What is {a} + 1?", "answer": str(a + 1), "level": a % 2} for a in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(problems: Path, tmp_path: Path) -> Callable[..., int]:
    """`posttrain evaluate tiny` on the six sums, answered from a script, into ``tmp_path / "out"``."""

    def run(*arguments: str, texts: Sequence[str] = ("The answer is 3.",), models: Sequence[str] = ("tiny",)) -> int:
        task = ["--task", "jsonl", "--task.path", str(problems), "--task.split", "all"]
        engine = ["--engine", "scripted", "--engine.texts", json.dumps(list(texts))]
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        return main(["evaluate", *models, *task, *engine, *out, *arguments])

    return run


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_files_of_one_evaluation(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--template", "plain") == 0
    shown = capsys.readouterr().out
    assert "jsonl/all, n = 6" in shown
    assert "16.7%" in shown
    out = tmp_path / "out"
    assert f"summary, results and every answer: {out}" in shown
    content = read(out / "results.json")
    assert content["evaluation"] == "jsonl/all"
    assert (content["results"]["n"], content["results"]["accuracy"]) == (6.0, approx(1 / 6))
    assert content["settings"]["template"]["name"] == "plain"
    assert content["settings"]["task"]["path"].endswith("test.jsonl")
    assert content["settings"]["max_tokens"] == 256
    assert content["timing"]["generated_tokens"] == sum(s["num_tokens"] for s in _samples(out))
    assert {"python", "torch", "posttrain"} <= set(content["environment"]["versions"])
    items = read_items(out / "items.jsonl")
    assert [item.answer for item in items] == ["1", "2", "3", "4", "5", "6"]
    assert [item.num_correct for item in items] == [0, 0, 1, 0, 0, 0]
    assert items[2].question == "What is 2 + 1?"
    assert [sample["text"] for sample in _samples(out)] == ["The answer is 3."] * 6
    assert sorted(path.name for path in out.iterdir()) == ["items.jsonl", "results.json", "summary.md"]
    assert "# jsonl/all: tiny" in (out / "summary.md").read_text()


def _samples(out: Path) -> list[dict[str, Any]]:
    lines = (out / "items.jsonl").read_text().splitlines()
    return [sample for line in lines for sample in json.loads(line)["samples"]]


def test_evaluation_other_settings_get_a_folder_next_to_it(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "tiny", "--task", "jsonl", "--task.path", str(problems), "--task.split", "all"]
    command += ["--template", "plain"]
    command += ["--engine", "scripted", "--engine.texts", '["3"]']
    for n in ("6", "4", "4", "6"):
        assert main([*command, "--limit", n]) == 0
    shown = [line.rsplit("/")[-1] for line in capsys.readouterr().out.splitlines() if "every answer: " in line]
    first = "tiny-jsonl-all-plain"
    assert shown == [first, f"{first}-2", f"{first}-2", first]
    there = sorted((tmp_path / "evaluations").iterdir())
    assert [(folder.name, read_finished(folder).results["n"]) for folder in there] == [
        ("tiny-jsonl-all-plain", 6.0),
        ("tiny-jsonl-all-plain-2", 4.0),
    ]
    assert len(_samples(there[1])) == 4


def test_a_reward_model_chooses_among_the_samples(
    evaluate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Oracle:
        def score(self, examples: Any, texts: Any, finishes: Any) -> list[float | None]:
            return [float(f" {example.answer}." in text) for example, text in zip(examples, texts, strict=True)]

    request = []
    monkeypatch.chdir(tmp_path)
    Path("the/rm").mkdir(parents=True)
    Path("the/rm/config.json").write_text("{}")
    opened = "posttrain.api.measure.open_reward_model"
    monkeypatch.setattr(opened, lambda source: request.append(source.name) or Oracle())
    assert evaluate(
        "--template", "plain", "--samples", "4", "--best-of", "the/rm", texts=("It is 3.", "It is 2.")
    ) == 0  # fmt: skip
    results = read(tmp_path / "out" / "results.json")["results"]
    assert request == ["the/rm"]
    assert results["best_of@4"] == results["pass@4"] > results["majority@4"]
    assert {sample["score"] for sample in _samples(tmp_path / "out")} == {0.0, 1.0}
    assert read(tmp_path / "out" / "results.json")["settings"]["best_of"] == "the/rm"
