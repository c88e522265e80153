"""Runs that the studio shows in tests, a studio that serves them, and the posts of a browser to it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from posttrain.interpret.saes.sae import SparseAutoencoder, save_sae
from posttrain.recipes.recipe import validate_recipe
from posttrain.runs.launch import RunStart, launch

POSTS = Path(__file__).parent / "browser" / "posts.json"
TEMPLATE = {"prompt": {"template": {"name": "r1_zero", "preamble": ""}}}
COMMON: dict[str, Any] = {"task": {"name": "stories", "size": 64, "max_steps": 1}, **TEMPLATE}
ROLLOUTS = {"rollout": {"num_prompts": 3, "group_size": 2, "max_tokens": 6}, "eval": {"every": 2, "num_examples": 4}}
MARKUP = "<img src=x onerror=alert(1)><b id=evil>"  # what a model might write
WIDTH, FEATURES = 128, 24


def make_runs(root: Path) -> Path:
    """Make the runs that the studio shows.

    ``rl`` has rollouts of two steps, ``odd`` has markup in them, ``sft`` has none, ``judge`` is a reward model and
    ``sae`` a dictionary.
    """
    rl = {**COMMON, **ROLLOUTS, "rewards": ["correct"], "objective": "grpo", "train": {"steps": 2}}
    launch(validate_recipe(rl), RunStart(root=root, name="rl"))
    sft = {**COMMON, "data": {"batch_size": 2}, "objective": "cross_entropy", "train": {"steps": 1}}
    launch(validate_recipe(sft), RunStart(root=root, name="sft"))
    (root / "sft" / "rollouts.db").unlink()
    shutil.copytree(root / "rl", root / "odd")
    with closing(sqlite3.connect(root / "odd" / "rollouts.db")) as database, database:
        database.execute("UPDATE rollouts SET completion = ?, prompt = ?", (MARKUP, MARKUP))
        database.execute("DELETE FROM rollouts WHERE step = 1")
    pairs = {"task": "small_runs:judged_sums", **TEMPLATE, "data": {"batch_size": 4, "max_length": 256}}
    judge = {**pairs, "objective": "bradley_terry", "train": {"steps": 1}}
    launch(validate_recipe(judge), RunStart(root=root, name="judge"))
    about = {"model_name": "tiny", "site": "resid.2", "source": "model"}
    save_sae(SparseAutoencoder(WIDTH, FEATURES, kind="l1", seed=1), root / "sae" / "dictionary", about)
    recipe = "activations: {model: {name: tiny}, site: resid.2, task: stories}\ndictionary: l1\n"
    (root / "sae" / "recipe.yaml").write_text(recipe)
    return root


def recorded_posts(part: str) -> list[dict[str, Any]]:
    """What chromium posted in one test of ``tests/browser/test_studio_in_browser.py``, and what was done before."""
    posts: dict[str, list[dict[str, Any]]] = json.loads(POSTS.read_text(encoding="utf-8"))
    return posts[part]
