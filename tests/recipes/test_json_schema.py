"""The schema for editors accepts every shipped recipe, and refuses typos, wrong types and foreign options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.components import ComponentModules
from posttrain.recipes.document import recipe_text
from posttrain.recipes.json_schema import DRAFT, keys_of_sections, recipe_schema
from posttrain.sweeps.file import training_recipe_names

TYPES: dict[str, Any] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list | tuple),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}  # fmt: skip
LIMITS: dict[str, Any] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "maxLength": lambda value, limit: len(value) <= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, limit: re.search(limit, value) is not None,
}
ABOUT = {"title", "description", "default", "$schema", "$defs", "examples", "format", "discriminator"}
READ = {"$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "required", "additionalProperties"}
READ |= {"items", "prefixItems", "propertyNames", *LIMITS}


@cache
def schema() -> dict[str, Any]:
    return recipe_schema()


def fits(value: object, rule: Any) -> bool:
    """Return whether a value fits a schema of the keywords that ours uses; an unknown keyword is an error."""
    if isinstance(rule, bool):
        return rule
    assert rule.keys() <= READ | ABOUT, rule.keys() - READ - ABOUT
    if "$ref" in rule:
        name = rule["$ref"].removeprefix("#/$defs/")
        if not fits(value, schema()["$defs"][name]):
            return False
    if "type" in rule:
        kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not any(TYPES[kind](value) for kind in kinds):
            return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    if "const" in rule and value != rule["const"]:
        return False
    for key in ("anyOf", "oneOf"):
        if key in rule and not any(fits(value, one) for one in rule[key]):
            return False
    if not all(fits(value, one) for one in rule.get("allOf", ())):
        return False
    for key, holds in LIMITS.items():
        kinds: Any = int | float
        if key.endswith(("Length", "Items")):
            kinds = str | list
        elif key == "pattern":
            kinds = str
        if key in rule and isinstance(value, kinds) and not holds(value, rule[key]):
            return False
    if isinstance(value, list):
        return all(fits(one, rule.get("items", True)) for one in value)
    return not isinstance(value, Mapping) or fits_object(value, rule)


def fits_object(value: Mapping[str, object], rule: Mapping[str, Any]) -> bool:
    if not all(key in value for key in rule.get("required", ())):
        return False
    known = rule.get("properties", {})
    others = rule.get("additionalProperties", True)
    return all(fits(one, known.get(key, others)) for key, one in value.items())


def content_of(name: str) -> Any:
    return yaml.safe_load(re.sub(r"(?<=[ :\[])(\d+)e(-?\d+)", r"\1.0e\2", recipe_text(name)[1]))


@pytest.mark.parametrize("name", training_recipe_names())
def test_schema_accepts_every_shipped_recipe(name: str) -> None:
    assert fits(content_of(name), schema())


CHANGES: list[dict[str, Any]] = [
    {"trian": {"lr": 1e-5}},
    {"train": {"learning_rate": 1e-5}},
    {"train": {"lr": "fast"}},
    {"train": {"steps": 1.5}},
    {"objective": "grppo"},
    {"objective": {"name": "grpo", "clip_hihg": 0.28}},
    {"objective": {"name": "reinforce", "clip_high": 0.28}},
    {"objective": {"clip_high": 0.28}},
    {"rewards": ["corect"]},
    {"rewards": [{"name": "correct", "weigth": 1}]},
    {"track": ["wandbb"]},
    {"track": [{"name": "trackio", "space_id": "a/b"}]},
    {"optimizer": {"beta": 0.9}},
    {"rollout": {"engine": {"name": "vllm", "ulr": "http://x"}}},
    {"rollout": {"group_size": 0}},
    {"eval": {"tasks": ["gsm8kk"]}},
    {"eval": {"patience": 0}},
    {"extends": 3},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: json.dumps(change))
def test_schema_refuses_typos_and_wrong_types(change: dict[str, Any]) -> None:
    assert not fits({"extends": "tiny/grpo", **change}, schema())


TAKEN: list[dict[str, Any]] = [
    {"extends": "mine.yaml"},
    {"train": {"lr": 1e-5, "steps": None}},
    {"rollout": None},
    {"objective": "mine:surprised"},
    {"objective": {"name": "mine:surprised", "power": 2}},
    {"rewards": "correct"},
    {"rewards": ["correct", {"name": "correct", "weight": 0.5, "mode": "math"}, "mine:brief"]},
    {"track": "trackio,wandb"},
    {"track": [{"name": "mlflow", "uri": "http://x"}]},
    {"optimizer": {"betas": [0.9, 0.95]}},
    {"optimizer": "muon"},
    {"eval": {"patience": 3, "every": 5}},
    {"model": {"init": {"architecture": "qwen3", "config": {"hidden_size": 32}}}},
]


@pytest.mark.parametrize("change", TAKEN, ids=lambda change: json.dumps(change))
def test_schema_accepts_what_a_recipe_may_be(change: dict[str, Any]) -> None:
    assert fits({"extends": "tiny/grpo", **change}, schema())


def test_schema_has_every_component_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(schema()))
    assert printed["$schema"] == DRAFT
    names = printed["$defs"]["component.objective"]["anyOf"][0]["enum"]
    assert names == sorted(ComponentModules()["objective"])
    keys = keys_of_sections()
    assert {"train", "rollout", "eval"} <= keys.keys()
    assert "patience" in keys["eval"]
    assert keys["description"] == ()
    assert main(["recipes", "schema", "tiny/grpo"]) == 2
