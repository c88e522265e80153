"""The recipe of a comparison: defaults, overrides, and what is refused where."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import RecipeError, UnknownComponent
from posttrain.interpret.differences.changes_recipe import load_diff_recipe
from posttrain.recipes.document import interpretation_names
from posttrain.recipes.recipe import load_recipe
from refusing import refuses


def test_the_shipped_recipe_resolves_and_its_dump_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_diff_recipe(["tiny/what-did-rl-change"]).resolve()
    assert (recipe.base.recipe, recipe.post.recipe) == ("tiny/sft", "tiny/grpo-demo")
    pair = load_diff_recipe(["a", "b"]).resolve().changes
    assert (pair.dictionary, pair.train) == (recipe.changes.dictionary, recipe.changes.train)
    assert (pair.dictionary.options["k"], pair.train.steps, pair.train.lr) == (4, 1600, 5e-3)
    assert recipe.changes.site == "resid.2"
    assert recipe.changes.seeds == 3
    assert len(recipe.description) > 20
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert load_diff_recipe([str(path)]).resolve().fingerprint() == recipe.fingerprint()
    assert "tiny/what-did-rl-change" in interpretation_names("changes")
    assert "tiny/what-did-rl-change" not in interpretation_names("dictionary")


def test_recipe_of_a_published_model_compares_it_with_what_its_own_recipe_trains() -> None:
    recipe = load_diff_recipe(["smollm2/what-did-rl-change"]).resolve()
    assert recipe.post.recipe is not None
    trained = load_recipe(recipe.post.recipe).resolve()
    assert recipe.base.name == trained.model.name == "smollm2-135m"
    assert recipe.task is not None
    asked = {key: recipe.task.options[key] for key in ("min_value", "max_value")}
    assert asked == {key: trained.task.options[key] for key in ("min_value", "max_value")}
    assert recipe.task.options["split"] == "test"
    assert trained.task.options["split"] == "train"


def test_two_models_and_options_make_a_recipe() -> None:
    given = [("changes.dictionary.k", "8"), ("changes.train.steps", "50")]
    recipe = load_diff_recipe(["tiny", "runs/mine"], [*given, ("task", "stories")]).resolve()
    assert (recipe.base.name, recipe.post.name) == ("tiny", "runs/mine")
    assert (recipe.changes.dictionary.name, recipe.changes.dictionary.options["k"]) == ("batchtopk", 8)
    assert recipe.changes.dictionary.num_features(10) == 30
    assert (recipe.changes.train.steps, recipe.changes.train.batch) == (50, 1024)
    assert recipe.task is not None
    assert recipe.task.options["size"] == 50_000  # defaults of words are filled in


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("changes.sedes", "3", "command line: changes.sedes"),
        ("changes.by", "me", "changes.by"),
        ("changes.causal.features", "0", "changes.causal.features"),
        ("changes.difference", "topk", "changes.difference"),
        ("base.recipe", "tiny/sft", "base:"),
    ],
)
def test_mistakes_are_named(key: str, value: str, message: str) -> None:
    with refuses(RecipeError, message):
        load_diff_recipe(["tiny", "tiny"], [(key, value)])


def test_unknown_words_and_other_recipes_are_refused(tmp_path: Path) -> None:
    with refuses(UnknownComponent, "batchtopk"):
        load_diff_recipe(["tiny", "tiny"], [("changes.dictionary", "batchtop")]).resolve()
    with refuses(RecipeError, "not a comparison recipe"):
        load_diff_recipe(["tiny/sft"])
    path = tmp_path / "r.yaml"
    path.write_text("base: tiny\nchanges:\n  site: resid.2\n  seeds: none\n")
    with pytest.raises(RecipeError) as caught:
        load_diff_recipe([str(path)])
    assert str(caught.value).splitlines() == [
        f"{path}: post: a recipe of a comparison needs this key",
        f"{path}:4: changes.seeds: Input should be a valid integer, unable to parse string as an integer; got 'none'",
    ]
