"""Writing files so that a kill or a full disk leaves either the old content or the new, never a part."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import StorageError, UsageError
from posttrain.option_types import shorten

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
            where = shorten(str(place))
            raise UsageError(f"{where}: cannot write {what} there: {error.strerror}. Give another place") from error
        raise explain_storage(what, place, error) from error


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (creations, renames, removals) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_asides(folder: Path, name: str = "") -> list[str]:
    """Remove what a kill left of files that were being written: ``.tmp-*``, or those of one ``name``; their names.

    For a folder in which nobody else writes at the moment.
    """
    found = sorted(folder.glob(f".tmp-{glob.escape(name)}*"))
    for aside in found:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
    return [aside.name for aside in found]


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put ``content`` at ``path`` in one step: written aside, then renamed over it.

    ``durable`` also waits for the disk; without it a power cut (not a kill) may bring the old
    content back.

    Raises:
        StorageError: the disk is full or the place not writable; ``path`` is unchanged.
    """
    aside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with storage_errors(path.name, path):
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)
