"""Rows, models, functions and keywords of Python as what recipes name: files, folders, components and keys."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from posttrain import registry
from posttrain.api.arguments import plain_path, reading
from posttrain.api.config_objects import describe_config
from posttrain.data.reading import HUB, SUFFIXES
from posttrain.errors import PosttrainError, RecipeError, UsageError
from posttrain.option_types import shorten
from posttrain.other_names import OTHER_NAMES, answer_absent, answer_command, answer_option
from posttrain.recipes.document import known_keys
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import declare_code, declare_commands, kind_of_file

Place: TypeAlias = str | os.PathLike[str]
Function: TypeAlias = Callable[..., Any]
# A task by name or function, a file, a task with options, or rows (a list of mappings, a Dataset, a DataFrame).
Data: TypeAlias = Place | Function | Mapping[str, Any] | Iterable[Mapping[str, Any]]
Model: TypeAlias = Place | tuple[Any, Any]  # a name, a folder, a run; or a loaded model with its tokenizer
Reward: TypeAlias = str | Function | Mapping[str, Any]
Rewards: TypeAlias = Reward | Sequence[Reward | tuple[Reward, float]]  # a mapping without a name has weights
Override: TypeAlias = tuple[str, str]
# Folders next to the runs, for what Python gave them; hidden folders are no runs.
ROWS, MODELS = ".rows", ".models"
_NONE: Mapping[str, Any] = {}
# What the two numbers of an evaluation count, which many libraries call n.
_COUNTED = {"limit": "limit (rows)", "samples": "samples (answers to each)"}


@reading("data")
def data_word(data: Data, runs_dir: Place) -> dict[str, object]:
    """Return the task of what was given as data; rows become a file in ``runs_dir``, named by its content.

    Raises:
        UsageError: it is none of ``Data``.
    """
    if callable(data):
        return {"name": registry.name_function(data)}
    if isinstance(data, Mapping):
        if "name" not in data:
            raise UsageError(
                "data: a mapping is a task with its options, and this one has no 'name'. Give rows as a list of "
                f"mappings, or one split of a data set. There are: {', '.join(map(str, data))}"
            )
        return dict(data)
    if isinstance(data, str | os.PathLike):
        text = plain_path("data", data)
        is_code = ":" in text and not text.startswith(HUB) and not Path(text).exists()
        tasks = registry.names("task")
        if is_code or text in tasks:
            return {"name": text}
        is_file = text.lower().endswith(SUFFIXES) or text.startswith(HUB) or Path(text).exists()
        if not is_file:
            hint = registry.suggest(text, tasks)
            raise UsageError(f"data: {text!r} is no file and no task.{hint} A data set of the hub is {HUB}{text}")
        return {"name": "jsonl", "path": text}
    first, path = store_rows(data, runs_dir)
    name = "jsonl"
    if {"chosen", "preferred_output"} & first.keys():
        name = "preferences"
    return {"name": name, "path": str(path)}


def store_rows(rows: Iterable[Mapping[str, object]], runs_dir: Place) -> tuple[Mapping[str, object], Path]:
    """Write rows to a file named by their content, so that other processes find them; return the first, and its path.

    Raises:
        UsageError: there are no rows, or one is no mapping of plain values.
    """
    if not isinstance(rows, Iterable):
        raise UsageError(f"data: {type(rows).__name__} is no data. Give rows, a Dataset, a file or a task's name")
    table: Any = rows
    if hasattr(table, "iloc"):  # a DataFrame, which has NaN where a value is missing
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
    lines = list[str]()
    first = None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UsageError(f"data: row {number} is a {type(row).__name__}. Give a mapping, such as a dict")
        try:
            lines.append(json.dumps(_without_nulls(row), default=_plain))
        except (TypeError, ValueError) as error:
            raise UsageError(f"data: row {number} cannot be stored as JSON: {error}. Give texts and numbers") from None
        if first is None:
            first = row
    if first is None:
        raise UsageError("data: there are no rows. Give at least one")
    content = "".join(f"{line}\n" for line in lines).encode()
    path = Path(runs_dir).absolute() / ROWS / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        with storage_errors("the rows", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return first, path


def _without_nulls(value: object) -> object:
    """Leave out keys without a value, as columns of a table have them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(one) for one in value]
    return value


def _plain(value: object) -> Any:
    """Return arrays and numbers of numpy or torch as lists and numbers, functions and paths as their names."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value):
        return registry.name_function(value)
    raise TypeError(f"a {type(value).__name__} is neither text nor number, list nor mapping")


@reading("model")
def model_name(model: Model, runs_dir: Place) -> str:
    """Return the name of a model, or of a run its folder; a loaded one is saved in a folder named by its weights.

    Raises:
        UsageError: it is none of ``Model``.
    """
    if isinstance(model, str | os.PathLike):
        name = plain_path("model", model)
        run = Path(runs_dir) / name
        is_run = name not in EMBEDDED_MODELS and kind_of_file(run / "recipe.yaml") == "file"
        if is_run:
            return str(run)
        return name
    if not (isinstance(model, tuple) and len(model) == 2 and all(hasattr(part, "save_pretrained") for part in model)):
        raise UsageError(
            f"model: {type(model).__name__} is no model. Give a name, a folder, a run, or a loaded model of "
            "transformers with its tokenizer: (model, tokenizer)"
        )
    place = Path(runs_dir).absolute() / MODELS
    with storage_errors("the model", place):
        place.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place, prefix=".tmp-") as aside:
            for part in model:
                part.save_pretrained(aside)
            digest = hashlib.sha256()
            for file in sorted(Path(aside).rglob("*")):
                with suppress(IsADirectoryError), file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            folder = place / digest.hexdigest()[:16]
            if not folder.is_dir():
                os.rename(aside, folder)
                os.mkdir(aside)  # which the block removes
    return str(folder)


@reading("rewards")
def reward_words(rewards: Rewards) -> list[dict[str, object]]:
    """Return the entries of ``rewards`` in a recipe: names, functions, each maybe with a weight.

    A mapping is one reward, if it has a ``name``, else rewards with their weights.

    Raises:
        UsageError: one is something else.
    """
    listed: Any = rewards
    if isinstance(rewards, Mapping) and "name" not in rewards:
        listed = rewards.items()
    elif isinstance(rewards, str) or not isinstance(rewards, Sequence):
        listed = [rewards]
    words = []
    for number, given in enumerate(listed):
        reward = given
        weight = None
        if isinstance(given, tuple) and len(given) == 2:
            reward, weight = given
        if not (callable(reward) or isinstance(reward, str | Mapping)):
            raise UsageError(
                f"rewards.{number}: {type(reward).__name__} is no reward. Give a name, a function, a mapping with "
                "name and options, or one of these with its weight: (short, 0.1)"
            )
        if callable(reward):
            word: dict[str, object] = {"name": registry.name_function(reward)}
        elif isinstance(reward, Mapping):
            word = dict(reward)
        else:
            word = {"name": reward}
        if weight is not None:
            word["weight"] = weight
        words.append(word)
    return words


def overrides_of(keys: Mapping[str, object]) -> list[Override]:
    """Return keywords as dotted keys of a recipe, with their values as the command line would have them.

    ``lr`` is ``train.lr``, as no other section has it; ``rollout__max_tokens``, ``rollout={"max_tokens": 96}`` and
    ``**{"rollout.max_tokens": 96}`` are the same. A function stands for its name.

    Raises:
        RecipeError: no section has such a key, or several have; the message says what would do.
    """
    pairs = []
    with reading("keys of the recipe"):
        for name, value in keys.items():
            pairs += _flat(_whole_key(name), value)
        refuse_repeats(pairs)
    declare_code([text for _, text in pairs], os.getcwd())
    declare_commands((f"--{key}={text}", "") for key, text in pairs)
    return pairs


def refuse_repeats(overrides: list[Override]) -> list[Override]:
    """Return the overrides, in which no key stands twice.

    Raises:
        RecipeError: one does; ``data`` is ``task``, ``eval_data`` is ``eval.tasks``, ``model`` is ``model.name``.
    """
    counts = Counter(key.replace("-", "_").removesuffix(".name") for key, _ in overrides)
    for key, count in counts.items():
        if count > 1:
            same = {"task": " (data is the task)", "model": " (model is model.name)"}.get(key, "")
            raise RecipeError(f"{key}: given twice{same}. Give it once")
    return overrides


@reading("recipe")
def plain_recipe(recipe: Place | Mapping[str, object]) -> str | dict[str, Any]:
    """Return the name or file of a recipe, or its content as plain data, with functions by their names.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(recipe, Mapping):
        return {key: json.loads(_as_json(key, value)) for key, value in recipe.items()}
    if not isinstance(recipe, str | os.PathLike):
        how = describe_config(recipe) or ". Give a name (tiny/grpo), a YAML file, or a mapping"
        raise UsageError(f"recipe: {type(recipe).__name__} is none{how}")
    return plain_path("recipe", recipe)


def _flat(key: str, value: object) -> list[Override]:
    if isinstance(value, Mapping) and value and "name" not in value:
        return list(chain.from_iterable(_flat(f"{key}.{name}", part) for name, part in value.items()))
    return [(key, _as_json(key, value))]


def _as_json(key: str, value: object) -> str:
    with reading(key):
        try:
            return json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{key}: {error}. Give a plain value, or a function") from None


def _whole_key(name: str) -> str:
    dotted = name.replace("__", ".")
    if "." in dotted or dotted in Recipe.model_fields:
        return dotted
    sections = {section: known_keys(Recipe, [section]) for section in Recipe.model_fields}
    inside = [f"{section}.{name}" for section, known in sections.items() if name in known]
    called = OTHER_NAMES.get(name)
    if called in inside:
        return called
    if len(inside) == 1:
        return inside[0]
    if inside:
        keys = " or ".join(key.replace(".", "__") for key in inside)
        raise RecipeError(f"{name}: several sections of a recipe have this key. Write {keys}")
    every = [key for known in sections.values() for key in known] + list(sections)
    hint = registry.suggest_key(name, every)
    raise RecipeError(f"{name}: no section of a recipe has this key.{hint} `posttrain explain` describes them")


def check_inputs(
    needed: Mapping[str, object],
    optional: Mapping[str, object],
    others: Mapping[str, object] = _NONE,
    arguments: Mapping[str, str] = _NONE,
    command: str = "",
) -> None:
    """Refuse an argument that is no whole number from 1 on (an ``optional`` one may be None), and all ``others``.

    ``arguments``: those that the function has, by the option of the command that does the same.

    Raises:
        UsageError: with the name of the argument, and the one that is meant.
    """
    for name in others:
        raise UsageError(f"{name}: there is no such argument.{_argument_hint(name, arguments, command)}")
    given = dict(needed)
    for name, value in optional.items():
        if value is not None:
            given[name] = value
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
            raise UsageError(f"{name}: {shorten(value)} is no whole number from 1 on. Give one")


def _argument_hint(name: str, arguments: Mapping[str, str], command: str) -> str:
    """Return what an unknown argument is called here; ``arguments``: those that there are, by the command's options."""
    options = answer_option(name, arguments).split(" or ")
    meant = [arguments[option] for option in options if option in arguments]
    if meant:
        return f" This is called {' or '.join(_COUNTED.get(one, one) for one in meant)} here."
    hint = answer_command(command, name) or answer_absent(name) or registry.suggest(name, arguments.values())
    return hint or " The docstring describes those that there are"


@contextmanager
def without_command_line() -> Iterator[None]:
    """Leave the words ``command line`` out of the errors in the block: keys were given in Python."""
    try:
        yield
    except PosttrainError as error:
        error.args = (str(error).replace("command line: ", ""), *error.args[1:])
        raise
