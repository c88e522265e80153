"""Words of a recipe as options of a command: ``--task stories --task.size 5``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from posttrain.errors import UsageError
from posttrain.recipes.document import apply_override
from posttrain.recipes.sections import Word, read_word


def chosen_words(arguments: argparse.Namespace) -> dict[str, Word]:
    """The words ``task`` and ``template`` of a command that takes one of each."""
    return {section: words[0] for section, words in words_of(arguments).items() if words}


def words_of(arguments: argparse.Namespace, sections: Sequence[str] = ("task", "template")) -> dict[str, list[Word]]:
    """The words of some kinds that the command line names (``--task``, ``--template``), each with its options.

    ``--task.key`` belongs to the only task, or to the model's own where none is named; with several it is
    ``--task.NAME.key``.

    Raises:
        UsageError: an option that belongs to none, or might belong to several.
    """
    named = {section: list(dict.fromkeys(_as_list(getattr(arguments, section, None)))) for section in sections}
    data = {section: {name: {"name": name} for name in names or [""]} for section, names in named.items()}
    for key, value in arguments.overrides:
        section, _, rest = key.partition(".")
        owner, own_key = _owner(section, rest, named[section])
        wrapped: dict[str, Any] = {section: data[section][owner]}
        apply_override(wrapped, f"{section}.{own_key}", value)
    words = {section: [read_word(word, f"--{section}") for word in own.values()] for section, own in data.items()}
    return {  # a name that is empty was given, and is refused where it is looked up
        section: [word for word in own if word.name or word.options or named[section]] for section, own in words.items()
    }


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _owner(section: str, key: str, names: Sequence[str]) -> tuple[str, str]:
    """Which of the named words an option belongs to, and its key there."""
    for name in sorted(names, key=len, reverse=True):
        if key.startswith(f"{name}."):
            return name, key.removeprefix(f"{name}.")
    if len(names) <= 1:
        return (names[0] if names else ""), key
    options = ", ".join(f"--{section}.{name}.{key}" for name in names)
    raise UsageError(f"--{section}.{key}: several are named, so say whose option this is: {options}")
