"""Conversion of Python arguments to plain paths, numbers and flags, with errors raised by foreign objects."""

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

LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes, the usual system limits
NO_TEXT = re.compile("[\0\ud800-\udfff]")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error raised by a user's object while reading it (``items``, ``__fspath__``) into a UsageError.

    Raises:
        UsageError: includes ``what`` and the error type; the original error is the cause.
    """
    try:
        yield
    except (PosttrainError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{what}: reading this object raised {type(error).__name__}. Give plain values") from error


def plain_text(name: str, text: str) -> str:
    """Convert a text to plain ``str``.

    Raises:
        UsageError: contains NUL or an unpaired surrogate.
    """
    plain = str.__str__(text)
    if NO_TEXT.search(plain):
        raise UsageError(f"{name}: {shorten(plain)} contains NUL or an unpaired surrogate. Give valid UTF-8 text")
    return plain


def plain_path(name: str, value: object) -> str:
    """Convert a path or a name to plain text.

    Raises:
        UsageError: neither text nor a path, or not a valid file name.
    """
    with reading(name):
        if not isinstance(value, str | os.PathLike):
            raise UsageError(f"{name}: {type(value).__name__} is not a path. Give a string or a path")
        given = value
        if not isinstance(given, str):
            given = os.fspath(given)
    if not isinstance(given, str):
        raise UsageError(f"{name}: a path made from {type(given).__name__} is invalid. Give a string or a path")
    text = plain_text(name, given)
    encoded = os.fsencode(text)
    if len(encoded) > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in Path(text).parts):
        raise UsageError(f"{name}: {shorten(text)} is too long for a file name. Give a shorter one")
    return text


def check_numbers(**values: object) -> None:
    """Check numeric arguments; None selects the default.

    Raises:
        UsageError: not a number. The message includes the argument name.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            raise UsageError(f"{name}: {shorten(value)} is not a number. Give a number")


def check_whole(name: str, value: object) -> None:
    """Check an integer argument.

    Raises:
        UsageError: not an integer. The message includes the argument name.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{name}: {shorten(value)} is not an integer. Give an integer")


def plain_number(value: Any) -> Any:
    """Convert numbers of other types (numpy, fractions) to ``int`` or ``float``; return other values unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def plain_names(name: str, value: object) -> list[str]:
    """Convert names to a list; a single text counts as one name.

    Raises:
        UsageError: not a list of texts.
    """
    if isinstance(value, str):
        return [plain_text(name, value)]
    if not isinstance(value, Iterable):
        raise UsageError(f"{name}: {type(value).__name__} is not a list of names. Give a list")
    with reading(name):
        listed = list(value)
    for one in listed:
        if not isinstance(one, str):
            raise UsageError(f"{name}: {type(one).__name__} is not a name. Give strings")
    return [plain_text(name, one) for one in listed]


def check_flag(name: str, value: object) -> None:
    """Check a boolean argument.

    Raises:
        UsageError: not a boolean. The message includes the argument name.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}: {shorten(value)} is not a boolean. Give True or False")


def plain_counts(name: str, value: object) -> int | list[int] | None:
    """Convert an integer or a list of integers; None stays None.

    Raises:
        UsageError: anything else.
    """
    if value is None:
        return None
    if isinstance(value, Integral):
        check_whole(name, value)
        return int(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UsageError(f"{name}: {shorten(value)} is not an integer. Give an integer, or a list of integers")
    with reading(name):
        numbers = list(value)
    for number in numbers:
        check_whole(name, number)
    return numbers


def plain_component(name: str, value: object) -> str | dict[str, object]:
    """Convert a component to a name, or to a mapping with name and options.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, str):
        return plain_text(name, value)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name}: {type(value).__name__} is not a component. Give a name, or a mapping with name and options"
        )
    with reading(name):
        return {str(key): one for key, one in value.items()}
