"""`posttrain pipeline` as it is typed: from nothing to the page, each part by its own command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main, parse
from posttrain.commands.sweep_view import command_of, folder_of
from posttrain.reports.study import write_study
from posttrain.sweeps.pipelines.plan import load_pipeline
from posttrain.sweeps.pipelines.results import collect_pipeline
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
