"""What was worked out from a file, remembered for as long as it is the same file.

A file is the same while its device, inode, size and times (of its content, and of its last change of any kind, which
no program can set) are. What is remembered lies in the user's own cache folder, never among the files that it is
about: those may be a stranger's.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.errors import StorageError
from posttrain.store.durable import replace_file

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

    def get(self, path: Path, work: Callable[[Path], Any], *, what: str = "") -> Any:
        """``work(path)``, plain data for JSON, or what it was when this file was last asked about.

        Args:
            what: tells apart several values of one file.

        Raises:
            OSError: there is no such file; and whatever ``work`` raises, which is not remembered.
        """
        if self._entries is None:
            self._entries = _read(self._place())
        key = f"{os.path.abspath(path)}\0{what}"
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
        if place.stat().st_uid != os.geteuid():
            return {}
        stated, _, content = place.read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != stated:
            return {}
        return {str(key): (mark, value) for key, (mark, value) in json.loads(content).items()}
    except (OSError, ValueError):
        return {}
