"""Bad input, as a user meets it: one message with place, cause and remedy, and the right exit code."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gold')", "KeyError"),
        ("return float('nan')", "nan"),
        ("return 'good'", "good"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_example(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"reward_{abs(hash(body))}"
    (tmp_path / f"{module}.py").write_text(f"def broken(text):\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert train(write_recipe(tmp_path, reward=f"'{module}:broken'"), tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("posttrain: ")
    assert message in error
    assert "broken" in error
    assert "stories/train/" in error
    assert json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["state"] == "failed"


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


def test_a_flipped_byte_is_noticed_and_the_checkpoint_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    assert train(recipe, tmp_path) == 0
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    flip_a_byte(checkpoints / "step-000003" / "model.safetensors")
    capsys.readouterr()
    assert train(recipe, tmp_path, "--resume") == 0
    shown = capsys.readouterr().out
    assert "step-000003" in shown
    assert "resumed after step 2" in shown
    for path in checkpoints.glob("step-*/model.safetensors"):
        flip_a_byte(path)
    assert train(recipe, tmp_path, "--resume") == 1
    error = capsys.readouterr().err
    assert "step-000003" in error
    assert "step-000002" in error
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000002", "step-000003"]


def test_a_full_disk_is_one_message_and_nothing_is_half_written(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    code = "import sys; from posttrain.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", recipe, "--runs-dir", str(tmp_path / "runs"), "--run", "run"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),  # no file above 1 MiB
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "the disk is full" in done.stderr
    assert "--resume" in done.stderr
    run = tmp_path / "runs" / "run"
    assert list((run / "checkpoints").glob("step-*")) == []
    assert json.loads((run / "status.json").read_text())["state"] == "failed"


def test_an_unreadable_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert train(str(path), tmp_path) == 2
    assert f"{path}: not a text file in UTF-8" in capsys.readouterr().err
    path.write_text("task: [unclosed\n")
    assert train(str(path), tmp_path) == 2
    assert "not valid YAML" in capsys.readouterr().err
