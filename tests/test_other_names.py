"""Names of options elsewhere lead to the key that is meant here."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from posttrain import registry
from posttrain.cli import main
from posttrain.errors import RecipeError
from posttrain.other_names import OTHER_NAMES, answer_other_name
from posttrain.recipes.recipe import WORD_KINDS, Recipe, load_recipe

KEY = re.compile(r"\b(?:[a-z]\w+\.)+[a-z]\w+\b")


def is_key(key: str) -> bool:
    """Return whether a recipe has the key, or an option of some component that may stand there."""
    if key.startswith("--") or key == "tools":
        return True
    model: type[BaseModel] = Recipe
    parts = key.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() or part == "NAME":  # an entry of a list
            continue
        path = ".".join(parts[:i])
        if path in WORD_KINDS or path in ("rewards.0", "rewards.NAME"):
            kind = WORD_KINDS.get(path, "reward")
            found = (part in entry.options_model.model_fields for entry in registry.entries(kind).values())
            return part in ("name", "weight") or any(found)
        if part not in model.model_fields:
            return False
        kinds = [model.model_fields[part].annotation, *getattr(model.model_fields[part].annotation, "__args__", ())]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return True


def test_other_names_lead_to_keys_that_exist() -> None:
    named = {key for answer in OTHER_NAMES.values() for key in (KEY.findall(answer) if " " in answer else [answer])}
    keys = {key for key in named if not key.endswith((".jsonl", ".json"))}
    assert len(keys) > 60
    assert [key for key in sorted(keys) if not is_key(key)] == []


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("learning_rate", "This is called train.lr here."),
        ("train.learning-rate", "This is called train.lr here."),
        ("trainer.total_epochs", "This is called train.num_epochs here."),
        ("actor_rollout_ref.rollout.n", "This is called rollout.group_size here."),
        ("num_generations", "This is called rollout.group_size here."),
        ("beta", "Here it is objective.beta for preferences (dpo)"),
        ("packing", "There is no such key here, and none is needed: rows are always packed"),
        ("lora_r", "This is called model.adapter.rank here."),
        ("output_dir", "This is called --runs-dir here."),
    ],
)
def test_unknown_key_with_a_name_of_others_is_answered(
    name: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in answer_other_name(name)
    with pytest.raises(RecipeError, match=re.escape(answer)):
        load_recipe("tiny/grpo", [(name.replace("-", "_"), "1")])
    assert main(["train", "tiny/grpo", f"--{name}", "1"]) == 2
    assert answer in " ".join(capsys.readouterr().err.split())


def test_name_that_is_ours_is_not_answered() -> None:
    assert answer_other_name("train.num_epochs") == answer_other_name("objective") == answer_other_name("nothing") == ""
