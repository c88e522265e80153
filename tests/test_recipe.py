"""Recipes: strictness with places, overrides, resolution and round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posttrain.errors import RecipeError, UnknownWord
from posttrain.recipe import Word, apply_override, load_recipe, parse_yaml, validate_recipe

TEXT = """\
model: {name: tiny}
task: {name: stories, split: train}
rewards:
  - correct
  - {name: xml_format, weight: 0.2}
rollout: {prompts: 4, group: 4}
objective: {name: grpo, clip_high: 0.28}
train:
  steps: 5
  lr: 1e-4
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_words_and_round_trip(tmp_path: Path):
    recipe = load_recipe(write(tmp_path, TEXT)).resolve()
    assert recipe.train.lr == 1e-4  # YAML 1.1 reads 1e-4 as text
    assert recipe.advantage.name == "normalized"
    assert recipe.objective.options["clip_low"] == 0.2
    assert [(w.name, w.weight) for w in recipe.rewards] == [("correct", 1.0), ("xml_format", 0.2)]
    again = load_recipe(write(tmp_path, recipe.to_yaml())).resolve()
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_the_fingerprint_follows_the_content(tmp_path: Path):
    path = write(tmp_path, TEXT)
    base = load_recipe(path).resolve().fingerprint()
    assert load_recipe(path, [("objective.clip_low", "0.2")]).resolve().fingerprint() == base  # the default, said aloud
    assert load_recipe(path, [("train.lr", "2e-4")]).resolve().fingerprint() != base


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  steps: 5",
            "  stepz: 5",
            r"mine\.yaml:9: train\.stepz: section 'train' has no key 'stepz'\. Did you mean 'steps'\?",
        ),
        ("  steps: 5", "  steps: many", r"mine\.yaml:9: train\.steps: .*valid integer.*'many'"),
        ("  steps: 5", "  steps: 0", r"mine\.yaml:9: train\.steps: .*greater than or equal to 1"),
        ("train:", "trian:", r"mine\.yaml:8: trian: a recipe has no key 'trian'\. Did you mean 'train'\?"),
        ("task: {name: stories, split: train}\n", "", r"task: a recipe needs this key"),
        ("rollout: {prompts: 4, group: 4}\n", "", r"exactly one of 'rollout' .* and 'data'"),
        ("  lr: 1e-4", "  lr: 1e-4\n  lr: 2e-4", r"mine\.yaml:11: train\.lr: this key stands twice"),
        ("train:", "train: [", r"mine\.yaml:\d+: not valid YAML"),
    ],
)
def test_refusals_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, TEXT.replace(old, new)))


def test_words_are_refused_when_resolved(tmp_path: Path):
    path = write(tmp_path, TEXT)
    with pytest.raises(
        RecipeError, match=r"objective\.clip_hihg: objective 'grpo' has no key 'clip_hihg'\. Did you mean 'clip_high'\?"
    ):
        load_recipe(path, [("objective.clip_hihg", "0.3")]).resolve()
    with pytest.raises(UnknownWord, match=r"objective: there is no objective named 'gpro'\. Did you mean 'grpo'\?"):
        load_recipe(path, [("objective", "gpro")]).resolve()
    with pytest.raises(UnknownWord, match=r"rewards\.0: there is no reward named 'corect'"):
        load_recipe(path, [("rewards.0", "corect")]).resolve()


def test_overrides():
    data = {"objective": {"name": "grpo", "clip_low": 0.1}, "task": "stories", "rewards": ["correct"]}
    apply_override(data, "train.lr", "1e-5")
    apply_override(data, "task.split", "test")
    apply_override(data, "rewards.0.weight", "0.5")
    apply_override(data, "objective", "reinforce")
    apply_override(data, "model.adapter", "{kind: lora, rank: 4}")
    assert data["train"]["lr"] == 1e-5
    assert data["task"] == {"name": "stories", "split": "test"}
    assert data["rewards"] == [{"name": "correct", "weight": 0.5}]
    assert data["objective"] == "reinforce"
    assert data["model"]["adapter"]["rank"] == 4
    with pytest.raises(RecipeError, match="the list has entries 0 to 0"):
        apply_override(data, "rewards.3.weight", "1")
    with pytest.raises(RecipeError, match=r"train\.lr is a value, not a section"):
        apply_override(data, "train.lr.x", "1")


def test_an_override_is_named_as_such(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"command line: train\.stps: section 'train' has no key 'stps'"):
        load_recipe(write(tmp_path, TEXT), [("train.stps", "3")])


def test_missing_files_and_names():
    with pytest.raises(RecipeError, match=r"no/such\.yaml: no such recipe file"):
        load_recipe("no/such.yaml")
    with pytest.raises(RecipeError, match="no recipe file or shipped recipe 'grpo-gsm8kk'"):
        load_recipe("grpo-gsm8kk")


def test_a_recipe_that_is_no_mapping():
    with pytest.raises(RecipeError, match="a recipe is a mapping of sections"):
        parse_yaml("- 1\n- 2\n", "x.yaml")


def test_words_that_do_not_belong_together():
    base = yaml.safe_load(TEXT)
    supervised = {k: v for k, v in base.items() if k != "rollout"} | {"data": {}, "objective": "cross_entropy"}
    assert validate_recipe(supervised).rollout is None
    with pytest.raises(RecipeError, match="'advantage' belongs to 'rollout'"):
        validate_recipe(supervised | {"advantage": "raw"})
    with pytest.raises(RecipeError, match="passes over a rollout batch"):
        validate_recipe(supervised | {"train": {"epochs": 2}})


def test_a_bare_string_is_a_word():
    assert Word.model_validate("grpo").name == "grpo"
    assert Word.model_validate({"name": "grpo", "kl": 0.1}).options == {"kl": 0.1}
