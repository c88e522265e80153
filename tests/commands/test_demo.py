"""The demo's story, told with two steps of training each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.cli import build_parser, main
from posttrain.commands import demo
from posttrain.commands.demo import STORIES
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.runs.directory import RunDirectory
from small_gguf import write_gguf

LITTLE = [("train.steps", "2"), ("eval.num_examples", "4"), ("eval.every", "2")]
SIXTY, SIXTY_EACH = [("task.size", "60")], [(f"task.parts.{i}.task.size", "60") for i in (0, 1)]
FEW = [
    ("rollout.num_prompts", "2"),
    ("rollout.group_size", "2"),
    ("rollout.max_tokens", "6"),
    ("rollout.max_turn_tokens", "4"),
]
SMALL = {
    "smollm2/grpo-sums": [
        *LITTLE,
        ("rollout.num_prompts", "2"),
        ("rollout.group_size", "2"),
        ("rollout.max_tokens", "6"),
    ],
    "tiny/sft-calculator": [("train.steps", "2"), *SIXTY_EACH],
    "tiny/grpo-calculator": [*LITTLE, *SIXTY_EACH, *FEW],
    "tiny/sft": [*LITTLE, *SIXTY, ("eval.max_tokens", "6")],
    "tiny/grpo-demo": [
        *LITTLE,
        *SIXTY,
        ("rollout.num_prompts", "2"),
        ("rollout.group_size", "2"),
        ("rollout.max_tokens", "6"),
    ],
}

REASONING = STORIES["reasoning"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_small(name: str, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
        return load_recipe(name, [*SMALL[name], *overrides])

    monkeypatch.setattr(demo, "load_recipe", load_small)
    monkeypatch.setattr(demo, "NUM_HELD_OUT", 5)


@pytest.mark.usefixtures("small", "no_curves")
def test_the_story_is_rendered_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--runs-dir", str(tmp_path), "--seed", "3", "--quiet"]) == 0
    shown = capsys.readouterr().out
    order = ["1. The base", "base: ", "2. Demonstrations", "after SFT: ", "3. Reinforcement", "after GRPO: ", "4. "]
    places = [shown.index(text) for text in order]
    assert places == sorted(places)
    assert shown.rstrip().endswith(f"posttrain generate {tmp_path / 'demo-grpo'}")
    info = json.loads((tmp_path / "demo-grpo" / "demo.json").read_text())
    assert (info["seed"], info["evaluation"]) == (3, "stories/test")
    assert list(info["results"]) == ["base", "after SFT", "after GRPO"]
    assert all(results["n"] == 5.0 for results in info["results"].values())
    report = (tmp_path / "demo-grpo" / "report.html").read_text()
    assert "5 problems of the test split (task.seed 2)" in report  # not the run's seed, which is 3
    assert "The same problems (task.seed 2), held out from training." in shown
    assert report.count('class="card transcript"') == 5
    recipe = RunDirectory(tmp_path / "demo-grpo").read_recipe()
    assert recipe["model"]["name"] == str(tmp_path / "demo-sft")  # GRPO starts from what SFT left
    assert (recipe["train"]["seed"], RunDirectory(tmp_path / "demo-sft").read_recipe()["train"]["seed"]) == (3, 3)
    # the next one has fresh names, unless this one is unfinished and of the same seed
    directory = RunDirectory(tmp_path / "demo-grpo")
    assert demo.plan_demo(tmp_path, 3, REASONING).grpo == tmp_path / "demo-grpo-2"
    status = directory.read_status()
    assert status is not None
    directory.write_status(replace(status, state="interrupted"))
    assert demo.plan_demo(tmp_path, 3, REASONING).grpo == tmp_path / "demo-grpo"
    assert demo.plan_demo(tmp_path, 1, REASONING).grpo == tmp_path / "demo-grpo-2"


def test_the_outcome_follows_the_figures() -> None:
    def figures(accuracy: float, low: float, high: float, worked: float) -> dict[str, float]:
        return {"accuracy": accuracy, "accuracy_low": low, "accuracy_high": high, "shows_reasoning": worked}

    before = figures(0.10, 0.08, 0.13, 0.1)
    assert REASONING.outcome(before, figures(0.97, 0.95, 0.98, 0.99)) == (
        "The model learned to work step by step: right answers went from 10% to 97%, "
        "answers that show their working from 10% to 99%."
    )
    same = REASONING.outcome(before, figures(0.12, 0.09, 0.15, 0.1))
    assert same.startswith("In this run the change in accuracy is within the intervals")


@pytest.mark.slow
@pytest.mark.usefixtures("small", "no_curves")
def test_the_story_of_the_calculator_measures_all_three_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--story", "tools", "--runs-dir", str(tmp_path), "--quiet"]) == 0
    assert "3. Reinforcement" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-tools-grpo", "demo-tools-sft"]
    results = json.loads((tmp_path / "demo-tools-grpo" / "demo.json").read_text())["results"]
    for figures in results.values():
        assert {"small:accuracy", "large:accuracy", "small:called", "large:called"} <= figures.keys()
    report = (tmp_path / "demo-tools-grpo" / "report.html").read_text()
    assert "A small model learns when to use a tool" in report
    assert "Calls by part" in report
    sft = RunDirectory(tmp_path / "demo-tools-sft").read_recipe()
    assert [part["task"]["called"] for part in sft["task"]["parts"]] == [0.25, 0.25]


@pytest.mark.usefixtures("small", "no_curves")
def test_demo_smollm2_has_two_models_and_names_no_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    models = tmp_path / "models"
    models.mkdir()
    write_gguf(models / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setenv("POSTTRAIN_MODELS", str(models))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    assert main(["demo", "--story", "smollm2", "--runs-dir", str(runs), "--quiet"]) == 0
    shown = capsys.readouterr().out
    order = ["1. The base", "base: ", "2. Reinforcement", "after GRPO: ", "3. All side by side"]
    places = [shown.index(text) for text in order]
    assert places == sorted(places)
    assert sorted(path.name for path in runs.iterdir()) == ["demo-smollm2-grpo"]
    info = json.loads((runs / "demo-smollm2-grpo" / "demo.json").read_text())
    assert info["evaluation"] == "sums/test"
    assert list(info["results"]) == ["base", "after GRPO"]
    report = (runs / "demo-smollm2-grpo" / "report.html").read_text()
    assert "after SFT" not in report
    assert report.count("dequantized from 4 bits") >= 2
    assert RunDirectory(runs / "demo-smollm2-grpo").read_recipe()["model"]["name"] == "smollm2-135m"


def test_every_story_describes_the_models_that_it_measures() -> None:
    for story in STORIES.values():
        assert tuple(story.descriptions) == story.labels
        assert story.labels[-1] == demo.AFTER_GRPO
        assert (demo.AFTER_SFT in story.labels) == (story.sft is not None)


def test_the_command_line_knows_every_story() -> None:
    """It names them without importing them, so that help answers at once."""
    (output,) = [action for action in build_parser()[1]["demo"]._actions if action.dest == "story"]
    assert set(output.choices or ()) == set(STORIES)
