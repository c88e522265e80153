"""A recipe: YAML plus overrides, strict, with a resolved dump that reruns it.

A recipe names *words* (objective, advantage, reward, task, ...), whose options are checked against
the signature of the function of that name, and a few ``sections`` for the machinery.
Unknown keys are refused with a suggestion and the line in the file. No torch is imported here;
``Recipe.resolve`` imports the modules of the words that the recipe names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.sections import (
    AdapterSection,
    DataSection,
    EvalSection,
    InitSection,
    ModelSection,
    PromptSection,
    RewardWord,
    RolloutSection,
    Section,
    TokenizerSection,
    TrainSection,
    Word,
    as_list,
)

__all__ = [
    "AdapterSection",
    "DataSection",
    "EvalSection",
    "InitSection",
    "ModelSection",
    "PromptSection",
    "Recipe",
    "RewardWord",
    "RolloutSection",
    "TokenizerSection",
    "TrainSection",
    "Word",
    "apply_override",
    "load_recipe",
    "parse_yaml",
    "recipe_names",
    "recipe_text",
    "validate_recipe",
]


WORD_KINDS = {
    "task": "task",
    "objective": "objective",
    "advantage": "advantage",
    "aggregate": "aggregation",
    "optimizer": "optimizer",
}


class Recipe(Section):
    """One experiment. ``rollout`` makes it reinforcement learning, ``data`` supervised training."""

    description: str = ""
    model: ModelSection = Field(default_factory=ModelSection)
    task: Word
    prompt: PromptSection = Field(default_factory=PromptSection)
    rewards: Annotated[list[RewardWord], BeforeValidator(as_list)] = Field(default_factory=list)
    rollout: RolloutSection | None = None
    data: DataSection | None = None
    advantage: Word | None = None
    objective: Word
    aggregate: Word = Word(name="token_mean")
    optimizer: Word = Word(name="adamw")
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if (self.rollout is None) == (self.data is None):
            raise ValueError("give exactly one of 'rollout' (reinforcement learning) and 'data' (supervised)")
        if self.rollout is not None and self.advantage is None:
            self.advantage = Word(name="normalized")
        if self.rollout is not None and not self.rewards:
            self.rewards = [RewardWord(name="correct")]
        if self.data is not None and (self.advantage is not None):
            raise ValueError("'advantage' belongs to 'rollout'; a supervised recipe has none")
        if self.data is not None and self.train.minibatches * self.train.epochs != 1:
            raise ValueError("train.epochs and train.minibatches count passes over a rollout batch; 'data' has none")
        return self

    def resolve(self) -> Recipe:
        """The recipe with every word's options checked and all their defaults filled in.

        Raises:
            UnknownWord, RecipeError: with the key that is wrong.
        """
        resolved = self.model_copy(deep=True)
        for key, kind in WORD_KINDS.items():
            word = getattr(resolved, key)
            if word is not None:
                setattr(resolved, key, _resolve_word(word, kind, key))
        resolved.prompt.template = _resolve_word(resolved.prompt.template, "template", "prompt.template")
        if resolved.rollout is not None:
            resolved.rollout.engine = _resolve_word(resolved.rollout.engine, "engine", "rollout.engine")
        resolved.rewards = [_resolve_word(w, "reward", f"rewards.{i}") for i, w in enumerate(resolved.rewards)]
        resolved.eval.tasks = [_resolve_word(w, "task", f"eval.tasks.{i}") for i, w in enumerate(resolved.eval.tasks)]
        return resolved

    def dump(self) -> dict[str, Any]:
        """Plain data, without keys that are None."""
        return _without_none(self.model_dump(mode="json"))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.dump(), sort_keys=False, allow_unicode=True, width=100)

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of the resolved recipe; two runs with it are the same experiment."""
        content = json.dumps(self.dump(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _resolve_word(word: Any, kind: str, where: str) -> Any:
    entry = registry.find(kind, word.name, where)
    options = entry.options(word.options, where)
    fixed = {name: getattr(word, name) for name in type(word).model_fields}
    return type(word)(**fixed, **json.loads(json.dumps(options)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value


def recipe_names() -> list[str]:
    """Names of the recipes that ship in the package, such as ``tiny/grpo``."""
    root = resources.files("posttrain") / "recipes"
    return sorted(_walk(root, ""))


def _walk(folder: Any, prefix: str) -> Iterator[str]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _walk(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".yaml"):
            yield prefix + item.name.removesuffix(".yaml")


def recipe_text(name_or_path: str) -> tuple[str, str]:
    """(place, text) of a recipe file, or of a shipped recipe by name.

    Raises:
        RecipeError: neither a file nor a known name.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file")
        try:
            return str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: not a text file in UTF-8") from None
    known = recipe_names()
    if name_or_path not in known:
        hint = registry.suggest(name_or_path, known)
        raise RecipeError(f"no recipe file or shipped recipe {name_or_path!r}.{hint} `posttrain recipes` lists them")
    resource = resources.files("posttrain") / "recipes" / f"{name_or_path}.yaml"
    return f"{name_or_path}.yaml", resource.read_text(encoding="utf-8")


def load_recipe(name_or_path: str, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Read a recipe, apply dotted overrides, validate. Words are checked by ``resolve``.

    Raises:
        RecipeError: with file, line and key.
    """
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place)
    for key, value in overrides:
        apply_override(data, key, value)
    return validate_recipe(data, place, lines, {key for key, _ in overrides})


def validate_recipe(
    data: Mapping[str, Any],
    place: str = "recipe",
    lines: Mapping[str, int] | None = None,
    overridden: Sequence[str] | set[str] = (),
) -> Recipe:
    """A ``Recipe`` from plain data; errors name ``place``, the line and the key."""
    numbers = dict(lines or {})

    def line_of(key: str) -> str:
        if key in overridden:
            return "command line: "
        probe = key
        while probe:
            if probe in numbers:
                return f"{place}:{numbers[probe]}: "
            probe = probe.rpartition(".")[0]
        return f"{place}: "

    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines_out = []
        for item in error.errors():
            path = [str(part) for part in item["loc"]]
            single = ValidationError.from_exception_data("recipe", [_as_init_error(item)])
            known = _known_keys(path[:-1])
            label = f"section {'.'.join(path[:-1])!r}" if path[:-1] else "a recipe"
            lines_out.append(registry.explain_validation(single, known, "", label, line_of))
        raise RecipeError("\n".join(lines_out)) from None


def _as_init_error(item: Any) -> Any:
    if item["type"] in ("extra_forbidden", "missing"):
        return {"type": item["type"], "loc": item["loc"], "input": item["input"]}
    from pydantic_core import PydanticCustomError

    message = item["msg"].removeprefix("Value error, ").replace("{", "(").replace("}", ")")
    return {"type": PydanticCustomError("invalid", message), "loc": item["loc"], "input": item["input"]}


def _known_keys(path: Sequence[str]) -> list[str]:
    model: Any = Recipe
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(model.model_fields) if model is not None else []


def parse_yaml(text: str, place: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in ``text`` and the 1-based line of every dotted key.

    Raises:
        RecipeError: not YAML, not a mapping, or a key given twice.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{place}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{place}: a recipe is a mapping of sections (model, task, objective, ...)")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines, place)
    return data, lines


def _collect_lines(node: Any, prefix: str, lines: dict[str, int], place: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            if key in lines:
                raise RecipeError(f"{place}:{key_node.start_mark.line + 1}: {key}: this key stands twice")
            lines[key] = key_node.start_mark.line + 1
            _collect_lines(value_node, f"{key}.", lines, place)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[f"{prefix}{i}"] = item.start_mark.line + 1
            _collect_lines(item, f"{prefix}{i}.", lines, place)


def apply_override(data: dict[str, Any], key: str, value: str) -> None:
    """Set a dotted key (``train.lr``, ``rewards.0.weight``) in plain data, in place.

    ``value`` is read as YAML. Setting a whole word by name (``objective reinforce``) replaces the
    word and its options; ``objective.name`` changes the name alone.

    Raises:
        RecipeError: the path runs through something that is not a section.
    """
    try:
        parsed = yaml.safe_load(value) if value else ""
    except yaml.YAMLError:
        parsed = value
    if isinstance(parsed, str):  # YAML 1.1 reads 1e-4 as text; people mean a number
        with suppress(ValueError):
            parsed = float(parsed)
    target: Any = data
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        path = ".".join(parts[: i + 1])
        if isinstance(target, list):
            target = _list_item(target, part, path)
            continue
        child = target.get(part)
        if child is None:
            child = target[part] = {}
        elif isinstance(child, str):  # a bare word gains options
            child = target[part] = {"name": child}
        elif not isinstance(child, dict | list):
            raise RecipeError(f"command line: {key}: {path} is a value, not a section")
        target = child
    if isinstance(target, list):
        index = int(parts[-1]) if parts[-1].isdigit() and int(parts[-1]) < len(target) else None
        if index is None:
            raise RecipeError(f"command line: {key}: the list has entries 0 to {len(target) - 1}")
        target[index] = parsed
    else:
        target[parts[-1]] = parsed


def _list_item(target: list[Any], part: str, path: str) -> Any:
    if not part.isdigit() or int(part) >= len(target):
        raise RecipeError(f"command line: {path}: the list has entries 0 to {len(target) - 1}")
    index = int(part)
    if isinstance(target[index], str):
        target[index] = {"name": target[index]}
    return target[index]
