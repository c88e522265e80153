"""Bad input, as a user meets it: one message with place, cause and remedy, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main

RECIPE = """\
model: {{name: tiny}}
task: {task}
prompt: {{template: {{name: r1_zero, preamble: ""}}, max_prompt_tokens: {limit}}}
rewards: [{reward}]
rollout: {{prompts: 2, group: 2, max_tokens: 6}}
objective: grpo
train: {{steps: 3, lr: 1.0e-4, save_every: 1}}
"""
STORIES = "{name: stories, size: 20, max_steps: 1}"


def write_recipe(folder: Path, *, task: str = STORIES, limit: str = "null", reward: str = "correct") -> str:
    path = folder / "mine.yaml"
    path.write_text(RECIPE.format(task=task, limit=limit, reward=reward))
    return str(path)


def train(recipe: str, folder: Path, *more: str) -> int:
    name = [] if "--run" in more else ["--run", "run"]
    return main(["train", recipe, "--runs-dir", str(folder / "runs"), *name, *more])


def write_rows(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{{name: jsonl, path: {json.dumps(str(path))}, validation_share: 0}}"


def test_an_empty_prompt_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write_rows(tmp_path, {"prompt": "What is 1 + 1?", "answer": "2"}, {"prompt": " ", "answer": "3"})
    assert train(write_recipe(tmp_path, task=task), tmp_path) == 2
    assert "rows.jsonl:2:" in capsys.readouterr().err


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "Count: " + "one more. " * 200, "answer": "200"}
    task = write_rows(tmp_path, {"prompt": "What is 1 + 1?", "answer": "2"}, long, long)
    assert train(write_recipe(tmp_path, task=task, limit="60"), tmp_path) == 0
    assert "1 examples; dropped: 2 prompt longer than 60 tokens" in capsys.readouterr().out
    assert train(write_recipe(tmp_path, task=task, limit="3"), tmp_path, "--run", "none") == 2
    assert "no prompt is left" in capsys.readouterr().err
