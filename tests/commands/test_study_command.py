"""`posttrain study` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.cli import main, parse
from posttrain.commands.sweeps.view import SweepProgress, command_of, folder_of
from posttrain.sweeps.study import load_study

SMALL = """\
study: overoptimization
description: A small one.
start: {recipe: tiny/sft, task: {size: 40}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
reward_models:
  proxy:
    task: {name: stories, split: train, seed: 7, size: 40}
    prompt: {template: {name: r1_zero, preamble: ""}}
    rewards: [xml_format]
    rollout: {prompts: 8, group: 4, max_tokens: 8, select: best_and_worst}
    objective: bradley_terry
    train: {steps: 1}
    eval: {every: 0}
policies:
  grpo:
    recipe: rl/grpo
    task: {size: 40}
    rollout: {prompts: 2, group: 2, max_tokens: 8}
    train: {steps: 2, warmup_steps: 0, keep: 1}
    eval: {every: 1, n: 3, drift_prompts: 3, max_tokens: 8}
best_of_n: {task: {name: stories, split: validation}, n: 3, samples: 4, max_tokens: 8}
seeds: 1
"""
STEPS = """\
study: best_of_n
start: {recipe: tiny/sft, task: {size: 40, worked: 1.0}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
labelled: {task: {name: stories, split: train, size: 40}, n: 8, samples: 2, max_tokens: 40}
reward_models:
  orm:
    task: {name: stories, split: train, size: 40}
    prompt: {template: {name: r1_zero, preamble: ""}}
    rollout: {prompts: 4, group: 2, max_tokens: 8}
    objective: outcome
    train: {steps: 1}
    eval: {every: 0}
  prm:
    prompt: {template: {name: r1_zero, preamble: ""}}
    data: {batch: 4}
    objective: process
    train: {steps: 1}
    eval: {every: 0}
best_of_n: {task: {name: stories, split: validation}, n: 3, samples: 4, max_tokens: 8}
seeds: 1
"""


@pytest.mark.slow
def test_a_study_from_start_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    arguments = ["study", str(tmp_path / "small.yaml"), "--runs-dir", str(tmp_path / "runs"), "--jobs", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "study-small"
    assert "grpo-seed0: finished in" in out
    assert "(4 of 4)" in out
    assert "grpo: one seed tells a course" in out or "grpo: no over-optimization" in out
    data = json.loads((folder / "results.json").read_text())
    grpo = data["methods"]["grpo"]["seeds"]["0"]
    assert [point["at"] for point in grpo] == [0, 1, 2]
    assert (grpo[0]["kl"], grpo[0]["distance"]) == (0.0, 0.0)
    assert grpo[2]["kl"] > 0
    assert [p["at"] for p in data["methods"]["best of n"]["seeds"]["0"]] == [1, 2, 4]
    assert data["methods"]["best of n"]["seeds"]["0"][0]["proxy"] == pytest.approx(0.0, abs=1e-9)
    assert (folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    # the same command again does nothing but write the report
    before = (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == f"study:   {folder}\n"
    assert (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_steps_are_labelled_and_both_reward_models_choose_among_the_same_answers(tmp_path: Path) -> None:
    (tmp_path / "steps.yaml").write_text(STEPS)
    assert main(["study", str(tmp_path / "steps.yaml"), "--runs-dir", str(tmp_path / "runs"), "--quiet"]) == 0
    folder = tmp_path / "runs" / "study-steps"
    rows = [json.loads(line) for line in (folder / "labelled" / "seed0.jsonl").read_text().splitlines()]
    assert rows
    assert all(len(row["completions"]) == len(row["labels"]) for row in rows)
    data = json.loads((folder / "results.json").read_text())
    assert list(data["chosen_by"]) == ["orm", "prm", "majority", "random pick", "oracle"]
    assert data["chosen_by"]["orm"]["1"]["mean"] == data["chosen_by"]["random pick"]["1"]["mean"]


def test_a_dry_run_prints_a_file_that_makes_the_same_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("small", SMALL), ("steps", STEPS)):
        (tmp_path / "given.yaml").write_text(text)
        runs = ["--runs-dir", str(tmp_path / "runs"), "--run", name]
        assert main(["study", str(tmp_path / "given.yaml"), *runs, "--dry-run", "--seeds", "2"]) == 0
        printed = capsys.readouterr().out
        assert "seeds 0 to 1" in printed
        (tmp_path / "again.yaml").write_text(printed)
        folder = tmp_path / "runs" / name
        wanted = load_study(str(tmp_path / "given.yaml"), folder=folder, num_seeds=2)
        again = load_study(str(tmp_path / "again.yaml"), folder=folder)
        assert again.to_yaml() == wanted.to_yaml()
        assert [part.name for part in again.parts] == [part.name for part in wanted.parts]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["tiny/grpo"], "this is no study (it has no key 'study'); run it with: posttrain train"),
        (["compare/ppo-grpo-dpo"], "run it with: posttrain compare"),
        (["overoptimization", "--sed", "1"], "a study has no key 'sed'"),
        (["overoptimization", "--policies.grpo.train.lrr", "1"], "lrr"),
        (["overoptimization", "--best_of_n.task", "nowhere"], "best_of_n.task: there is no task named 'nowhere'"),
        (["prm-vs-orm", "--labelled.task.splt", "train"], "labelled.task.splt: task 'stories' has no key"),
        (["overoptimization", f"--policies.{'x' * 3000}.a", "1"], "xxx...: there is no such key"),
        (["overoptimization", "--run", "a/b"], "a run's name is made of letters"),
        (["overoptimisation"], "Did you mean"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


def test_names_and_commands() -> None:
    namespace = parse(["study", "overoptimization", "--seeds", "2", "--policies.grpo.train.steps", "9", "--jobs", "1"])
    assert folder_of(namespace) == Path("runs/study-overoptimization")
    assert command_of(namespace) == "posttrain study overoptimization --seeds 2 --jobs 1 --policies.grpo.train.steps 9"
    assert folder_of(parse(["study", "study/prm-vs-orm"])) == Path("runs/study-prm-vs-orm")


def test_progress_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = load_study("overoptimization", folder="runs/x").trainings("policies")[0]
    view = SweepProgress(Console(highlight=False, width=200), False, "parts")
    view("plan", {"num_parts": 13, "num_finished": 2, "num_jobs": 2, "num_threads": 1})
    view("begin", {"part": part, "resumed": True})
    view("progress", {"lines": ["a at step 1/2", "b samples and scores"]})
    view("end", {"part": part, "seconds": 65.0, "told": "", "remaining": None})
    view("failure", {"part": part, "message": "too hot", "log": "a.log"})
    view("dropped", {"part": part, "message": "not begun"})
    assert capsys.readouterr().out.splitlines() == [
        "13 parts, 2 at a time, 1 thread each; 2 finished already",
        "grpo-seed0: goes on",
        "a at step 1/2; b samples and scores",
        "grpo-seed0: finished in 1m 05s (3 of 13)",
        "grpo-seed0: failed: too hot (a.log)",
        "grpo-seed0: not begun",
    ]
    SweepProgress(Console(), True, "parts")("begin", {"part": part, "resumed": False})
    assert capsys.readouterr().out == ""
