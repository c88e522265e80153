"""Arguments of the Python interface as plain values: paths, numbers and flags, and errors of objects that are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, UsageError
from posttrain.option_types import shorten

LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes, of what systems take
NO_TEXT = re.compile("[\0\ud800-\udfff]")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error that an object of the user raises while it is read (``items``, ``__fspath__``) into a UsageError.

    Raises:
        UsageError: with ``what`` and the kind of the error, which is its cause.
    """
    try:
        yield
    except (PosttrainError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(
            f"{what}: an object raised {type(error).__name__} when it was read. Give plain values"
        ) from error


def plain_text(name: str, text: str) -> str:
    """Return a text as ``str`` itself.

    Raises:
        UsageError: it has a NUL or half of a surrogate pair.
    """
    plain = str.__str__(text)
    if NO_TEXT.search(plain):
        raise UsageError(
            f"{name}: {shorten(plain)} has a character NUL or half of a surrogate pair. Give text in UTF-8"
        )
    return plain


def plain_path(name: str, value: object) -> str:
    """Return a path, or a name that may be one, as text.

    Raises:
        UsageError: it is neither text nor a path, or no file can have such a name.
    """
    with reading(name):
        if not isinstance(value, str | os.PathLike):
            raise UsageError(f"{name}: {type(value).__name__} is no path. Give a text or a path")
        given = value
        if not isinstance(given, str):
            given = os.fspath(given)
    if not isinstance(given, str):
        raise UsageError(f"{name}: a path of {type(given).__name__} is none. Give a text or a path")
    text = plain_text(name, given)
    encoded = os.fsencode(text)
    if len(encoded) > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in Path(text).parts):
        raise UsageError(f"{name}: {shorten(text)} is longer than the name of a file can be. Give a shorter one")
    return text


def check_numbers(**values: object) -> None:
    """Refuse what is no number; None is left to its default.

    Raises:
        UsageError: with the name of the argument.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            raise UsageError(f"{name}: {shorten(value)} is no number. Give one")


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number.

    Raises:
        UsageError: with the name of the argument.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{name}: {shorten(value)} is no whole number. Give one")


def plain_number(value: Any) -> Any:
    """Return a number of another type (numpy's, a fraction) as ``int`` or ``float``; anything else as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def plain_names(name: str, value: object) -> list[str]:
    """Return names as a list; a text is one name.

    Raises:
        UsageError: they are none.
    """
    if isinstance(value, str):
        return [plain_text(name, value)]
    if not isinstance(value, Iterable):
        raise UsageError(f"{name}: {type(value).__name__} is no list of names. Give one")
    with reading(name):
        listed = list(value)
    for one in listed:
        if not isinstance(one, str):
            raise UsageError(f"{name}: {type(one).__name__} is no name. Give texts")
    return [plain_text(name, one) for one in listed]


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        UsageError: with the name of the argument.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}: {shorten(value)} is neither True nor False. Give one of them")


def plain_counts(name: str, value: object) -> int | list[int] | None:
    """Return a whole number, or a list of them.

    Raises:
        UsageError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, Integral):
        check_whole(name, value)
        return int(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UsageError(f"{name}: {shorten(value)} is no whole number. Give one, or a list of them")
    with reading(name):
        numbers = list(value)
    for number in numbers:
        check_whole(name, number)
    return numbers


def plain_component(name: str, value: object) -> str | dict[str, object]:
    """Return a component as its name, or as a mapping of its name and options.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(value, str):
        return plain_text(name, value)
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: {type(value).__name__} is none. Give a name, or a mapping with name and options")
    with reading(name):
        return {str(key): one for key, one in value.items()}
