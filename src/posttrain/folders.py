"""Portable folder names; untrusted folders: remove at any depth regardless of permissions, walk to a bounded depth.

``shutil.rmtree`` and ``os.walk`` recurse per level, so they crash on folders nested thousands deep.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import UsageError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
MAX_DEPTH = 100  # levels of a folder that somebody else made
_CAN_OPEN_FOLDERS = os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def folder_name(text: str) -> str:
    """Convert a text to a portable folder name, possibly empty: letters, digits, ``.``, ``_`` and ``-``."""
    return _NOT_IN_NAMES.sub("-", text).strip("-.")


@dataclass
class _Level:
    """Open folder during descent: name in its parent, identity, remaining subfolders."""

    name: str
    identity: tuple[int, int]
    folders: list[str]


def remove_folder(path: str | Path) -> None:
    """Remove a folder recursively, without following links.

    Only one folder is open at a time, and ``..`` leads back up, so depth and path length are unlimited. Permissions
    are changed as needed.

    Raises:
        OSError: an entry cannot be removed. Earlier entries are gone.
    """
    if not _CAN_OPEN_FOLDERS:
        shutil.rmtree(path)
        return
    descriptor = os.open(path, _FOLDER)
    try:
        levels = [_empty(descriptor, "")]
        while True:
            level = levels[-1]
            if level.folders:
                name = level.folders.pop()
                with suppress(PermissionError):  # of another user; to open it may work all the same
                    os.chmod(name, stat.S_IRWXU, dir_fd=descriptor)
                descriptor = _change(descriptor, name)
                levels.append(_empty(descriptor, name))
                continue
            levels.pop()
            if not levels:
                break
            descriptor = _change(descriptor, "..")
            if _identity(descriptor) != levels[-1].identity:
                raise OSError(errno.EBUSY, "something moves folders while they are removed", str(path))
            os.rmdir(level.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(path)


def _change(descriptor: int, name: str) -> int:
    """Open a folder in another, and close that."""
    opened = os.open(name, _FOLDER, dir_fd=descriptor)
    os.close(descriptor)
    return opened


def _identity(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino


def _empty(descriptor: int, name: str) -> _Level:
    """Remove files in an open folder."""
    folders = []
    with os.scandir(descriptor) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=descriptor)
    return _Level(name, _identity(descriptor), folders)


def walk_folder(path: str | Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk ``path`` like ``os.walk``, parents first.

    Callers may prune the folder list. Links to folders are listed as folders but not followed.

    Raises:
        UsageError: nested deeper than ``MAX_DEPTH`` levels.
    """
    waiting = [(Path(path), 0)]
    while waiting:
        place, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise UsageError(f"{path}: this folder has more than {MAX_DEPTH} levels, which no run has; move it away")
        folders: list[str] = []
        files: list[str] = []
        with suppress(OSError), os.scandir(place) as entries:  # it is gone, or cannot be read
            for entry in entries:
                names = files
                if entry.is_dir():
                    names = folders
                names.append(entry.name)
        yield place, folders, files
        for name in sorted(folders, reverse=True):
            inner = place / name
            if not inner.is_symlink():
                waiting.append((inner, depth + 1))
