"""A game of two players is learnt by reward from random play: minutes, in the slow suite (one seed, half of the steps).

``benchmarks/game.py`` is the same with three seeds and all steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import launch
from posttrain.store.metrics import MetricsLog


@pytest.mark.slow
def test_nim_is_played_to_within_five_percent_of_the_best(tmp_path: Path) -> None:
    """The best play is paid 1 in each of these games (``tests/environments/test_built_in.py``)."""
    shown = launch(load_recipe("tiny/sft-nim"), root=tmp_path, name="sft")
    recipe = load_recipe("tiny/grpo-nim", [("model.name", str(shown.folder)), ("train.steps", "24")])
    learnt = launch(recipe, root=tmp_path, name="grpo")
    rows = [row.metrics for row in MetricsLog(learnt.folder / "metrics.jsonl").read()]
    for starts in ("train", "validation"):
        rewards = [row[name] for row in rows if (name := f"eval/episodes/{starts}/reward") in row]
        assert rewards[0] < 0.4, f"{starts}: shown how it is played, not how it is won"
        assert rewards[-1] >= 0.95, f"{starts}: {rewards}"
