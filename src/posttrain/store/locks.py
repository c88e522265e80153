"""Locks that end with the process that holds them, and say which process that is.

A lock is a file under ``flock``. Some file systems (network, cloud and FUSE mounts) refuse that. There a second file
next to it, ``NAME-claim``, exists for as long as the lock is held; one whose process is gone counts for nothing, but
whether a process of another machine is gone cannot be known: its claim stands until it is deleted.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from posttrain.untrusted import kind_of_file

_REFUSALS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
# Newer versions of filelock would take the lock file itself for a claim, where ``flock`` is missing.
_OPTIONS: dict[str, Any] = {"fallback_to_soft": False} if "fallback_to_soft" in signature(FileLock).parameters else {}
_NAME = re.compile(r"pid [0-9]{1,18} on [A-Za-z0-9._-]+")


class Held(Exception):
    """Another process holds the lock; the text says which."""


@contextmanager
def hold(path: Path, patience_seconds: float = 1.0) -> Iterator[None]:
    """Hold the lock ``path``, a file that is made where it is missing, and stays.

    ``holder`` holds it for an instant: hence the patience.

    Raises:
        Held: by another process, all the time.
        OSError: the file cannot be made.
    """
    try:
        lock = _acquire(path, patience_seconds)
    except Timeout:
        raise Held(_name_in(path) or _claimed_by(path) or "unknown") from None
    try:
        with suppress(PermissionError):  # Windows lets nobody write into a locked file
            if os.stat(path).st_nlink == 1:  # a second name may be any file of the user's
                path.write_text(f"{_own_name()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def holder(path: Path) -> str | None:
    """Return which process holds the lock at this moment, such as ``pid 12 on lab``; None if none does."""
    if kind_of_file(path) != "file" or path.is_symlink():  # nothing that ``hold`` has made
        return None
    try:
        _acquire(path, 0.02).release()
    except Timeout:
        return _name_in(path) or _claimed_by(path) or "unknown"
    except OSError:  # not ours to write
        return None
    return None


def _acquire(path: Path, patience_seconds: float) -> BaseFileLock:
    """The lock, held; by a claim where the file system has no locks."""
    lock: BaseFileLock = FileLock(path, timeout=patience_seconds, **_OPTIONS)
    try:
        if FileLock is SoftFileLock:  # a system without fcntl: its lock would be the file itself
            raise NotImplementedError
        lock.acquire(poll_interval=0.05)
    except NotImplementedError:  # how older versions of filelock say ENOSYS
        pass
    except OSError as error:
        if isinstance(error, Timeout) or error.errno not in _REFUSALS:
            raise
    else:
        return lock
    path.touch()
    lock = SoftFileLock(_claim_of(path), timeout=patience_seconds)
    lock.acquire(poll_interval=0.05)
    return lock


def _claim_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-claim")


def _claimed_by(path: Path) -> str | None:
    """What a claim says that this machine cannot check."""
    if not _claim_of(path).exists():
        return None
    return f"a process of another machine; if it is gone, delete {_claim_of(path)}"


def _name_in(path: Path) -> str | None:
    """The line of the holder, of this machine: of another one, whether it still runs is not known."""
    with suppress(OSError):
        found = _NAME.match(path.read_text(encoding="utf-8", errors="replace")[:300])
        if found and (not _claim_of(path).exists() or found[0].endswith(f" on {_host()}")):
            return found[0]
    return None


def _own_name() -> str:
    return f"pid {os.getpid()} on {_host()}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
