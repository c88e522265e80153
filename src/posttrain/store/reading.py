"""Reading the small files of a run, which may be damaged or from an untrusted source.

The result is plain: mappings, lists, text, finite numbers, of bounded size and depth. Anything else is a ``DataError``
with the file and the reason, so that one run cannot keep the others from being listed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from posttrain import strict_yaml
from posttrain.errors import DataError, RecipeError
from posttrain.store import posix
from posttrain.untrusted import describe_fault

Kind = TypeVar("Kind")
MAX_RECORD_BYTES = 1 << 24
_MAX_YAML_BYTES = 1 << 20  # a megabyte takes a second
_MAX_DEPTH = 100
_MAX_VALUES = 1_000_000
_MAX_WHOLE_NUMBER = 1 << 128


@contextmanager
def open_record(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a pipe or a device is not waited for.

    Raises:
        FileNotFoundError: there is none.
        DataError: no file, a link that leads out of its folder, too large, or not readable.
    """
    refuse_link_out(path)
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | posix.NO_WAIT)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise IsADirectoryError
            if about.st_size > max_bytes:
                raise DataError(path, f"damaged: it has {about.st_size:,} bytes, and at most {max_bytes:,} are read")
            yield file
    except FileNotFoundError:
        raise
    except IsADirectoryError:  # or a pipe, or a device
        raise DataError(path, "damaged: this is no file; move it away") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None


def refuse_link_out(path: Path) -> None:
    """Refuse a file that is a link to another folder: what lies there is no part of the run, and is not shown.

    Raises:
        DataError: it is one.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise DataError(path, "this is a link to another folder; put the file itself in its place (cp -L)")


def read_text_file(path: Path) -> str:
    """Return the text of a file of at most a megabyte that is only shown; bytes that are no text show as such.

    Raises:
        DataError: see ``open_record``; or there is none.
    """
    try:
        return read_record(path, _MAX_YAML_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise DataError(path, "cannot be read (it is gone)") from None


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a file; see ``open_record``."""
    with open_record(path, max_bytes) as file:
        return file.read(max_bytes)


def read_yaml_file(path: Path) -> Any:
    """Return a YAML file as plain data, by the rules of recipes (``strict_yaml``).

    Raises:
        FileNotFoundError: there is none.
        DataError: see ``open_record``; or it is damaged.
    """
    return _parse(path, lambda text: strict_yaml.read_yaml(text, path.name)[0], _MAX_YAML_BYTES)


def read_declared(path: Path, kind: type[Kind]) -> Kind:
    """Return the dataclass that a JSON file holds, each value of its field's type; unknown keys are left out.

    Raises as ``read_yaml_file``.
    """
    content = json.dumps(_parse(path, json.loads, MAX_RECORD_BYTES))
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        raise DataError(path, f"damaged: {describe_fault(error)}. Delete it") from None


def _parse(path: Path, parse: Callable[[str], Any], max_bytes: int) -> object:
    try:
        value = parse(read_record(path, max_bytes).decode())
        _check_plain(value)
    except (ValueError, TypeError, RecursionError, RecipeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(path, f"damaged ({type(error).__name__}: {reason})") from None
    return value


def _check_plain(value: object) -> None:
    """Raise ``ValueError`` for what JSON or a terminal cannot hold, and for too much of it."""
    open_values: list[tuple[object, int]] = [(value, 0)]
    count = 0
    while open_values:
        item, depth = open_values.pop()
        inner: list[object] = []
        if isinstance(item, dict):
            inner = [*item.keys(), *item.values()]
        elif isinstance(item, list):
            inner = item
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
