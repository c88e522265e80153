"""Locks that end with the process that holds them and name that process.

A lock is a file under ``flock``. Some file systems (network, cloud and FUSE mounts) refuse that. There a second file
next to it, ``NAME-claim``, exists while the lock is held. A claim of a dead process of this machine does not count; one
of another machine stands until it is deleted.
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
    """Another process holds the lock; the text names it."""


@contextmanager
def hold(path: Path, timeout_seconds: float = 1.0) -> Iterator[None]:
    """Hold the lock ``path``, a file that is created if missing, and stays.

    ``holder`` holds it for an instant: hence the patience.

    Raises:
        Held: by another process, all the time.
        OSError: the file cannot be created.
    """
    try:
        lock = _acquire(path, timeout_seconds)
    except Timeout:
        raise Held(_name_of_holder(path)) from None
    try:
        with suppress(PermissionError):  # Windows lets nobody write into a locked file
            if os.stat(path).st_nlink == 1:  # a second name may be any file of the user's
                path.write_text(f"pid {os.getpid()} on {_host()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def holder(path: Path) -> str | None:
    """Return the process that holds the lock at this moment, such as ``pid 12 on lab``; None if none does."""
    if kind_of_file(path) != "file" or path.is_symlink():  # nothing that ``hold`` has made
        return None
    try:
        _acquire(path, 0.02).release()
    except Timeout:
        return _name_of_holder(path)
    except OSError:  # not ours to write
        return None
    return None


def _acquire(path: Path, timeout_seconds: float) -> BaseFileLock:
    """Return the held lock; a claim where the file system has no locks."""
    if FileLock is not SoftFileLock:  # a system with fcntl; elsewhere its lock would be the file itself
        try:
            return FileLock(path, timeout=timeout_seconds, **_OPTIONS).acquire(poll_interval=0.05).lock
        except (NotImplementedError, OSError) as error:  # older versions of filelock raise the first for ENOSYS
            if getattr(error, "errno", errno.ENOSYS) not in _REFUSALS:
                raise
    path.touch()
    return SoftFileLock(_claim_of(path), timeout=timeout_seconds).acquire(poll_interval=0.05).lock


def _claim_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-claim")


def _name_of_holder(path: Path) -> str:
    """The line in the lock file, if it is of this machine; of another one, whether it still runs is not known."""
    is_claimed = _claim_of(path).exists()
    with suppress(OSError):
        found = _NAME.match(path.read_text(encoding="utf-8", errors="replace")[:300])
        if found and (not is_claimed or found[0].endswith(f" on {_host()}")):
            return found[0]
    if is_claimed:
        return f"a process of another machine; if it is gone, delete {_claim_of(path)}"
    return "unknown"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
