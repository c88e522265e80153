"""Reading the small files of a run, which may be damaged or a stranger's.

What comes back is plain: mappings, lists, text, finite numbers, of bounded size and depth. Whatever else is there is a
``DataError`` with the file and the reason, so that one run cannot keep the others from being listed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from posttrain import strict_yaml
from posttrain.errors import DataError, RecipeError, StorageError
from posttrain.store import posix
from posttrain.store.durable import replace_file

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
    return _parse(path, lambda text: strict_yaml.read_yaml(text, path.name, quick=True)[0], _MAX_YAML_BYTES)


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


# What was worked out from a file, remembered for as long as it is the same file.
#
# A file is the same while its device, inode, size and times (of its content, and of its last change of any kind, which
# no program can set) are. What is remembered lies in the user's own cache folder, never among the files that it is
# about: those may be a stranger's.

# A clock ticks every few milliseconds, some file systems' every two seconds: what was changed this recently may
# change again without looking different.
SETTLED_SECONDS = 3.0
_MAX_ENTRIES = 200_000


class Remembered:
    """Values by file, kept in ``NAME.json`` of the cache folder by ``save``. A damaged file there counts as none.

    Args:
        name: of the file; None: for this process alone.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._entries: dict[str, tuple[list[int], Any]] | None = None
        self._new: dict[str, tuple[list[int], Any]] = {}

    def get(self, path: Path, work: Callable[[Path], Any]) -> Any:
        """``work(path)``, plain data for JSON, or what it was when this file was last asked about.

        Raises:
            OSError: there is no such file; and whatever ``work`` raises, which is not remembered.
        """
        if self._entries is None:
            self._entries = _read(self._place())
        key = f"{os.path.abspath(path)}\0"
        mark = _mark(path)
        known = self._new.get(key) or self._entries.get(key)
        if known is not None and known[0] == mark:
            return known[1]
        value = work(path)
        changed_ns = max(mark[3:])
        if time.time_ns() - changed_ns > SETTLED_SECONDS * 1e9 and _mark(path) == mark:
            self._new[key] = (mark, value)
        return value

    def save(self, at_least: int = 1) -> None:
        """Put what is new beside what is there, in one step. Where that cannot be written, this process knows alone.

        Args:
            at_least: so many new values are worth writing the file again.
        """
        place = self._place()
        if place is None or len(self._new) < at_least:
            return
        entries = _read(place) | self._new  # read again: another process may have added its own
        newest = dict(list(entries.items())[-_MAX_ENTRIES:])
        content = json.dumps(newest, allow_nan=False).encode()
        try:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(place, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, durable=False)
        except (OSError, StorageError):  # a full disk, or no home: it is worked out again next time
            return
        self._entries, self._new = newest, {}

    def _place(self) -> Path | None:
        folder = cache_folder() if self._name is not None else None
        return None if folder is None else folder / f"{self._name}.json"


def cache_folder() -> Path | None:
    """The user's folder for what can be worked out again: ``$XDG_CACHE_HOME/posttrain``, else ``~/.cache/posttrain``.

    None where the user has no home.
    """
    stated = os.environ.get("XDG_CACHE_HOME", "")
    base = stated if os.path.isabs(stated) else os.path.expanduser("~/.cache")
    return Path(base) / "posttrain" if os.path.isabs(base) else None


def _mark(path: Path) -> list[int]:
    about = os.stat(path)
    return [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _read(place: Path | None) -> dict[str, tuple[list[int], Any]]:
    if place is None:
        return {}
    try:
        if place.stat().st_uid != posix.user_id():
            return {}
        stated, _, content = place.read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != stated:
            return {}
        return {str(key): (mark, value) for key, (mark, value) in json.loads(content).items()}
    except (OSError, ValueError):
        return {}
