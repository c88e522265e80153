"""`posttrain sweep` as it is typed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.commands.sweeps import read_over
from posttrain.reports.sweep_page import write_sweep
from posttrain.sweeps.plan import Training, load_sweep
from posttrain.sweeps.report import collect_sweep
from posttrain.sweeps.runner import SweepOutcome
from refusing import refuses

EXAMPLE = Path(__file__).parent.parent / "sweeps" / "sweep.yaml"
OVEROPTIMIZATION = """\
description: A small one.
start: {recipe: tiny/sft, task: {size: 40}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
rows:
  proxy:
    task: {name: stories, split: train, seed: 7, size: 40}
    prompt: {template: {name: r1_zero, preamble: ""}}
    rewards: [xml_format]
    rollout: {num_prompts: 8, group_size: 4, max_tokens: 8, select: best_and_worst}
    objective: bradley_terry
    train: {steps: 1}
    eval: {every: 0}
  grpo:
    recipe: rl/grpo
    needs: proxy
    task: {size: 40}
    rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
    train: {steps: 2, warmup_steps: 0, keep_checkpoints: 1}
    eval: {every: 1, num_examples: 3, num_kl_prompts: 3, max_tokens: 8}
best_of_n: {task: {name: stories, split: validation}, n: 3, samples: 4, max_tokens: 8}
seeds: 1
"""
STEPS = """\
start: {recipe: tiny/sft, task: {size: 40, worked: 1.0}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
labelled: {task: {name: stories, split: train, size: 40}, n: 8, samples: 2, max_tokens: 40}
rows:
  orm:
    task: {name: stories, split: train, size: 40}
    prompt: {template: {name: r1_zero, preamble: ""}}
    rollout: {num_prompts: 4, group_size: 2, max_tokens: 8}
    objective: outcome
    train: {steps: 1}
    eval: {every: 0}
  prm:
    needs: labelled
    prompt: {template: {name: r1_zero, preamble: ""}}
    data: {batch_size: 4}
    objective: process
    train: {steps: 1}
    eval: {every: 0}
best_of_n: {task: {name: stories, split: validation}, n: 3, samples: 4, max_tokens: 8}
seeds: 1
"""
RLHF = """\
description: A small one.
start: {recipe: tiny/sft, task: {size: 40}, data: {batch_size: 2}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
rows:
  proxy: {recipe: tiny/rm, task: {size: 40}, data: {batch_size: 2}, train: {steps: 1}, eval: {every: 0}}
  judge: {recipe: tiny/rm, task: {size: 40, seed: 9}, data: {batch_size: 2}, train: {steps: 1}, eval: {every: 0}}
  grpo:
    recipe: rl/grpo
    needs: proxy
    task: {size: 40}
    rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
    train: {steps: 1, warmup_steps: 0, lr: 1.0e-3}
    eval: {every: 0}
  dpo-files:
    recipe: tiny/rm
    task: {size: 40}
    data: {batch_size: 2}
    objective: {name: dpo, beta: 0.1}
    head: null
    train: {steps: 1}
    eval: {every: 0}
head_to_head: {judge: judge, task: {name: stories, split: validation, size: 40}, n: 5, max_tokens: 12}
seeds: 1
"""


def run_here(command: Sequence[str], log: Path, *rest: object) -> SimpleNamespace:
    """Run a trial's command in this process; the next test has a process of its own."""
    with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
        code = main([*command[3:]])
    return SimpleNamespace(poll=lambda: code, started=0.0)


def test_a_sweep_from_start_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.sweeps.runner.start_child", run_here)
    monkeypatch.setattr("posttrain.sweeps.runner.end_children", list)
    monkeypatch.setattr("posttrain.reports.summary.write_summary", lambda folder: folder)  # pictures take long
    runs = str(tmp_path / "runs")
    arguments = ["sweep", str(EXAMPLE), "--runs-dir", runs, "--rows", "wide", "--seeds", "1", "--jobs", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "sweep"
    assert "start: finished in" in out
    assert "(0 left)" in out
    results = json.loads((folder / "results.json").read_text())
    trial = results["rows"]["wide"]["trials"][0]
    assert (trial["state"], trial["step"], [p["step"] for p in trial["points"]]) == ("finished", 2, [0, 1, 2])
    assert results["differences"] == [
        "wide (tiny/grpo with overrides) differs from the base in: train.lr = 0.0002 (base: 0.0001)"
    ]
    assert results["start"]["label"] == "tiny/sft with overrides"
    assert results["command"].startswith("posttrain sweep ")
    # the trial began with the last weights of the start, and is an ordinary run
    recipe = (folder / "cells" / "wide-seed0" / "recipe.yaml").read_text()
    assert f"name: {folder / 'start' / 'checkpoints' / 'step-000002'}" in recipe
    environment = json.loads((folder / "cells" / "wide-seed0" / "env.json").read_text())
    plan = load_sweep(str(EXAMPLE), folder=folder, rows=["wide"], num_seeds=1)
    assert environment["starts"][0]["fingerprint"] == plan.trainings[0].recipe.fingerprint()
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert "| wide | 1 |" in (folder / "table.md").read_text()
    assert "<svg viewBox=" in (folder / "report.html").read_text()
    # the same command again trains nothing
    before = (folder / "cells" / "wide-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == f"sweep: {folder}\n"
    assert main([*arguments, "--quiet", "--format", "json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in tables[0]["rows"]] == ["wide", "start"]
    assert (folder / "cells" / "wide-seed0" / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_failed_trial_ends_in_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("start:", "#").replace("objective: reinforce", "model: {name: no/such/model}")
    (tmp_path / "mine.yaml").write_text(text.replace("advantage: centered", "objective: reinforce"))
    arguments = ["sweep", str(tmp_path / "mine.yaml"), "--rows", "plain", "--seeds", "1"]
    assert main([*arguments, "--runs-dir", str(tmp_path / "runs"), "--run", "bad"]) == 1
    out = capsys.readouterr().out
    assert "plain-seed0: failed: the process exited" in out
    assert "there is no folder 'no/such/model'" in " ".join(out.split())
    assert "failed" in (tmp_path / "runs" / "bad" / "table.md").read_text()
    assert not (tmp_path / "runs" / "bad" / "sweep.png").exists()


@pytest.mark.slow
def test_over_optimization_from_start_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(OVEROPTIMIZATION)
    assert main(["sweep", str(tmp_path / "small.yaml"), "--runs-dir", str(tmp_path / "runs"), "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "sweep-small"
    assert "grpo-seed0: finished in" in out
    assert "(0 left)" in out
    assert "grpo: a single seed" in out or "grpo: no over-optimization" in out
    data = json.loads((folder / "results.json").read_text())
    grpo = data["methods"]["grpo"]["curves"]["0"]
    assert [point["at"] for point in grpo] == [0, 1, 2]
    assert grpo[0]["kl"] == 0.0
    assert grpo[2]["kl"] > 0
    best = data["methods"]["best of n"]["curves"]["0"]
    assert [p["at"] for p in best] == [1, 2, 4]
    assert best[0]["proxy"] == approx(0.0, abs=1e-9)
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_steps_are_labelled_and_both_reward_models_choose_among_the_same_answers(tmp_path: Path) -> None:
    (tmp_path / "steps.yaml").write_text(STEPS)
    assert main(["sweep", str(tmp_path / "steps.yaml"), "--runs-dir", str(tmp_path / "runs"), "--quiet"]) == 0
    folder = tmp_path / "runs" / "sweep-steps"
    rows = [json.loads(line) for line in (folder / "labelled" / "seed0.jsonl").read_text().splitlines()]
    assert rows
    assert all(len(row["completions"]) == len(row["labels"]) for row in rows)
    data = json.loads((folder / "results.json").read_text())
    assert list(data["chosen_by"]) == ["orm", "prm", "majority", "random pick", "oracle"]
    assert data["chosen_by"]["orm"]["1"]["mean"] == data["chosen_by"]["random pick"]["1"]["mean"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_stories")
def test_the_whole_of_rlhf_trial_by_trial(tmp_path: Path) -> None:
    """The trials' own commands, one after another in this process; the runner has tests of its own."""
    (tmp_path / "small.yaml").write_text(RLHF)
    folder = tmp_path / "runs" / "sweep-small"
    plan = load_sweep(str(tmp_path / "small.yaml"), folder=folder)
    (folder / "cells").mkdir(parents=True)
    for trial in plan.trials:
        path, text = trial.settings
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert main(list(trial.command)) == 0
        assert trial.state == "finished"
        assert trial.conflict() is None
    page = write_sweep(collect_sweep(plan, SweepOutcome(), "posttrain sweep small"), folder).read_text()
    results = json.loads((folder / "results.json").read_text())
    assert results["policies"].keys() == {"grpo", "dpo-files"}
    grpo = results["policies"]["grpo"]
    written = json.loads((folder / "head_to_head" / "grpo-seed0" / "results.json").read_text())
    assert grpo["win_rate"]["mean"] == written["results"]["win_rate"]
    assert grpo["kl"]["mean"] == written["results"]["kl_ab"] > 0
    (proxy,) = (own for name, own in written["others"].items() if name.endswith("proxy-seed0"))
    assert grpo["win_rate_proxy"]["mean"] == proxy["win_rate"]
    assert results["best"].startswith(str(folder / "cells"))
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert "Policies against the start" in page
    assert len([trial for trial in plan.trials if isinstance(trial, Training)]) == 5


def test_a_dry_run_prints_a_file_that_makes_the_same_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "x"
    runs = ["--runs-dir", str(tmp_path / "runs"), "--run", "x"]
    assert main(["sweep", str(EXAMPLE), *runs, "--dry-run", "--train.lr", "0.5", "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "seeds 0 to 1" in printed
    (tmp_path / "again.yaml").write_text(printed)
    again = load_sweep(str(tmp_path / "again.yaml"), folder=folder)
    wanted = load_sweep(str(EXAMPLE), [("train.lr", "0.5")], folder=folder, num_seeds=2)
    assert again.to_yaml() == wanted.to_yaml()
    assert {trial.recipe.train.lr for trial in again.trainings} == {0.5}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        ([str(EXAMPLE), "--rows", "grpo,wyde"], "'wyde'"),
        ([str(EXAMPLE), "--rwos", "a"], "base: command line"),
        (["overoptimization", "--best_of_n.task", "nowhere"], "best_of_n.task"),
        (["tiny", "--methods", "grpo"], "methods"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.lr=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("""x.y='a,b',"c,d" """, ["'a,b'", '"c,d"']),
        ("x.y=[1,2],[3]", ["[1,2]", "[3]"]),
        ("x.y={a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
    ],
)
def test_read_over_commas_in_quotes_and_brackets_part_nothing(text: str, values: list[str]) -> None:
    assert read_over(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize("text", ["train.lr=1e-4", "=1,2", "train.lr", "x.y='a,b'"])
def test_read_over_without_two_values_is_refused(text: str) -> None:
    with refuses(argparse.ArgumentTypeError, "or more values"):
        read_over(text)
