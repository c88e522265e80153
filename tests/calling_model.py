"""A run whose model calls a calculator, greedily and with calls that it was shown, for tests that ask it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from posttrain.data.stories.task import sums
from posttrain.recipes.recipe import load_recipe, validate_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.runs.models import find_source
from posttrain.sampling.base import Episode
from posttrain.sampling.episodes import Episodes
from posttrain.sampling.models import open_model
from posttrain.store.checkpoint_files import seal
from posttrain.types import Example, Message

SUMS: dict[str, Any] = {"size": 4, "min_value": 2, "max_value": 20, "called": 1.0}


def questions() -> list[str]:
    """The sums that it was shown."""
    return [example.messages[0].content for example in sums(**SUMS).examples]


def make_shown(root: Path) -> Path:
    """``tiny``, shown four sums and their calls until it writes them by itself; its run was told of no tools."""
    recipe = {
        "model": {"name": "tiny"},
        "task": {"name": "sums", **SUMS},
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": 4, "max_length": 128},
        "objective": "cross_entropy",
        "train": {"steps": 60, "lr": 3e-3, "save_every": 0},
        "eval": {"every": 0},
    }
    return launch(validate_recipe(recipe).resolve(), RunStart(root=root, name="shown")).folder


def make_player(shown: Path, root: Path, name: str, *, show_tools: bool) -> Path:
    """The same model as a run of ``tiny/grpo-calculator``, which has an environment."""
    (checkpoint,) = (shown / "checkpoints").glob("step-*")
    run = root / name
    ignored = shutil.ignore_patterns("manifest.json")
    shutil.copytree(checkpoint, run / "checkpoints" / "step-000001", ignore=ignored)
    seal(run / "checkpoints" / "step-000001", 1)
    recipe = load_recipe("tiny/grpo-calculator", [("rollout.show_tools", str(show_tools).lower())])
    (run / "recipe.yaml").write_text(recipe.resolve().to_yaml())
    return run


def play(run: Path, question: str) -> Episode:
    """Play the question greedily with the engine of training and the run's environment."""
    opened = open_model(find_source(str(run), str(run.parent))).on_stage(None)
    assert opened.stage is not None
    episodes = Episodes(opened.stage, opened.engine, opened.tokenizer, opened.sampling(200, 0.0), 1000)
    [[episode]] = episodes.play([Example("one", (Message("user", question),))], [[0]], [0])
    return episode
