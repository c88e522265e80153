"""Safe reading of small run files, which may be damaged or untrusted.

Returns plain data: mappings, lists, strings and finite numbers, limited in size and depth. Anything else raises
``DataError`` with path and reason, so that listing continues with other runs.
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
_MAX_YAML_BYTES = 1 << 20  # parsing a megabyte takes about a second
_MAX_DEPTH = 100
_MAX_VALUES = 1_000_000
_MAX_WHOLE_NUMBER = 1 << 128


@contextmanager
def open_record(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without blocking on pipes or devices.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        DataError: not a regular file, a link leading outside its folder, too large, or unreadable.
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
    except IsADirectoryError:  # or a pipe or device
        raise DataError(path, "damaged: not a regular file; move it away") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None


def refuse_link_out(path: Path) -> None:
    """Refuse links to other folders, since their targets do not belong to this run.

    Raises:
        DataError: ``path`` is such a link.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise DataError(path, "this is a link to another folder; replace the link with a copy (cp -L)")


def read_text_file(path: Path) -> str:
    """Read text for display, at most one megabyte. Invalid UTF-8 bytes are replaced.

    Raises:
        DataError: missing, or refused by ``open_record``.
    """
    try:
        return read_record(path, _MAX_YAML_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise DataError(path, "cannot be read (it is gone)") from None


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Read bytes through ``open_record``."""
    with open_record(path, max_bytes) as file:
        return file.read(max_bytes)


def read_yaml_file(path: Path) -> Any:
    """Load plain YAML data with recipe rules (``strict_yaml``).

    Raises:
        FileNotFoundError: ``path`` does not exist.
        DataError: damaged, or refused by ``open_record``.
    """
    return _parse(path, lambda text: strict_yaml.read_yaml(text, path.name)[0], _MAX_YAML_BYTES)


def read_declared(path: Path, kind: type[Kind]) -> Kind:
    """Load a dataclass from JSON with strict field types, ignoring unknown keys.

    Raises the same errors as ``read_yaml_file``.
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
    """Raise ``ValueError`` for data that JSON or terminals cannot represent, or that exceeds limits."""
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
            item.encode()  # rejects lone surrogates
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} instead of a finite number")
        elif isinstance(item, int) and abs(item) > _MAX_WHOLE_NUMBER:
            raise ValueError("a whole number above 2^128")
        elif not isinstance(item, dict | list | str | float | int | None):
            raise ValueError(f"a {type(item).__name__} ({item}) instead of plain data")
