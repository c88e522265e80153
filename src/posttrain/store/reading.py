"""Reading the small files of a run, which may be damaged or a stranger's.

What comes back is plain: mappings, lists, text, finite numbers, of bounded size and depth. Whatever else is there is a
``DataError`` with the file and the reason, so that one run cannot keep the others from being listed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from posttrain import strict_yaml
from posttrain.errors import DataError, RecipeError
from posttrain.store import posix

Kind = TypeVar("Kind")
MAX_RECORD_BYTES = 1 << 24
_MAX_YAML_BYTES = 1 << 20  # a megabyte takes a second
_MAX_DEPTH, _MAX_VALUES = 100, 1_000_000
_MAX_WHOLE_NUMBER = 1 << 128


@contextmanager
def open_record(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """A regular file, open for reading; a pipe or a device is not waited for.

    Raises:
        FileNotFoundError: there is none.
        DataError: no file, a link that leads out of its folder, too large, or not readable.
    """
    refuse_link_out(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | posix.NO_WAIT | posix.CLOSE_ON_EXEC | posix.BINARY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise DataError(path, "damaged: this is no file; move it away")
        if about.st_size > max_bytes:
            raise DataError(path, f"damaged: it has {about.st_size:,} bytes, and at most {max_bytes:,} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)


def refuse_link_out(path: Path) -> None:
    """Refuse a file that is a link to another folder: what lies there is no part of a stranger's run, and is not shown.

    Raises:
        DataError: it is one.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise DataError(path, "this is a link to another folder; put the file itself in its place (cp -L)")


def read_text(path: Path) -> str:
    """The text of a file that is only to be shown, of at most a megabyte; bytes that are no text show as such.

    Raises:
        DataError: see ``open_record``; or there is none.
    """
    try:
        return read_record(path, _MAX_YAML_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise DataError(path, "cannot be read (it is gone)") from None


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """The content of a file; see ``open_record``."""
    with open_record(path, max_bytes) as file:
        return file.read(max_bytes)


def read_json(path: Path) -> Any:
    """A JSON file as plain data.

    Raises:
        FileNotFoundError: there is none.
        DataError: see ``read_record``; or it is damaged.
    """
    return _parse(path, json.loads, MAX_RECORD_BYTES)


def read_yaml(path: Path) -> Any:
    """A YAML file as plain data, by the rules of recipes (``strict_yaml``).

    Raises:
        FileNotFoundError: there is none.
        DataError: see ``read_record``; or it is damaged.
    """
    return _parse(path, lambda text: strict_yaml.read_yaml(text, path.name)[0], _MAX_YAML_BYTES)


def read_stated(path: Path, kind: type[Kind]) -> Kind:
    """What a JSON file states, as ``stated``.

    Raises:
        FileNotFoundError: there is none.
        DataError: see ``read_json``; or it states something else.
    """
    content = json.dumps(read_json(path))
    try:
        return stated(kind, content)
    except ValueError as error:
        raise DataError(path, f"damaged: {error}; delete it") from None


def stated(kind: type[Kind], content: str | bytes) -> Kind:
    """The JSON of a dataclass of plain data, each value of its field's type; keys that it has not are left out.

    Raises:
        ValueError: it is none; the message says what stands where.
    """
    try:
        return _adapter(kind).validate_json(content, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), None if first["type"] == "missing" else first["input"]
        raise ValueError(f"{key or 'all of it'} is {str(value)[:60]!r}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _parse(path: Path, parse: Callable[[str], Any], max_bytes: int) -> Any:
    try:
        value = parse(read_record(path, max_bytes).decode())
        _check_plain(value)
    except (ValueError, TypeError, RecursionError, RecipeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(path, f"damaged ({type(error).__name__}: {reason})") from None
    return value


def _check_plain(value: Any) -> None:
    """Raise ``ValueError`` for what JSON cannot say or a terminal cannot show, and for too much of it."""
    open_values: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while open_values:
        item, depth = open_values.pop()
        inner = [*item.keys(), *item.values()] if isinstance(item, dict) else item if isinstance(item, list) else []
        count += 1 + len(inner)
        if depth > _MAX_DEPTH or count > _MAX_VALUES:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}, or more than {_MAX_VALUES:,} values")
        open_values += [(one, depth + 1) for one in inner]
        if isinstance(item, str):
            item.encode()  # half of a surrogate pair is no text
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} where a number is expected")
        elif isinstance(item, int) and abs(item) > _MAX_WHOLE_NUMBER:
            raise ValueError("a whole number above 2^128")
        elif not isinstance(item, dict | list | str | float | int | None):
            raise ValueError(f"a {type(item).__name__} ({item}) where text or a number is expected")
