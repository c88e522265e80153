"""Crash-safe file writes: after a kill or a full disk, a file has either old or new content, never a partial mix."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from posttrain.errors import StorageError, UsageError
from posttrain.folders import remove_folder, walk_folder
from posttrain.option_types import shorten
from posttrain.store import posix

ASIDE = ".tmp-"  # prefix for temporary files, renamed once complete
CHECKPOINTS = "checkpoints"  # follows separate rules: ``store/checkpoint_files.py``
_ASIDE_NAME = re.compile(r"\.tmp-.+-([0-9]{1,9})", re.DOTALL)
# Errors caused by an invalid path, not by the disk.
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Append-only files. All others are written to a temporary file and renamed.
_IN_PLACE = (".lock", "*.txt", "*.log", "metrics.jsonl", "rollouts.db*", "*.png")
_MAX_LINE_BYTES = 1 << 24
_WANDB = "wandb"  # W&B links to its logs from session folders


def explain_storage(what: str, place: Path, cause: BaseException) -> StorageError:
    """Build a ``StorageError`` naming the content, path and remedy."""
    number = getattr(cause, "errno", None)
    text = str(cause).lower()
    remedy = f"{cause}. Check the disk"
    says_full = any(words in text for words in ("no space left", "disk is full", "file too large"))
    if number in _FULL or says_full:
        folder = next(one for one in (place, *place.parents) if one.exists())
        free = shutil.disk_usage(folder).free / 2**20
        remedy = f"the disk is full ({free:.0f} MiB free). Free some space"
    elif "database is locked" in text:
        remedy = "another program is writing to it (a database browser with unsaved changes?). Close it there"
    elif number in (errno.EACCES, errno.EROFS, errno.EPERM) or "readonly" in text:
        remedy = "the place is not writable. Give write permission"
    return StorageError(
        f"{place}: cannot write {what}: {remedy}, then continue with --resume. What had been saved before is untouched."
    )


@contextmanager
def storage_errors(what: str, place: Path) -> Iterator[None]:
    """Convert an ``OSError`` raised in the block into a ``StorageError`` naming ``what`` and ``place``.

    In nested blocks, the outermost names what could not be written, not one of its files.
    """
    try:
        yield
    except StorageError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise explain_storage(what, place, error.__cause__) from error.__cause__
    except OSError as error:
        if error.errno in _NO_PLACE:
            where = shorten(str(error.filename or place))
            raise UsageError(f"{where}: cannot write {what} there: {error.strerror}. Give another place") from error
        raise explain_storage(what, place, error) from error


def sayable(value: object) -> object:
    """Convert to JSON-compatible data, replacing NaN and infinity with null."""
    if isinstance(value, Mapping):
        return {key: sayable(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [sayable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sync_file(path: Path, flags: int = 0) -> None:
    """Flush file content to disk."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush directory entries (creations, renames, removals) to disk."""
    if posix.DIRECTORY is not None:  # Windows flushes names with file content
        sync_file(path, posix.DIRECTORY)


def cut_torn_line(descriptor: int) -> None:
    """Truncate a line-based file after its last newline, so that appending never continues a torn line."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _MAX_LINE_BYTES)
    keep = start + posix.read_at(descriptor, size - start, start).rfind(b"\n") + 1
    if keep < size:
        os.ftruncate(descriptor, keep)


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Atomically replace ``path`` with ``content`` through a temporary file.

    ``durable`` also syncs to disk. Otherwise a power cut (not a kill) may restore the old content.

    Raises:
        StorageError: disk full or not writable; ``path`` is unchanged.
    """
    aside = aside_of(path)
    with storage_errors(path.name, path):
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


def write_json(
    path: Path,
    content: object,
    *,
    indent: int = 1,
    ensure_ascii: bool = True,
    sort_keys: bool = False,
    default: Callable[[object], object] | None = None,
) -> None:
    """Write JSON with a trailing newline through ``replace_file``; options are described in ``json.dumps``."""
    text = json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys, default=default)
    replace_file(path, text.encode() + b"\n")


def aside_of(path: Path) -> Path:
    """Build this process's temporary path in the same folder as ``path``, so that renaming is atomic."""
    return path.with_name(f"{ASIDE}{path.name}-{os.getpid()}")


def remove_asides(path: Path) -> None:
    """Remove temporary files and folders that killed processes left for ``path``."""
    for item in path.parent.glob(f"{ASIDE}{glob.escape(path.name)}-*"):
        if _is_left(item.name):
            with suppress(FileNotFoundError):  # another process renamed it meanwhile
                remove_tree(item)


def remove_tree(path: Path) -> None:
    """Remove a folder, file or link if present."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove temporary files from killed writes anywhere below ``folder``, except in checkpoint folders.

    Files still being written by other live processes are kept. Returns paths relative to ``folder``.
    """
    removed = []
    with storage_errors("what killed writes left behind", folder):
        for place, folders, files in walk_folder(folder):
            folders[:] = sorted(name for name in folders if name != CHECKPOINTS)
            left = [Path(place, name) for name in sorted(files) if _is_left(name)]
            for path in left:
                path.unlink(missing_ok=True)
                removed.append(str(path.relative_to(folder)))
    return removed


def _is_left(name: str) -> bool:
    """Check if a name belongs to a temporary file left by an ended process or an earlier write of this one."""
    match = _ASIDE_NAME.fullmatch(name)
    if match is None:
        return False
    process = int(match[1])
    return process == os.getpid() or not posix.is_alive(process)


def refuse_links(folder: str | Path) -> None:
    """Refuse a folder if writing there could change files elsewhere. ``folder`` itself may be a link.

    Links within the folder are allowed, for example ``best``. Refused are symbolic links leading outside, hard links
    to append-only files, and anything except files and folders.

    Raises:
        UsageError: names the offending path; nothing was changed.
    """
    root = Path(os.path.realpath(folder))
    for place, folders, files in walk_folder(root):
        for name in [*folders, *files]:
            path = Path(place, name)
            with suppress(FileNotFoundError):  # removed by another process meanwhile
                what = _danger_of(path, root)
                if what:
                    remedy = "Nothing was changed; replace the link with a copy (cp -L), or work on a copied folder"
                    raise UsageError(f"{path}: this is {what}. {remedy}")
        if os.path.basename(place) == _WANDB:
            folders.clear()


def _danger_of(path: Path, root: Path) -> str | None:
    """Explain why writing to ``path`` could change files outside ``root``; None if safe."""
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        target = Path(os.path.realpath(path))
        is_inside = target != root and target.is_relative_to(root)
        if is_inside:
            return None
        return f"a link leading outside this folder, to {target}"
    if stat.S_ISDIR(state.st_mode):
        return None
    if not stat.S_ISREG(state.st_mode):
        return "neither a file nor a folder"
    is_shared = state.st_nlink > 1 and any(fnmatchcase(path.name, name) for name in _IN_PLACE)
    if is_shared:
        return "a hard link, so writing would also change its other name"
    return None
