"""Recipes that earlier versions have stored: keys that came, keys that are gone, keys with another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from old_runs import VERSION_0_2_0
from posttrain.errors import RecipeError
from posttrain.recipes.older import Older
from posttrain.recipes.recipe import Recipe, load_recipe, stored_recipe
from posttrain.strict_yaml import read_yaml
from refusing import refuses

SECTIONS = Recipe.older.sections


@pytest.fixture
def stored() -> dict[str, Any]:
    """The recipe of a run of version 0.2.0."""
    path = VERSION_0_2_0 / "recipe.yaml"
    content, _ = read_yaml(path.read_text(), path.name)
    assert isinstance(content, dict)
    return content


def test_bring_up_to_date_fills_in_what_earlier_versions_did_only_where_the_key_is_absent(
    stored: dict[str, Any],
) -> None:
    added = {"train.lr": 3.0, "train.new": 1, "grpo.new": 2, "truncated.new": 3, "native.new": 4, "ppo.new": 5}
    today = Older(SECTIONS, added=added).bring_up_to_date(stored)
    assert (today["train"]["lr"], today["train"]["new"]) == (1e-3, 1)
    assert (today["objective"]["new"], today["rewards"][0]["new"], today["rollout"]["engine"]["new"]) == (2, 3, 4)
    assert "new" not in stored["train"]
    assert str(today).count("'new'") == 4


def test_bring_up_to_date_drops_a_removed_key_only_with_the_value_that_is_done_today(stored: dict[str, Any]) -> None:
    older = Older(SECTIONS, removed={"train.deterministic": False, "train.precision": "bf16"})
    today = older.bring_up_to_date(stored)
    assert "deterministic" not in today["train"]
    assert today["train"]["precision"] == "fp32"


def test_bring_up_to_date_of_a_parts_task_and_of_a_renamed_option(stored: dict[str, Any]) -> None:
    stored["task"] = {"name": "mixture", "parts": [{"task": {"name": "gsm8k", "most": 3}, "weight": 1.0}]}
    older = Older(SECTIONS, renamed={"gsm8k.most": "size"}, added={"gsm8k.shots": 4})
    today = older.bring_up_to_date(stored)
    assert today["task"]["parts"][0]["task"] == {"name": "gsm8k", "size": 3, "shots": 4}


def test_bring_up_to_date_of_a_recipe_that_somebody_wrote_is_that_recipe(stored: dict[str, Any]) -> None:
    older = Older(SECTIONS, added={"train.new": 1})
    short = {key: value for key, value in stored.items() if key != "optimizer"}
    for own in (short, stored | {"extends": "tiny/grpo"}):
        assert older.bring_up_to_date(own) == own


def test_recipe_of_an_earlier_version_keeps_its_defaults_when_read_run_again_or_extended(
    tmp_path: Path, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (VERSION_0_2_0 / "recipe.yaml").read_text()
    assert "  max_grad_norm: 1.0\n" in text
    (tmp_path / "recipe.yaml").write_text(text.replace("  max_grad_norm: 1.0\n", ""))
    (tmp_path / "mine.yaml").write_text("extends: recipe.yaml\ntrain: {steps: 3}\n")
    del stored["train"]["max_grad_norm"]
    monkeypatch.setattr(Recipe, "older", Older(SECTIONS, added={"train.max_grad_norm": None}))
    assert load_recipe(str(tmp_path / "recipe.yaml")).train.max_grad_norm is None
    assert load_recipe(str(tmp_path / "mine.yaml")).train.max_grad_norm is None
    assert stored_recipe(stored, "recipe.yaml").train.max_grad_norm is None
    again = load_recipe(str(tmp_path / "recipe.yaml")).resolve().dump()
    assert again["train"]["max_grad_norm"] is None
    assert load_recipe("tiny/grpo").train.max_grad_norm == 1.0


def test_recipe_of_an_earlier_version_gives_a_component_of_the_command_line_its_defaults_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text((VERSION_0_2_0 / "recipe.yaml").read_text())
    monkeypatch.setattr(Recipe, "older", Older(SECTIONS, added={"sapo.made_up": 9}))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), [("objective", "sapo")])
    assert recipe.objective.options == {}


def test_recipe_of_a_later_version_is_refused_by_its_key(stored: dict[str, Any]) -> None:
    stored["train"]["made_up"] = 1
    with refuses(RecipeError, "train.made_up"):
        stored_recipe(stored, "recipe.yaml")


def test_stored_recipe_of_this_version_keeps_its_fingerprint() -> None:
    for name in ("tiny/grpo", "tiny/sft", "preference/dpo", "tiny/rm"):
        recipe = load_recipe(name).resolve()
        content, _ = read_yaml(recipe.to_yaml(), name)
        assert isinstance(content, dict)
        assert Recipe.older.bring_up_to_date(content) == content
        assert Recipe.older.marker in content


def test_stored_recipe_of_an_earlier_version_has_no_router_loss(stored: dict[str, Any]) -> None:
    assert Recipe.older.marker not in stored
    assert Recipe.older.bring_up_to_date(stored)["train"]["router_aux_loss_coef"] == 0.0
