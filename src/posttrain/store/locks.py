"""Locks that are released when their process ends, and identify their holder.

A lock is a file under ``flock``. Some network, cloud and FUSE file systems do not support it. There, a second file
named ``NAME-claim`` exists while the lock is held. Claims from dead local processes are ignored; claims from other
machines remain valid until deleted.
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
# If ``flock`` is missing, newer filelock versions would use the lock file itself as a claim.
_OPTIONS: dict[str, Any] = {"fallback_to_soft": False} if "fallback_to_soft" in signature(FileLock).parameters else {}
_NAME = re.compile(r"pid [0-9]{1,18} on [A-Za-z0-9._-]+")


class Held(Exception):
    """Raised if another process holds the lock; names its holder."""


@contextmanager
def hold(path: Path, timeout_seconds: float = 1.0) -> Iterator[None]:
    """Hold a lock file, creating ``path`` if missing. The file remains afterwards.

    Waits ``timeout_seconds``, because ``holder`` also acquires the lock briefly.

    Raises:
        Held: another process held the lock throughout.
        OSError: cannot create ``path``.
    """
    try:
        lock = _acquire(path, timeout_seconds)
    except Timeout:
        raise Held(_name_of_holder(path)) from None
    try:
        with suppress(PermissionError):  # Windows forbids writing to a locked file
            if os.stat(path).st_nlink == 1:  # a hard link may point to any user file
                path.write_text(f"pid {os.getpid()} on {_host()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def holder(path: Path) -> str | None:
    """Identify the current lock holder, such as ``pid 12 on lab``; None if unlocked."""
    if kind_of_file(path) != "file" or path.is_symlink():  # not created by ``hold``
        return None
    try:
        _acquire(path, 0.02).release()
    except Timeout:
        return _name_of_holder(path)
    except OSError:  # not writable by us
        return None
    return None


def _acquire(path: Path, timeout_seconds: float) -> BaseFileLock:
    """Acquire the lock, falling back to a claim file if locks are unsupported."""
    if FileLock is not SoftFileLock:  # requires fcntl; elsewhere FileLock would claim the lock file itself
        try:
            return FileLock(path, timeout=timeout_seconds, **_OPTIONS).acquire(poll_interval=0.05).lock
        except (NotImplementedError, OSError) as error:  # older filelock versions raise NotImplementedError for ENOSYS
            if getattr(error, "errno", errno.ENOSYS) not in _REFUSALS:
                raise
    path.touch()
    return SoftFileLock(_claim_of(path), timeout=timeout_seconds).acquire(poll_interval=0.05).lock


def _claim_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-claim")


def _name_of_holder(path: Path) -> str:
    """Read the holder from the lock file. A claim from another machine may be stale."""
    is_claimed = _claim_of(path).exists()
    with suppress(OSError):
        found = _NAME.match(path.read_text(encoding="utf-8", errors="replace")[:300])
        if found and (not is_claimed or found[0].endswith(f" on {_host()}")):
            return found[0]
    if is_claimed:
        return f"a process on another machine; if it has ended, delete {_claim_of(path)}"
    return "unknown"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
