"""Conversion of Python rows, models, functions and keyword arguments to recipe values."""

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
# A task name or function, a file, a task with options, or rows (list of mappings, Dataset, DataFrame).
Data: TypeAlias = Place | Function | Mapping[str, Any] | Iterable[Mapping[str, Any]]
Model: TypeAlias = Place | tuple[Any, Any]  # a name, a folder, a run, or a loaded (model, tokenizer)
Reward: TypeAlias = str | Function | Mapping[str, Any]
Rewards: TypeAlias = Reward | Sequence[Reward | tuple[Reward, float]]  # a mapping without a name has weights
Override: TypeAlias = tuple[str, str]
# Hidden folders in runs_dir for rows and models given in Python. Hidden folders are never listed as runs.
ROWS, MODELS = ".rows", ".models"
_NONE: Mapping[str, Any] = {}
# Both evaluation counts are called n by many libraries.
_COUNTED = {"limit": "limit (rows)", "samples": "samples (answers to each)"}


@reading("data")
def data_word(data: Data, runs_dir: Place) -> dict[str, object]:
    """Convert data to a task. Rows are saved in ``runs_dir``, in a file named by content hash.

    Raises:
        UsageError: not a valid ``Data`` value.
    """
    if callable(data):
        return {"name": registry.name_function(data)}
    if isinstance(data, Mapping):
        if "name" not in data:
            raise UsageError(
                "data: a mapping describes a task, and 'name' is missing. Give rows as a list of "
                f"mappings, or select a dataset split. Keys found: {', '.join(map(str, data))}"
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
            raise UsageError(f"data: {text!r} is neither a file nor a task.{hint} For a hub dataset, write {HUB}{text}")
        return {"name": "jsonl", "path": text}
    first, path = store_rows(data, runs_dir)
    name = "jsonl"
    if {"chosen", "preferred_output"} & first.keys():
        name = "preferences"
    return {"name": name, "path": str(path)}


def store_rows(rows: Iterable[Mapping[str, object]], runs_dir: Place) -> tuple[Mapping[str, object], Path]:
    """Save rows in a file named by content hash, so other processes can read them.

    Returns:
        The first row and the file path.

    Raises:
        UsageError: no rows, or a row that cannot be stored as JSON.
    """
    if not isinstance(rows, Iterable):
        raise UsageError(f"data: {type(rows).__name__} is not data. Give rows, a Dataset, a file or a task name")
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
            raise UsageError(
                f"data: row {number} cannot be stored as JSON: {error}. Give strings and numbers"
            ) from None
        if first is None:
            first = row
    if first is None:
        raise UsageError("data: no rows. Give at least one")
    content = "".join(f"{line}\n" for line in lines).encode()
    path = Path(runs_dir).absolute() / ROWS / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        with storage_errors("the rows", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return first, path


def _without_nulls(value: object) -> object:
    """Drop keys with a None value, as table columns produce them."""
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
    raise TypeError(f"a {type(value).__name__} is not a string, number, list or mapping")


@reading("model")
def model_name(model: Model, runs_dir: Place) -> str:
    """Convert a model to a name or folder. A loaded model is saved in a folder named by its weight hash.

    Raises:
        UsageError: not a valid ``Model`` value.
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
            f"model: {type(model).__name__} is not a model. Give a name, a folder, a run, or a loaded "
            "transformers model and tokenizer: (model, tokenizer)"
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
                os.mkdir(aside)  # the context manager deletes it
    return str(folder)


@reading("rewards")
def reward_words(rewards: Rewards) -> list[dict[str, object]]:
    """Convert ``rewards`` to recipe entries: names or functions with optional weights.

    A mapping with ``name`` is a single reward. Any other mapping lists rewards with weights.

    Raises:
        UsageError: not a reward.
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
                f"rewards.{number}: {type(reward).__name__} is not a reward. Give a name, a function, a mapping with "
                "name and options, or a pair with a weight: (short, 0.1)"
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
    """Convert keyword arguments to dotted recipe keys, with values in command line syntax.

    ``lr`` means ``train.lr``, because no other section has this key. ``rollout__max_tokens``,
    ``rollout={"max_tokens": 96}`` and ``**{"rollout.max_tokens": 96}`` are equivalent. Functions are converted to
    names.

    Raises:
        RecipeError: an unknown or ambiguous key. The message suggests valid keys.
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
    """Check that every key is given once.

    Raises:
        RecipeError: a repeated key. ``data`` is ``task``, ``eval_data`` is ``eval.tasks``, ``model`` is
            ``model.name``.
    """
    counts = Counter(key.replace("-", "_").removesuffix(".name") for key, _ in overrides)
    for key, count in counts.items():
        if count > 1:
            same = {"task": " (data is the task)", "model": " (model is model.name)"}.get(key, "")
            raise RecipeError(f"{key}: given twice{same}. Give it once")
    return overrides


@reading("recipe")
def plain_recipe(recipe: Place | Mapping[str, object]) -> str | dict[str, Any]:
    """Convert a recipe to a name, a path, or plain data with functions replaced by names.

    Raises:
        UsageError: anything else.
    """
    if isinstance(recipe, Mapping):
        return {key: json.loads(_as_json(key, value)) for key, value in recipe.items()}
    if not isinstance(recipe, str | os.PathLike):
        how = describe_config(recipe) or ". Give a name (tiny/grpo), a YAML file, or a mapping"
        raise UsageError(f"recipe: {type(recipe).__name__} is not a recipe{how}")
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
            raise RecipeError(f"{key}: {error}. Give plain values or functions") from None


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
        raise RecipeError(f"{name}: several recipe sections have this key. Write {keys}")
    every = [key for known in sections.values() for key in known] + list(sections)
    hint = registry.suggest_key(name, every)
    raise RecipeError(f"{name}: unknown recipe key.{hint} `posttrain explain` describes them")


def check_inputs(
    needed: Mapping[str, object],
    optional: Mapping[str, object],
    others: Mapping[str, object] = _NONE,
    arguments: Mapping[str, str] = _NONE,
    command: str = "",
) -> None:
    """Check that numbers are positive integers and reject unknown arguments.

    Args:
        needed: required numbers, by argument name.
        optional: numbers that may be None.
        others: unknown keyword arguments.
        arguments: valid argument names, by equivalent command line option.
        command: equivalent command, for suggestions.

    Raises:
        UsageError: includes the argument name and a suggestion.
    """
    for name in others:
        raise UsageError(f"{name}: unknown argument.{_argument_hint(name, arguments, command)}")
    given = dict(needed)
    for name, value in optional.items():
        if value is not None:
            given[name] = value
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
            raise UsageError(f"{name}: {shorten(value)} is not a positive integer. Give 1 or more")


def _argument_hint(name: str, arguments: Mapping[str, str], command: str) -> str:
    """Suggest a replacement for an unknown argument."""
    options = answer_option(name, arguments).split(" or ")
    meant = [arguments[option] for option in options if option in arguments]
    if meant:
        return f" This is called {' or '.join(_COUNTED.get(one, one) for one in meant)} here."
    hint = answer_command(command, name) or answer_absent(name) or registry.suggest(name, arguments.values())
    return hint or " See the docstring for valid arguments"


@contextmanager
def without_command_line() -> Iterator[None]:
    """Drop ``command line:`` from error messages, since the keys come from Python."""
    try:
        yield
    except PosttrainError as error:
        error.args = (str(error).replace("command line: ", ""), *error.args[1:])
        raise
