"""Each kind of reward model learns to tell right workings from wrong ones that it has not seen: minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import launch

SEEDS = (0, 1, 2)


def learn(name: str, root: Path, seed: int, model: str | None = None) -> dict[str, float]:
    """The last held-out evaluation of a recipe as it ships, with another seed."""
    changes = [("train.seed", str(seed)), ("eval.every", "1000")]
    if model is not None:
        changes.append(("model.name", model))
    result = launch(load_recipe(name, changes), root=root, name=f"{name.replace('/', '-')}-{seed}")
    (results,) = result.evaluations.values()
    assert results["n"] == 500.0
    return results


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_pairs_teach_a_reward_model_and_it_is_a_start_for_one_that_judges_single_answers(tmp_path: Path) -> None:
    """Chance is 50 % for both, and nothing but arithmetic is above it."""
    pairs = [learn("tiny/rm", tmp_path, seed) for seed in SEEDS]
    assert mean([r["pair_accuracy"] for r in pairs]) >= 0.72
    assert min(r["pair_accuracy"] for r in pairs) >= 0.65
    assert all(r["margin"] > 0 for r in pairs)
    single = [learn("tiny/orm", tmp_path, seed, str(tmp_path / f"tiny-rm-{seed}")) for seed in SEEDS]
    assert mean([r["final_accuracy"] for r in single]) >= 0.68
    assert min(r["final_accuracy"] for r in single) >= 0.60


@pytest.mark.slow
def test_labelled_steps_teach_a_process_reward_model(tmp_path: Path) -> None:
    """Better than saying "good" each time, by a wide margin."""
    results = [learn("tiny/prm", tmp_path, seed) for seed in SEEDS]
    assert all(0.6 < r["positive_share"] < 0.66 for r in results)
    assert mean([r["step_accuracy"] - r["positive_share"] for r in results]) >= 0.10
    assert min(r["step_accuracy"] - r["positive_share"] for r in results) >= 0.06
