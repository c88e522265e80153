"""Files written so that a kill or a full disk leaves either the old content or the new, never a part."""

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

ASIDE = ".tmp-"  # begins the name of what is written aside, until it gets its own
CHECKPOINTS = "checkpoints"  # a folder with rules of its own: ``store/checkpoint_files.py``
_ASIDE_NAME = re.compile(r"\.tmp-.+-([0-9]{1,9})", re.DOTALL)
# The place cannot hold files: the caller's mistake, not the disk's.
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Files that are appended to; any other is written aside and renamed over what was there.
_IN_PLACE = (".lock", "*.txt", "*.log", "metrics.jsonl", "rollouts.db*", "*.png")
_MAX_LINE_BYTES = 1 << 24
_WANDB = "wandb"  # W&B keeps links to logs of its own in the folders of its sessions


def explain_storage(what: str, place: Path, cause: BaseException) -> StorageError:
    """Return a ``StorageError`` that names what could not be written where, and the remedy."""
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
    """Turn an ``OSError`` of the body into a ``StorageError`` that names ``what`` and ``place``."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            where = shorten(str(error.filename or place))
            raise UsageError(f"{where}: cannot write {what} there: {error.strerror}. Give another place") from error
        raise explain_storage(what, place, error) from error


def sayable(value: object) -> object:
    """Return plain data as JSON can hold it: a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {key: sayable(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [sayable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sync_file(path: Path, flags: int = 0) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (creations, renames, removals) are on the disk."""
    if posix.DIRECTORY is not None:  # Windows writes names with the file
        sync_file(path, posix.DIRECTORY)


def cut_torn_line(descriptor: int) -> None:
    """Shorten a file of lines to its last newline, so that the next line does not continue one torn by a kill."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _MAX_LINE_BYTES)
    keep = start + posix.read_at(descriptor, size - start, start).rfind(b"\n") + 1
    if keep < size:
        os.ftruncate(descriptor, keep)


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put ``content`` at ``path`` in one step: written aside, then renamed over it.

    ``durable`` also waits for the disk; without it a power cut (not a kill) may bring the old content back.

    Raises:
        StorageError: the disk is full or the place not writable; ``path`` is unchanged.
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
    default: Callable[[object], object] | None = None,
) -> None:
    """Put plain data at ``path`` as JSON with a newline at the end, as ``replace_file`` does; see ``json.dumps``."""
    text = json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, default=default)
    replace_file(path, text.encode() + b"\n")


def aside_of(path: Path) -> Path:
    """Return where this process writes what will be ``path``: next to it, so that a rename puts it in place."""
    return path.with_name(f"{ASIDE}{path.name}-{os.getpid()}")


def remove_asides(path: Path) -> None:
    """Remove what killed processes had begun to write for ``path``, a file or a folder."""
    for item in path.parent.glob(f"{ASIDE}{glob.escape(path.name)}-*"):
        if _is_left(item.name):
            with suppress(FileNotFoundError):  # its process was there, and gave it its name
                remove_tree(item)


def remove_tree(path: Path) -> None:
    """Remove a folder, or a file or link if it is there."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove the files that killed writes left anywhere below ``folder``, but for folders of checkpoints.

    A file that a living process writes at this moment stays. Returns the paths, relative to ``folder``.
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
    """Return whether a name is that of something written aside by a process that writes it no longer."""
    match = _ASIDE_NAME.fullmatch(name)
    if match is None:
        return False
    process = int(match[1])
    return process == os.getpid() or not posix.is_alive(process)


def refuse_links(folder: str | Path) -> None:
    """Refuse a folder in which writing could change something outside of it. The folder itself may be a link.

    Links that stay inside are fine (``best`` to its checkpoint). Refused are symbolic links to the outside, a second
    name (hard link) of a file that is appended to, and what is neither file nor folder.

    Raises:
        UsageError: with the name; nothing was changed.
    """
    root = Path(os.path.realpath(folder))
    for place, folders, files in walk_folder(root):
        for name in [*folders, *files]:
            path = Path(place, name)
            with suppress(FileNotFoundError):  # another process tidies up
                what = _danger_of(path, root)
                if what:
                    remedy = "Nothing was changed; put the file itself in its place (cp -L), or work on a copy"
                    raise UsageError(f"{path}: this is {what}. {remedy}")
        if os.path.basename(place) == _WANDB:
            folders.clear()


def _danger_of(path: Path, root: Path) -> str | None:
    """Describe what makes writing to ``path`` change something outside of ``root``."""
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        target = Path(os.path.realpath(path))
        is_inside = target != root and target.is_relative_to(root)
        if is_inside:
            return None
        return f"a link that leads out of the folder, to {target}"
    if stat.S_ISDIR(state.st_mode):
        return None
    if not stat.S_ISREG(state.st_mode):
        return "neither a file nor a folder"
    is_shared = state.st_nlink > 1 and any(fnmatchcase(path.name, name) for name in _IN_PLACE)
    if is_shared:
        return "a file with a second name elsewhere (a hard link), which would be written to as well"
    return None
