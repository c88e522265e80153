"""What every task that reads rows has in common: how many, where their file may lie, and where it is to be had."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import DataNotThere, MissingExtra
from posttrain.file_kinds import kind_of_file
from posttrain.option_types import Seed
from posttrain.randomness import permutation
from posttrain.strict_yaml import read_yaml
from posttrain.tasks.base import Task
from posttrain.tasks.reading import FOLDER, SUFFIXES

Reader = Callable[..., Task]
# What the docstring of every reader says of its two further options, behind its own.
_ABOUT = """
    size: of the split, so many examples, drawn by ``seed``; the others are counted as left out. Without it, and where
        there are fewer, all of them. The size of a training split does not cut what is held out.
    seed: another seed, other examples."""


def reads_rows(read: Reader) -> Reader:
    """A task that reads rows, with the options ``size`` and ``seed`` beside its own; stands below ``register``.

    Where no path is asked for, its file is looked for in the folder POSTTRAIN_DATA (``places.yaml``) before the hub is
    asked; what is not there is refused with where it is to be had.
    """
    own = inspect.signature(read, eval_str=True).parameters
    place = _places().get(read.__name__, {})

    @wraps(read)
    def sized(*, size: int | None = None, seed: int = 0, **options: Any) -> Task:
        try:
            origin = None
            if place and options.get("path") is None:
                options |= _local_files(read.__name__, str(options.get("split", _default(own, "split"))), options)
                if options.get("path") is None and own["path"].default is inspect.Parameter.empty:
                    raise DataNotThere("task.path", "no file is named")
                origin = options.get("path")
            return replace(choose_size(read(**options), size, seed), origin=origin)
        except (DataNotThere, MissingExtra) as error:
            error.args = (f"{error}{_where_to_get(read.__name__, place)}",)
            raise

    further = (("size", Annotated[int, Field(ge=1)] | None, None), ("seed", Seed, 0))
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [*own.values(), *(inspect.Parameter(n, kind, default=d, annotation=a) for n, a, d in further)]
    if place:  # a path that must be named may be left to POSTTRAIN_DATA
        needed = own["path"].default is inspect.Parameter.empty
        optional = own["path"].replace(default=None, annotation=str | None) if needed else own["path"]
        parameters = [optional if p.name == "path" else p for p in parameters]
    sized.__signature__ = inspect.Signature(parameters, return_annotation=Task)  # type: ignore[attr-defined]
    about, raises, rest = (inspect.getdoc(read) or "").partition("\n\nRaises:")
    sized.__doc__ = f"{about}{_ABOUT}{raises}{rest}"
    return sized


def choose_size(task: Task, size: int | None, seed: int) -> Task:
    """The task with at most ``size`` examples, a function of (seed, size, number of examples), in their own order."""
    there = len(task.examples)
    if size is None or size >= there:
        return task
    chosen = sorted(int(i) for i in permutation(seed, "size", 0, there)[:size])
    dropped = task.dropped | {f"beyond task.size={size}": there - size}
    return replace(task, examples=[task.examples[i] for i in chosen], dropped=dropped)


@cache
def _places() -> Mapping[str, Mapping[str, Any]]:
    """The table of where rows are to be had, by task."""
    text = (resources.files("posttrain") / "tasks" / "places.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = read_yaml(text, "places.yaml")[0]
    return table


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> Any:
    return parameters[name].default if name in parameters else "test"


def _local_files(name: str, split: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The options that name the task's files in the folder POSTTRAIN_DATA; none where there are no such files."""
    place = _places()[name]
    listed = place.get("files", {})
    # a validation split is a part of the training rows, unless it has a file of its own
    source = "train" if split == "validation" and "validation" not in listed else split
    path = _find([f"{name}/{source}", *listed.get(source, ())])
    if path is None:
        return {}
    further = {key: _find([f"{name}/{of}"]) for key, of in place.get("also", {}).items() if options.get(key) is None}
    return {"path": path, **{key: file for key, file in further.items() if file is not None}}


def _find(names: list[str]) -> str | None:
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    files = (Path(folder) / f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    return next((str(file) for file in files if kind_of_file(file) == "file"), None)


def _where_to_get(name: str, place: Mapping[str, Any]) -> str:
    if not place:
        return f". {name} reads a file of yours: name it as task.path, or by its name in the folder {FOLDER}"
    return (
        f". Where to get it: {place['url']} (licence: {place['licence']}), for instance by: {place['get']}. Name the "
        f"file as task.path, or put it as {name}/train.jsonl or {name}/test.jsonl into a folder that {FOLDER} names"
    )
