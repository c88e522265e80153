"""Bad values for every key of every recipe and every option of every word, made from their types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Annotated, Any

from fuzz_case import DIFF, RL, SAE, SFT, STUDY, Case, merged, with_value
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from posttrain import registry
from posttrain.interpret.differences.changes_recipe import DiffRecipe
from posttrain.interpret.saes.sae_recipe import SaeRecipe
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component
from posttrain.sweeps.file import SweepFile

# YAML of a value, and the types that it fits; what fits nothing is bad for every key.
POOL: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (text, frozenset(types.split()))
    for text, types in (
        ("[]", "array"),
        ("{}", "object"),
        ("{nonsense: 1}", "object"),
        ("maybe", "string"),
        ("''", "string"),
        ("7.5", "number"),
        ("-3", "number integer"),
        ("true", "boolean"),
        ("yes", "boolean string"),
        ("null", "null"),
        ("2024-05-17", "string"),
        ("1:30", "string"),
        (".nan", ""),
        (".inf", ""),
        ("1e400", ""),
        ("010", ""),
        ("1e11", "number"),
        ("1e30", "number"),
        ("9" * 5000, ""),
        ("²", "string"),
        ("!!binary aGk=", ""),
        ("!!python/name:os.system", ""),
        ("!own 3", ""),
        ('"\\ud800"', ""),
        ("*nowhere", ""),
        ("&a [*a]", ""),
        ("[" * 3000 + "]" * 3000, ""),
        ("{<<: 3}", ""),
        ("{a: 1, a: 2}", ""),
    )
)
# Not YAML, so text where an option has it; in a file it is refused.
NO_YAML = ("!", "*", "&a [*", "&a {b: *")
SEEDS = {"seed", "items_seed"}  # any whole number is a seed
PARENTS: dict[str, dict[str, Any]] = {
    "model.init": {"model": {"init": {"architecture": "qwen3"}}},
    "kl_in_reward": {"kl_in_reward": {"weight": 0.1}},
    "teacher": {"teacher": {"name": "tiny"}},
    "data": {},
}


@cache
def _schema_of(annotation: Any) -> dict[str, Any]:
    return TypeAdapter(annotation).json_schema()


def types_of(field: FieldInfo) -> tuple[set[str], dict[str, Any]]:
    """The JSON types that a field takes, and its schema."""
    schema = _schema_of(_annotated(field))
    choices = schema.get("anyOf", [schema])
    return {str(choice.get("type", "ref" if "$ref" in choice else "any")) for choice in choices}, schema


def _annotated(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def bad_texts(field: FieldInfo, key: str) -> list[str]:
    """YAML that the field must refuse."""
    types, schema = types_of(field)
    choices = schema.get("anyOf", [schema])
    if "any" in types and not any("enum" in c or "const" in c for c in choices):
        return []
    last = key.rpartition(".")[2]
    lists_enum = any("enum" in c or "const" in c for c in choices)
    section = section_of(field.annotation)
    explains_enough = section is not None and not any(f.is_required() for f in section.model_fields.values())
    bad = []
    for text, fits in POOL:
        if text == "{}" and explains_enough:  # every key of the section has a default
            continue
        taken = set(types)
        if last in SEEDS and text in ("1e11", "1e30"):
            continue
        if "number" in taken and "integer" not in taken and text in ("-3",):
            limits = [c for c in choices if c.get("type") == "number"]
            if not all(c.get("minimum", c.get("exclusiveMinimum", -9)) >= 0 for c in limits):
                continue
            taken.discard("number")
        if "integer" in taken and text == "-3":
            limits = [c for c in choices if c.get("type") == "integer"]
            if not all(c.get("minimum", -9) >= 0 for c in limits):
                continue
            taken.discard("integer")
        if "number" in taken and text in ("7.5", "1e11", "1e30"):
            limits = [c for c in choices if c.get("type") == "number"]
            if all("maximum" in c or "exclusiveMaximum" in c for c in limits):
                taken.discard("number")
        if lists_enum:  # words from a list
            taken -= {"string", "boolean"} if "boolean" not in types else {"string"}
        if taken & fits:
            continue
        if "string" in taken and text == "''":
            continue
        bad.append(text)
    return bad


def is_component(annotation: Any) -> bool:
    args = getattr(annotation, "__args__", ())
    return (isinstance(annotation, type) and issubclass(annotation, Component)) or any(is_component(a) for a in args)


def section_of(annotation: Any) -> type[BaseModel] | None:
    choices = [annotation, *getattr(annotation, "__args__", ())]
    return next(
        (c for c in choices if isinstance(c, type) and issubclass(c, BaseModel) and not issubclass(c, Component)), None
    )


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.")


COMPONENT_TEXTS = (
    "7.5",
    "[]",
    "{}",
    "{nonsense: 1}",
    "nowhere_to_be_found",
    "{name: null}",
    "''",
    ".nan",
    "&a [*a]",
    "!!binary aGk=",
    "{name: 3}",
    '"\\ud800"',
    "9" * 5000,
    "{name: {name: grpo}}",
    "[null]",
)


def _bases() -> Iterator[tuple[str, tuple[str, ...], type[BaseModel], dict[str, Any]]]:
    yield "recipe", ("train",), Recipe, RL
    yield "sae recipe", ("sae", "train"), SaeRecipe, SAE
    yield "diff recipe", ("sae", "diff"), DiffRecipe, DIFF
    yield "sweep", ("sweep",), SweepFile, STUDY


def key_cases(random: Random) -> list[Case]:
    """Every key of every kind of recipe with values that it must refuse, in the file or as an option."""
    cases = []
    for _, command, model, base in _bases():
        for key, field in walk(model):
            head = key.partition(".")[0]
            own = merged(base, PARENTS.get(head, {}), PARENTS.get(".".join(key.split(".")[:2]), {}))
            if model is Recipe and head == "data":
                own = SFT
            word = is_component(field.annotation)
            texts = COMPONENT_TEXTS if word else bad_texts(field, key)
            for text in texts:
                if word and text in ("[]", "''") and "list" in str(field.annotation):
                    continue
                cases.append(_place(random, "key", command, own, key, text))
            if section_of(field.annotation) is not None and not word:
                cases += _unknown_keys(command, own, key, section_of(field.annotation))
    return cases


def _unknown_keys(command: tuple[str, ...], own: dict[str, Any], key: str, model: Any) -> list[Case]:
    cases = []
    in_file = (*command, "mine.yaml")
    for wrong in ("nonsense", "²", "x" * 300, next(iter(model.model_fields))[:-1] + "_"):
        name = f"{key}.{wrong}"
        names = (name[:40], wrong[:40], *(["a key of 300 characters"] if len(wrong) == 300 else []))
        cases.append(Case("unknown key", in_file, names, {"mine.yaml": partial(with_value, own, name, "1")}))
        good = {"mine.yaml": partial(with_value, own, "description", "x")}
        cases.append(Case("unknown key", (*in_file, f"--{name}", "1"), (name[:40], wrong[:40]), good))
    return cases


def _place(random: Random, kind: str, command: tuple[str, ...], own: dict[str, Any], key: str, text: str) -> Case:
    file = partial(with_value, own, key, text)
    where = (key, "mine.yaml:")
    if random.random() < 0.5 or text == "null" or text.startswith(NO_YAML):
        return Case(f"{kind}, file", (*command, "mine.yaml"), where, {"mine.yaml": file})
    raw = "" if text == "''" else text
    given = [f"--{key}={raw}"] if random.random() < 0.5 else [f"--{key}", " " + raw if raw.startswith("-") else raw]
    good = {"mine.yaml": partial(with_value, own, "description", "x")}
    return Case(f"{kind}, option", (*command, "mine.yaml", *given), (key, f"--{key}"), good)


MIXED: dict[str, Any] = {"name": "mixture", "parts": [{"task": {"name": "stories", "size": 64}}]}
# Where a word of each kind stands in a recipe, with what else the recipe then needs.
COMPONENT_PLACES: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "objective": (("train",), RL, "objective"),
    "advantage": (("train",), RL, "advantage"),
    "aggregation": (("train",), RL, "aggregate"),
    "mask": (("train",), merged(RL, {"masks": [{"name": "top_entropy"}]}), "masks.0"),
    "selection": (("train",), RL, "rollout.select"),
    "correction": (("train",), merged(RL, {"rollout": {"old_logprobs": "trainer"}}), "correction"),
    "reward": (("train",), RL, "rewards.0"),
    "grader": (("train",), merged(RL, {"rewards": [{"name": "correct"}]}), "rewards.0.mode"),
    "template": (("train",), RL, "prompt.template"),
    "task": (("train",), SFT, "task"),
    "environment": (("train",), merged(RL, {"environment": {"name": "calculator"}}), "environment"),
    "engine": (("train",), RL, "rollout.engine"),
    "optimizer": (("train",), RL, "optimizer"),
    "tracker": (("train",), merged(RL, {"track": [{"name": "tensorboard"}]}), "track.0"),
    "dictionary": (("sae", "train"), SAE, "dictionary"),
}
REQUIRED = {
    "path": "rows.jsonl",
    "dataset": "chain_sum",
    "run": "runs/x",
    "texts": ["a"],
    "length": 4,
    "limit": 8,
    "cache": 4,
    "threshold": 0.5,
    "parts": MIXED["parts"],
    "stages": [{"step": 1, "weights": {"stories": 1}}],
}


def option_cases(random: Random) -> list[Case]:
    """Every option of every registered word with values that it must refuse, and options that it has not."""
    cases = []
    for kind, (command, base, where) in COMPONENT_PLACES.items():
        for name, entry in registry.entries(kind).items():
            fields = entry.options_model.model_fields
            needed = {key: REQUIRED[key] for key, field in fields.items() if field.is_required()}
            own = with_component(base, where, {"name": name, **needed})
            for option, field in fields.items():
                key = f"{where}.{option}"
                if option in ("texts", "variables", "options", "mode"):
                    continue
                for text in bad_texts(field, key):
                    if option == "url" and text == "''":
                        continue
                    if text == "''" and field.annotation is str:
                        continue
                    case = _place(random, "option", command, own, key, text)
                    cases.append(replace(case, names=(*case.names, where)) if kind == "grader" else case)
            for wrong in ("nonsense", (next(iter(fields), "option") + "s")):
                if wrong not in fields:
                    cases.append(_place(random, "option", command, own, f"{where}.{wrong}", "1"))
    return cases


def with_component(base: dict[str, Any], where: str, word: dict[str, Any]) -> dict[str, Any]:
    recipe = merged(base)
    target: Any = recipe
    *above, last = where.split(".")
    for part in above:
        target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
    if isinstance(target, list):
        target[int(last)] = word
    else:
        target[last] = word
    return recipe
