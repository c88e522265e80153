"""`posttrain pipeline` as it is typed: from nothing to the page, each part by its own command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.cli import main, parse
from posttrain.commands.sweeps.view import command_of, folder_of
from posttrain.models.sources import TINY
from posttrain.reports.sweeps import write_study
from posttrain.sweeps.pipeline import load_pipeline
from posttrain.sweeps.pipeline_results import collect_pipeline
from posttrain.sweeps.plan import Training
from posttrain.sweeps.runner import Outcome

SMALL = """\
description: A small one.
start: {recipe: tiny/sft, task: {size: 40}, data: {batch: 2}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
reward_models:
  proxy: {recipe: tiny/rm, task: {size: 40}, data: {batch: 2}, train: {steps: 1}, eval: {every: 0}}
  judge: {recipe: tiny/rm, task: {size: 40, seed: 9}, data: {batch: 2}, train: {steps: 1}, eval: {every: 0}}
optimize: proxy
judge: judge
policies:
  grpo:
    recipe: rl/grpo
    task: {size: 40}
    rollout: {prompts: 2, group: 2, max_tokens: 8}
    train: {steps: 1, warmup_steps: 0, lr: 1.0e-3}
    eval: {every: 0}
  dpo-files:
    recipe: tiny/rm
    task: {size: 40}
    data: {batch: 2}
    objective: {name: dpo, beta: 0.1}
    head: null
    train: {steps: 1}
    eval: {every: 0}
evaluate: {task: {name: stories, split: validation, size: 40}, n: 5, max_tokens: 12}
seeds: 1
"""


@pytest.mark.usefixtures("quick_stories")
def test_from_nothing_to_the_page_part_by_part(tmp_path: Path) -> None:
    """The parts' own commands, one after another in this process; the runner has tests of its own."""
    (tmp_path / "small.yaml").write_text(SMALL)
    folder = tmp_path / "runs" / "pipeline-small"
    plan = load_pipeline(str(tmp_path / "small.yaml"), folder=folder)
    (folder / "cells").mkdir(parents=True)
    for part in plan.parts:
        path, text = part.settings
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert main(part.words(resume=False)) == 0
        assert part.standing == "finished"
        assert part.conflict() is None
    pipeline = collect_pipeline(plan, Outcome({}, False, 1, 1), "posttrain pipeline small")
    page = write_study(pipeline, folder).read_text()
    results = json.loads((folder / "results.json").read_text())
    assert results["policies"].keys() == {"grpo", "dpo-files"}
    grpo = results["policies"]["grpo"]
    contest = json.loads((folder / "contests" / "grpo-seed0" / "results.json").read_text())
    assert grpo["win_rate"]["mean"] == contest["results"]["win_rate"]
    assert grpo["kl"]["mean"] == contest["results"]["kl_ab"] > 0
    (proxy,) = (own for name, own in contest["others"].items() if name.endswith("proxy-seed0"))
    assert grpo["win_rate_proxy"]["mean"] == proxy["win_rate"]
    assert results["best"].startswith(str(folder / "cells"))
    assert (folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    assert page.count("<details") >= 4
    assert "Policies against one another" in page
    assert len([part for part in plan.parts if isinstance(part, Training)]) == 5


@pytest.mark.slow
def test_the_command_makes_it_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    arguments = ["pipeline", str(tmp_path / "small.yaml"), "--runs-dir", str(tmp_path / "runs"), "--jobs", "2"]
    assert main([*arguments, "--methods", "grpo"]) == 0
    assert "grpo: wins" in capsys.readouterr().out
    folder = tmp_path / "runs" / "pipeline-small"
    before = (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(arguments) == 0
    assert "dpo-files: wins" in capsys.readouterr().out
    assert (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns == before


def test_gpt2_on_human_preferences_is_planned_as_its_file_says() -> None:
    plan = load_pipeline("hh-gpt2", folder="unused")
    runs = {part.name: part.recipe for part in plan.parts if isinstance(part, Training)}
    assert len(plan.parts) == 1 + 3 * (2 + 4 + 4)
    assert [runs[f"{name}-seed0"].task.options["half"] for name in ("proxy", "judge")] == ["first", "second"]
    policies = [runs[f"{name}-seed0"] for name in ("ppo", "grpo", "dpo")]
    assert {recipe.task.options["test_share"] for recipe in policies} == {0.0}  # contests are on the test split
    answers = {
        r.rollout.prompts * r.rollout.group * r.train.steps // r.train.minibatches for r in policies if r.rollout
    }
    assert answers == {25_600}
    assert all(recipe.rewards[0].model_extra["run"].endswith("proxy-seed0") for recipe in policies)
    start = next(part for part in plan.parts if part.name == "start")
    assert all(recipe.model.name == start.weights for name, recipe in runs.items() if name != "start")
    assert [contest.command[contest.command.index("--task.split") + 1] for contest in plan.contests] == ['"test"'] * 12


def write_gpt2(folder: Path) -> None:
    """A random GPT-2 of two small layers, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": len(tokenizer)}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_gpt2_on_human_preferences_on_a_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped file from start to page: a random small GPT-2, 400 dialogues, one step of everything."""
    write_gpt2(tmp_path / "gpt2")
    pairs = [
        {
            "chosen": f"\n\nHuman: {a} and {a + 3}?\n\nAssistant: {2 * a + 3}.",
            "rejected": f"\n\nHuman: {a} and {a + 3}?\n\nAssistant: {a}!",
            "subset": "helpful-base",
        }
        for a in range(400)  # a fiftieth is held out, and each reward model has half of that
    ]
    (tmp_path / "data" / "hh_rlhf").mkdir(parents=True)
    for split in ("train", "test"):
        path = tmp_path / "data" / "hh_rlhf" / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    monkeypatch.setenv("POSTTRAIN_DATA", str(tmp_path / "data"))
    words = ["pipeline", "hh-gpt2", "--runs-dir", str(tmp_path / "runs"), "--seeds", "1", "--jobs", "2"]
    small = {"train.steps": 1, "train.warmup_steps": 0, "eval.every": 0}
    sampled = {"train.minibatches": 1, "rollout.prompts": 2, "rollout.group": 2, "rollout.max_tokens": 6}
    parts = {
        "start": {"model.name": str(tmp_path / "gpt2"), "data.batch": 2, "data.max_tokens": 200},
        "reward_models.proxy": {"data.batch": 2, "data.max_tokens": 200},
        "reward_models.judge": {"data.batch": 2, "data.max_tokens": 200},
        "policies.ppo": sampled | {"rollout.group": 1},
        "policies.grpo": sampled,
        "policies.dpo": sampled,
        "policies.dpo-files": {"data.batch": 2, "data.max_tokens": 200},
    }
    for name, changes in parts.items():
        for key, value in (small | changes).items():
            words += [f"--{name}.{key}", str(value)]
    words += ["--evaluate.n", "4", "--evaluate.max_tokens", "6"]
    assert main(words) == 0, capsys.readouterr().err
    folder = tmp_path / "runs" / "pipeline-hh-gpt2"
    results = json.loads((folder / "results.json").read_text())
    assert results["policies"].keys() == {"ppo", "grpo", "dpo", "dpo-files"}
    assert all(  # one step of 1e-5 moves a policy by less than what float32 rounds
        0 <= policy["win_rate"]["mean"] <= 1 and policy["kl"]["mean"] > -1e-5 for policy in results["policies"].values()
    )
    assert (folder / "report.html").is_file()
    before = (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(words) == 0  # nothing is made again
    assert (folder / "cells" / "grpo-seed0" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["tiny/grpo"], "this is no pipeline (it has no keys 'judge' and 'policies'); run it with: posttrain train"),
        (["study/overoptimization"], "run it with: posttrain study"),
        (["tiny", "--methods", "gropo"], "has no policy 'gropo'. Did you mean 'grpo'?"),
        (["tiny", "--policies.grpo.train.lrr", "1"], "lrr"),
        (["tiny", "--sed", "1"], "sed"),
        (["tiny", "--evaluate.task.splt", "test"], "evaluate.task.splt: task 'stories' has no key 'splt'"),
        (["tiny", "--run", "a/b"], "a run's name is made of letters"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


def test_names_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = parse(["pipeline", "tiny", "--methods", "grpo,dpo", "--seeds", "2"])
    assert folder_of(namespace) == Path("runs/pipeline-tiny")
    assert command_of(namespace) == "posttrain pipeline tiny --methods grpo,dpo --seeds 2"
    assert main(["train", "pipeline/tiny"]) == 2
    assert "is a pipeline of several runs; run it with: posttrain pipeline pipeline/tiny" in capsys.readouterr().err
