"""The parts of a mixture as a recipe states them: a task, its weight, and its name. Nothing is imported for them.

``task: {name: mixture, parts: [{task: gsm8k, weight: 2}, {task: {name: math}, name: hard}]}``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from posttrain import registry
from posttrain.errors import RecipeError, UnknownWord
from posttrain.option_types import Options
from posttrain.recipes.sections import Word

MIXTURE = "mixture"
_NAME = re.compile(r"[\w.+-]{1,64}")


class _StatedPart(Options):
    task: Word
    weight: float = Field(default=1.0, gt=0)
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a mixture: its name, how much it counts beside the others, and its task."""

    name: str
    weight: float
    task: Word

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "weight": self.weight, "task": self.task.model_dump()}


def parts_of(word: Word) -> list[Part]:
    """The parts of a mixture; of any other task none.

    Raises:
        RecipeError: they are not stated as they should be; see ``broken_parts``.
    """
    return read_parts(word.options.get("parts"), "task") if word.name == MIXTURE else []


def task_words(word: Word) -> list[Word]:
    """The words of a mixture's parts; of any other task the word itself."""
    return [part.task for part in parts_of(word)] or [word]


def map_tasks(word: Word, change: Callable[[Word], Word]) -> Word:
    """``change`` of a task; of a mixture the same mixture of changed parts."""
    parts = parts_of(word)
    if not parts:
        return change(word)
    changed = [Part(part.name, part.weight, change(part.task)).plain() for part in parts]
    return Word(name=word.name, **(word.options | {"parts": changed}))


def read_parts(stated: Any, where: str) -> list[Part]:
    """The parts that stand in the key ``parts`` of ``where``.

    Raises:
        RecipeError: the first thing that is wrong with them.
    """
    for key, says in broken_parts(stated, where):
        raise RecipeError(f"{key}{says}")
    parts = [_StatedPart.model_validate(part) for part in stated]
    return [Part(_name_of(part), part.weight, part.task) for part in parts]


def broken_parts(stated: Any, where: str) -> Iterator[tuple[str, str]]:
    """What is wrong with the parts of a mixture: the dotted key, and what goes on behind it."""
    if not isinstance(stated, list) or not stated:
        yield f"{where}.parts", ": give a list of parts, each with a task, such as [{task: gsm8k, weight: 2}]"
        return
    first_of: dict[str, int] = {}
    for number, entry in enumerate(stated):
        key = f"{where}.parts.{number}"
        try:
            part = _StatedPart.model_validate(entry)
        except ValidationError as error:
            explained = registry.explain_validation(error, _StatedPart.model_fields, key, "a part")
            place, _, says = explained.partition(":")
            yield place, f":{says}"
            continue
        name = part.task.name
        if name == MIXTURE:
            yield f"{key}.task", ": a part is no mixture itself; write its parts beside the others"
        elif ":" not in name and name not in registry.names("task"):
            try:
                registry.find("task", name)
            except UnknownWord as error:
                yield f"{key}.task", f": {error}"
        name = _name_of(part)
        if not _NAME.fullmatch(name):
            yield f"{key}.name", f": a part's name is made of letters, digits and _ . + -; got {name[:80]!r}"
        if name in first_of:
            other = f"{where}.parts.{first_of[name]}"
            yield f"{key}.name", f": {other} is called {name!r}, too; give one of them another 'name'"
        first_of.setdefault(name, number)


def _name_of(part: _StatedPart) -> str:
    return part.task.name.rpartition(":")[2] if part.name is None else part.name
