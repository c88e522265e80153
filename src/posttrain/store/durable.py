"""Writing files so that a kill or a full disk leaves either the old content or the new, never a part."""

from __future__ import annotations

import errno
import glob
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from posttrain.errors import StorageError, UsageError
from posttrain.option_types import shorten
from posttrain.store import posix
from posttrain.store.posix import is_alive

ASIDE = ".tmp-"  # what is written aside is called so, until it gets its name
CHECKPOINTS = "checkpoints"  # a folder that keeps its own order: ``store/checkpoint_files.py``
_ASIDE_NAME = re.compile(r"\.tmp-.+-([0-9]{1,9})", re.DOTALL)
# The place is not one that files can be in: the caller's mistake, not the disk's.
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain_storage(what: str, place: Path, cause: BaseException) -> StorageError:
    """A ``StorageError`` that says what could not be written where, and what to do about it."""
    number = getattr(cause, "errno", None)
    text = str(cause).lower()
    full = number in _FULL or "no space left" in text or "disk is full" in text or "file too large" in text
    if full:
        remedy = f"the disk is full ({_free_space(place)} free). Free some space, then continue with --resume"
    elif number in (errno.EACCES, errno.EROFS, errno.EPERM) or "readonly" in text:
        remedy = "the place is not writable. Give write permission, then continue with --resume"
    else:
        remedy = f"{cause}. Check the disk, then continue with --resume"
    return StorageError(f"{place}: cannot write {what}: {remedy}. What had been saved before is untouched.")


def _free_space(place: Path) -> str:
    folder = place
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"


@contextmanager
def storage_errors(what: str, place: Path) -> Iterator[None]:
    """Turns an ``OSError`` of the body into a ``StorageError`` that names ``what`` and ``place``."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            where = shorten(str(error.filename or place))
            raise UsageError(f"{where}: cannot write {what} there: {error.strerror}. Give another place") from error
        raise explain_storage(what, place, error) from error


def sayable(value: Any) -> Any:
    """Plain data as JSON can say it: a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {key: sayable(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [sayable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (creations, renames, removals) are on the disk."""
    if posix.DIRECTORY is None:  # Windows writes names with the file
        return
    descriptor = os.open(path, os.O_RDONLY | posix.DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_torn_line(descriptor: int) -> None:
    """Shorten a file of lines to its last newline, so that the next line does not continue what a kill has torn."""
    size = os.fstat(descriptor).st_size
    keep, block = size, 4096
    while keep > 0:
        start = max(0, keep - block)
        newline = posix.read_at(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        os.ftruncate(descriptor, keep)


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put ``content`` at ``path`` in one step: written aside, then renamed over it.

    ``durable`` also waits for the disk; without it a power cut (not a kill) may bring the old
    content back.

    Raises:
        StorageError: the disk is full or the place not writable; ``path`` is unchanged.
    """
    aside = aside_of(path)
    with storage_errors(path.name, path):
        if durable:
            remove_asides(path)
        try:
            aside.unlink(missing_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:  # follows no link
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


def aside_of(path: Path) -> Path:
    """Where this process writes what will be ``path``: beside it, so that a rename puts it in place."""
    return path.with_name(f"{ASIDE}{path.name}-{os.getpid()}")


def remove_asides(path: Path) -> None:
    """Remove what killed processes had begun to write for ``path``, a file or a folder."""
    for item in path.parent.glob(f"{ASIDE}{glob.escape(path.name)}-*"):
        if _is_left(item.name):
            _remove(item)


def find_leftovers(folder: Path) -> list[Path]:
    """The files that killed writes left in ``folder`` and in the folders in it.

    What a living process writes at this moment is none; nor is what lies in folders of checkpoints.
    """
    leftovers = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != CHECKPOINTS)
        leftovers += [Path(place, name) for name in sorted(files) if _is_left(name)]
    return leftovers


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what ``find_leftovers`` finds; returns the paths, relative to ``folder``.

    Raises:
        StorageError: the folder is not writable.
    """
    leftovers = find_leftovers(folder)
    with storage_errors("what killed writes left behind", folder):
        for path in leftovers:
            _remove(path)
    return [str(path.relative_to(folder)) for path in leftovers]


def _is_left(name: str) -> bool:
    """Whether a name is that of something written aside by a process that writes it no longer."""
    match = _ASIDE_NAME.fullmatch(name)
    return match is not None and (int(match[1]) == os.getpid() or not is_alive(int(match[1])))


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):  # its process was there, and gave it its name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


# Links that lead out of a folder: whoever writes in a folder of unknown origin looks for them first.

# Files that are written where they stand; any other is written aside and renamed over what was there.
_IN_PLACE = (".lock", "*.txt", "*.log", "metrics.jsonl", "rollouts.db*", "*.png")
_WANDB = "wandb"  # W&B keeps links to logs of its own in the folders of its sessions, and writes new ones each time


def refuse_links(folder: str | Path) -> None:
    """Refuse a folder in which writing could change something outside of it. The folder itself may be a link.

    Links that stay inside are fine (``best`` to its checkpoint). Not fine are symbolic links to the outside, a second
    name (hard link) of a file that is appended to, and what is neither file nor folder.

    Raises:
        UsageError: such a thing, by name; nothing was changed.
    """
    root = Path(os.path.realpath(folder))
    for path, mode, num_links in _entries(root):
        if stat.S_ISLNK(mode):
            target = Path(os.path.realpath(path))
            if target != root and target.is_relative_to(root):
                continue
            what = f"a link that leads out of the folder, to {target}"
        elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            what = "neither a file nor a folder"
        elif stat.S_ISREG(mode) and num_links > 1 and any(fnmatchcase(path.name, name) for name in _IN_PLACE):
            what = "a file with a second name elsewhere (a hard link), which would be written to as well"
        else:
            continue
        raise UsageError(
            f"{path}: this is {what}. Nothing was changed; put the file itself in its place (cp -L), or work on a copy"
        )


def _entries(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """(path, mode, number of names) of everything below a folder; links are not followed."""
    if not folder.is_dir():
        return
    for item in os.scandir(folder):
        try:
            state = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # another process tidies up
            continue
        path = Path(item.path)
        yield path, state.st_mode, state.st_nlink
        if stat.S_ISDIR(state.st_mode) and folder.name != _WANDB:
            yield from _entries(path)
