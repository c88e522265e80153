"""Recipes of policy gradients act as they say, and the recorded run of a method's page is of its recipe as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipes.document import recipe_names
from posttrain.recipes.recipe import load_recipe
from posttrain.registry import find

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from method_runs import (  # noqa: E402
    FAMILIES,
    RESULTS,
    SMALLEST,
    Variant,
    is_recorded,
    recipe_of_teacher,
    record_missing,
    series_of,
    variants,
    watched_metrics,
)

POLICY_GRADIENTS = recipe_names("rl/")
RECORDED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
# Metrics by the value that says nothing happened.
TRIVIAL = {
    "clip_fraction": 0.0,
    "cov_fraction": 0.0,
    "masked_tokens": 0.0,
    "ratio": 1.0,
    "value_explained_variance": 0.0,
    "accepted_groups": 1.0,
}


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_recipe_with_a_ratio_updates_several_times_on_a_batch(name: str) -> None:
    recipe = load_recipe(name).resolve()
    needs = find("objective", recipe.objective.name).traits["needs"]
    updates = recipe.train.num_minibatches * recipe.train.ppo_epochs
    assert updates >= 4 or "old_logprobs" not in needs
    assert recipe.train.steps is not None
    assert recipe.train.steps % updates == 0


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.split("/")[0] in FAMILIES])
def test_recipe_names_a_recorded_metric_to_watch(name: str) -> None:
    assert watched_metrics(load_recipe(name).description)


@pytest.mark.parametrize("key", RECORDED)
def test_recorded_run_is_of_the_recipe_as_it_is_and_its_metric_leaves_the_trivial_value(key: str) -> None:
    """If a recipe changed, train it again: `python benchmarks/method_runs.py NAME`."""
    run = RECORDED[key]
    name = key.partition(" ")[0]
    (variant,) = (variant for variant in variants([name]) if variant.key == key)
    assert run["recipe"] == variant.fingerprint()
    assert run["command"] == variant.command
    assert run["curve"][0]["step"] == 0
    assert run["curve"][-1]["step"] == load_recipe(name).train.steps
    for metric in watched_metrics(load_recipe(name).description):
        values = [value for _, value in run["metrics"][metric]]
        still = TRIVIAL.get(metric, values[0])
        assert max(abs(value - still) for value in values) > 1e-3 * max(1.0, abs(still))


def test_fingerprint_is_of_what_recipes_say_and_of_overrides() -> None:
    plain, other = Variant("rl/gspo"), Variant("rl/gspo", "x", (("objective.clip_low", "3e-4"),))
    assert plain.fingerprint() == Variant("rl/gspo", "another label").fingerprint()
    assert plain.fingerprint() != other.fingerprint()
    assert other.command == "posttrain train rl/gspo --objective.clip_low 3e-4"


def test_record_missing_trains_what_is_not_recorded_and_resumes(tmp_path: Path) -> None:
    results = tmp_path / "runs.json"
    wanted = [Variant("rl/gspo"), Variant("rl/gspo", "narrow", (("objective.clip_low", "1e-9"),))]
    assert record_missing(wanted[:1], results, shorter=SMALLEST) == ["rl/gspo"]
    first = json.loads(results.read_text())
    assert record_missing(wanted, results, shorter=SMALLEST) == ["rl/gspo narrow"]
    both = json.loads(results.read_text())
    assert both["rl/gspo"] == first["rl/gspo"]
    assert [point["step"] for point in first["rl/gspo"]["curve"]] == [0, 1, 2]
    assert first["rl/gspo"]["metrics"]["clip_fraction"][0] == [1, 0.0], "the first update is on-policy"
    both["rl/gspo"]["recipe"] = "of an earlier recipe"
    results.write_text(json.dumps(both))
    assert record_missing(wanted, results, shorter=SMALLEST) == ["rl/gspo"]


def test_run_is_recorded_again_if_its_description_names_a_metric_that_was_not() -> None:
    variant = Variant("preference/mpo")
    watched = watched_metrics(load_recipe(variant.recipe).description)
    run = {"recipe": variant.fingerprint(), "metrics": {name: [[1, 2.0]] for name in watched}}
    assert "margin" in watched
    assert is_recorded(variant, run)
    assert not is_recorded(variant, run | {"metrics": {"reward": [[1, 2.0]]}})
    assert not is_recorded(variant, run | {"recipe": "of an earlier recipe"})
    assert not is_recorded(variant, None)


def test_metric_of_answers_that_were_sampled_once_is_that_of_evaluations() -> None:
    rows = [{"step": 1.0, "accuracy": 0.5, "margin": 0.0}, {"step": 2.0, "accuracy": 0.5, "margin": 1.0}, {"step": 3.0}]
    evaluations = [{"step": 0, "accuracy": 0.1}, {"step": 3, "accuracy": 0.9}]
    assert series_of("accuracy", rows, evaluations) == [[0, 0.1], [3, 0.9]]
    assert series_of("margin", rows, evaluations) == [[1, 0.0], [2, 1.0]]
    assert series_of("accuracy", rows, []) == [[1, 0.5], [2, 0.5]]
    assert series_of("kl_ref", rows, evaluations) == []


def test_teacher_of_a_recipe_is_the_packaged_recipe_of_its_run() -> None:
    assert recipe_of_teacher(load_recipe("distillation/reverse-kl")) == "tiny/grpo"
    assert recipe_of_teacher(load_recipe("tiny/sdft")) is None, "it teaches itself"
    assert recipe_of_teacher(load_recipe("rl/grpo")) is None


@pytest.mark.slow
def test_recipe_with_a_teacher_is_recorded_after_its_teacher_was_trained(tmp_path: Path) -> None:
    results = tmp_path / "runs.json"
    wanted = [Variant("distillation/reverse-kl")]
    shorter = {key: value for key, value in SMALLEST.items() if key != "train"} | {"train": {"steps": 2}}
    assert record_missing(wanted, results, shorter=shorter) == ["distillation/reverse-kl"]
    run = json.loads(results.read_text())["distillation/reverse-kl"]
    assert run["command"] == "posttrain train distillation/reverse-kl"
    assert len(run["metrics"]["divergence"]) == 2
