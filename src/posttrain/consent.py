"""What the person at the command line allows to run: functions of their own, and the Python of a model.

A recipe may name code (``objective: mine:surprised``), and so may the recipe that a run has stored. A run may come
from anywhere, so opening one imports nothing: a name of the form ``module:function`` is imported only if it was
*declared*. Declared is what stands on the command line (``--objective mine:surprised``, ``--allow-code
mine:surprised``), looked for in the working directory; and what stands in a recipe file that was given to be
trained, looked for beside that file and then in the working directory. What a run's own files name is not.

The Python of a model (``trust_remote_code``) is run for the flag ``--trust-remote-code`` alone; no file can ask for it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError, UnallowedCode

ALLOW_CODE, TRUST_REMOTE_CODE = "--allow-code", "--trust-remote-code"
REMOTE_CODE = "trust_remote_code"
STORED_RECIPE = "recipe.yaml"
_PLAN = "sweep.yaml"
# What stands beside a recipe in a run, and beside a plan in a comparison.
_RECORDS = ("status.json", "env.json", "checkpoints", "cells")
_NAME = re.compile(r"(?<![\w./])[^\W\d][\w.]*:[^\W\d]\w*(?![\w:])")

_FOLDERS: dict[str, tuple[str, ...]] = {}  # declared names, and where their modules are looked for
_IMPORTED: set[str] = set()
_REMOTE_CODE = [False]


def declare_code(content: Any, *folders: str | Path) -> None:
    """Allow every ``module:function`` in ``content`` (text, or plain data of a document), from these folders on."""
    places = [os.path.abspath(folder) for folder in folders]
    for text in _texts(content):
        for name in _NAME.findall(text):
            _FOLDERS[name] = tuple(dict.fromkeys((*_FOLDERS.get(name, ()), *places)))


def declare_from_command_line(
    arguments: Iterable[str], allowed: Iterable[str] = (), *, trust_remote_code: bool = False
) -> None:
    """Allow what was typed; ``allowed`` are ``module:function`` or ``module:function@FOLDER`` (``--allow-code``).

    Raises:
        UnallowedCode: one of ``allowed`` is no such name, or its folder is not there.
    """
    for text in allowed:
        name, at, folder = text.partition("@")
        if not _NAME.fullmatch(name):
            raise UnallowedCode(f"{ALLOW_CODE} {text!r}: give the name that the message shows, as module:function")
        if at and not Path(folder).is_dir():
            raise UnallowedCode(f"{ALLOW_CODE} {text!r}: there is no folder {folder!r}")
        declare_code(name, folder if at else os.getcwd())
    declare_code([text for text in arguments if "@" not in text], os.getcwd())
    _REMOTE_CODE[0] = trust_remote_code


def prepare_import(name: str, place: str) -> None:
    """Make the module of ``module:function`` importable from where it was declared. ``place`` begins the message.

    Raises:
        UnallowedCode: nobody declared it.
    """
    if not _NAME.fullmatch(name):
        raise UnallowedCode(
            f"{place}{name!r}: code of your own is named as module:function; write it like mine:surprised"
        )
    if name not in _FOLDERS:
        raise UnallowedCode(
            f"{place}{name!r} is Python code that a stored recipe names, and opening a run imports none. If you trust "
            f"it, name it: {ALLOW_CODE} {name} (its module is looked for in the working directory, or where "
            f"{ALLOW_CODE} {name}@FOLDER says)"
        )
    for folder in reversed(_FOLDERS[name]):  # the first one is looked through first
        if folder not in sys.path:
            sys.path.insert(0, folder)
    _IMPORTED.add(name)


def is_declared(name: str) -> bool:
    """Whether a word's name may be used: any but a ``module:function`` that nobody declared."""
    return ":" not in name or name in _FOLDERS


def imported_code() -> dict[str, list[str]]:
    """Names that this process has imported, with the folders that they were declared with."""
    return {name: list(_FOLDERS[name]) for name in sorted(_IMPORTED)}


def declared_code() -> dict[str, list[str]]:
    """Every name that may be imported here, with its folders: for another process of the same run."""
    return {name: list(folders) for name, folders in _FOLDERS.items()}


def consent_options(near: str | None = None) -> list[str]:
    """The options that allow a command of ours, started by this one, the same.

    ``near``: a folder that goes without saying, for whoever types the command there.
    """
    places = [(name, folder) for name, folders in imported_code().items() for folder in folders]
    options = [name if folder == near else f"{name}@{folder}" for name, folder in places]
    words = [word for option in options for word in (ALLOW_CODE, option)]
    return [*words, TRUST_REMOTE_CODE] if _REMOTE_CODE[0] else words


def trusts_remote_code() -> bool:
    """Whether the command line says ``--trust-remote-code``."""
    return _REMOTE_CODE[0]


def is_stored(place: str | Path) -> bool:
    """Whether a document is part of a run or comparison, and not a recipe that somebody keeps to train by.

    ``recipe.yaml`` is what makes a folder a run; any other file counts as stored where a run's records lie with it.
    """
    path = Path(place)
    return any(_is_record(form) for form in (path, path.resolve()))


def _is_record(path: Path) -> bool:
    if path.name == STORED_RECIPE:
        return True
    for folder in (path.parent, path.parent.parent):
        made = any((folder / name).is_file() for name in (STORED_RECIPE, _PLAN))
        if made and any((folder / name).exists() for name in _RECORDS):
            return True
    return False


def refuse_remote_code(document: Any, overridden: Collection[str], place_of: Callable[[str], str]) -> None:
    """Refuse ``trust_remote_code: true`` anywhere in a document, but for keys of the command line (``overridden``).

    ``place_of`` a dotted key is what the message begins with.

    Raises:
        RecipeError: a file asks for it, and the command line does not.
    """
    asked = [key for key in _remote_code_keys(document) if key not in overridden]
    if asked and not trusts_remote_code():
        raise RecipeError(
            f"{place_of(asked[0])}{asked[0]}: a file cannot allow the Python of a model to run; leave the key out and "
            f"say {TRUST_REMOTE_CODE} on the command line, every time"
        )


def without_remote_code(document: Any) -> Any:
    """The document, with ``trust_remote_code`` left out wherever it stands."""
    if isinstance(document, Mapping):
        return {key: without_remote_code(value) for key, value in document.items() if key != REMOTE_CODE}
    return [without_remote_code(item) for item in document] if isinstance(document, list) else document


def _remote_code_keys(document: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(document, Mapping):
        for key, value in document.items():
            if key == REMOTE_CODE and value not in (False, None):
                yield f"{prefix}{key}"
            yield from _remote_code_keys(value, f"{prefix}{key}.")
    elif isinstance(document, list):
        for index, item in enumerate(document):
            yield from _remote_code_keys(item, f"{prefix}{index}.")


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _texts(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _texts(item)
