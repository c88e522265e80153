"""Recipes of dictionaries: those that ship, what they mean, and what is refused with file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import PosttrainError, RecipeError
from posttrain.interpret.dictionaries.recipe import SaeRecipe, load_sae_recipe
from posttrain.recipes.document import interpretation_names
from posttrain.recipes.recipe import load_recipe

NAMES = interpretation_names("dictionary")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_and_its_dump_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    resolved = load_sae_recipe(name).resolve()
    path = tmp_path / "again.yaml"
    path.write_text(resolved.to_yaml())
    again = load_sae_recipe(str(path)).resolve()
    assert again.dump() == resolved.dump()
    assert again.fingerprint() == resolved.fingerprint()
    with pytest.raises(RecipeError, match=f"this trains a dictionary; run it with: posttrain sae train {name}"):
        load_recipe(name)


def test_the_original_recipe_has_the_original_sizes() -> None:
    recipe = load_sae_recipe("sae-qwen3-14b-layer20").resolve()
    word = recipe.dictionary
    assert (word.name, word.num_features(5120), word.options["coefficient"]) == ("l1", 40_960, 3e-4)
    assert (recipe.train.batch, recipe.activations.batch, recipe.activations.context_tokens) == (4096, 4, 8192)
    assert (recipe.activations.model and recipe.activations.model.name) == "Qwen/Qwen3-14B"
    assert recipe.activations.site == "resid.20"
    assert recipe.train.auxk == 0
    assert recipe.train.learning_rate(40_960) == pytest.approx(1.897e-4, rel=1e-3)


def test_what_is_filled_in() -> None:
    recipe = load_sae_recipe("tiny/sae", [("dictionary.features", "64")])
    resolved = recipe.resolve()
    assert resolved.train.auxk == 1 / 32
    assert resolved.dictionary.options == {"k": 16.0, "sample": 1 / 16, "average": 0.05}
    assert resolved.dictionary.num_features(128) == 64
    assert load_sae_recipe("tiny/sae", [("dictionary", "l1")]).resolve().train.auxk == 0
    assert load_sae_recipe("tiny/sae", [("train.auxk", "0.5")]).resolve().train.auxk == 0.5
    same = load_sae_recipe("tiny/sae", [("track", "[]")]).resolve()
    assert same.fingerprint() == load_sae_recipe("tiny/sae").resolve().fingerprint()


REFUSED: list[tuple[list[tuple[str, str]], str]] = [
    ([("train.step", "3")], r"command line: train.step: section 'train' has no key 'step'. Did you mean 'steps'\?"),
    ([("dictionary.kk", "3")], r"dictionary.kk: dictionary 'batchtopk' has no key 'kk'. Did you mean 'k'\?"),
    ([("dictionary", "topp")], r"there is no dictionary named 'topp'. Did you mean 'topk'\?"),
    ([("activations.folder", "x")], "give either 'folder', with activations, or the 'model'"),
    ([("activations.text", "x")], "give a 'site' such as resid.20 and one of 'task', 'text' and 'rollouts'"),
    ([("activations.sites", "[resid.1]")], r"activations\.sites: this key was removed\. Use `posttrain activations"),
    ([("activations.source", "mean")], "activations.source: Input should be 'model', 'base', 'post' or 'difference'"),
    ([("train.batch", "1")], "command line: train.batch: Input should be greater than or equal to 2; got 1"),
    ([("trian.batch", "1")], r"trian: a recipe of a dictionary has no key 'trian'. Did you mean 'train'\?"),
    ([("dictionary.skip", "true")], r"dictionary\.skip: this key was removed\. Use `posttrain sae features`"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_is_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(PosttrainError, match=message):
        load_sae_recipe("tiny/sae", overrides).resolve()


def test_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("activations: {folder: there}\ndictionary: topk\ntrain:\n  steps: none\n")
    with pytest.raises(RecipeError, match=rf"^{path}:4: train.steps: Input should be a valid integer"):
        load_sae_recipe(str(path))
    with pytest.raises(RecipeError, match=r"this trains no dictionary .* posttrain train tiny/sft"):
        load_sae_recipe("tiny/sft")


def test_a_folder_has_its_texts_already() -> None:
    given: dict[str, Any] = {"activations": {"folder": "x", "text": "y"}, "dictionary": "l1"}
    with pytest.raises(ValueError, match="'folder' has its texts already"):
        SaeRecipe.model_validate(given)
