"""Locks that end with the process that holds them, however it ends; also where the file system knows no locks.

A lock is a file under ``flock``. Some file systems (network, cloud and FUSE mounts) refuse that. There a second file
beside it, ``NAME-claim`` (in a folder: ``.lock-folder-claim``), is made by its holder and by nobody else, and says
which process that is. A claim whose process is gone counts for nothing: told by its number, and on Linux by when it
started, too. Whether a process on another machine is gone cannot be told: its claim stands until it is deleted.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.store import posix
from posttrain.store.posix import is_alive

try:
    import fcntl
except ImportError:  # Windows: claims are made instead
    fcntl = None  # type: ignore[assignment]

_REFUSALS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_NAME = re.compile(r"pid (?P<pid>[0-9]{1,18}) on (?P<host>[A-Za-z0-9._-]+)")
_PAUSE_SECONDS = 0.05
_WRITING_SECONDS = 5.0  # a claim without its text for longer than this was left by a kill
_HELD: set[int] = set()  # descriptors of the locks that this process holds


class Held(Exception):
    """Another process holds the lock; the text says which."""


@contextmanager
def hold(path: Path, patience_seconds: float = 1.0) -> Iterator[None]:
    """Hold the lock ``path``: a file, which is made where it is missing and stays, or a folder that is there.

    Whoever looks whether it is held holds it for an instant: hence the patience.

    Raises:
        Held: by another process, all the time.
        OSError: the file cannot be made.
    """
    is_folder = path.is_dir()
    descriptor = _open(path, is_folder)
    _HELD.add(descriptor)
    deadline = time.monotonic() + patience_seconds
    claimed = False
    try:
        while not ((locked := _lock(descriptor, shared=False)) or (locked is None and _claim(path))):
            if time.monotonic() > deadline:
                raise Held(holder(path) or "unknown")
            time.sleep(_PAUSE_SECONDS)
        claimed = locked is None
        if not is_folder and os.fstat(descriptor).st_nlink == 1:  # a second name may be any file of the user's
            os.ftruncate(descriptor, 0)
            posix.write_at(descriptor, f"{_own_name()}\n".encode(), 0)
        yield
    finally:
        if claimed and _read(_claim_of(path)) == _own_text():
            with suppress(FileNotFoundError):
                _claim_of(path).unlink()
        if descriptor in _HELD:
            _HELD.discard(descriptor)
            os.close(descriptor)


def holder(path: Path) -> str | None:
    """Which process holds the lock at this moment, such as ``pid 12 on lab``; None if none does."""
    is_folder = path.is_dir()
    try:
        descriptor = _open(path, True) if is_folder else os.open(path, os.O_RDONLY | posix.NO_FOLLOW | posix.NO_WAIT)
    except OSError:  # not there, a link, or not ours to read: nothing that ``hold`` has made
        return None
    try:
        locked = _lock(descriptor, shared=True)
        if locked is None:
            return _holder_of_claim(_claim_of(path))
        text = b"" if locked or is_folder else posix.read_at(descriptor, 300, 0)
        name = _NAME.match(text.decode(errors="replace"))
        return None if locked else name[0] if name else "unknown"
    finally:
        os.close(descriptor)


def _let_go_in_child() -> None:
    """A forked worker that outlives a killed run must not keep its lock."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _open(path: Path, is_folder: bool) -> int:
    """A descriptor of the lock; of a folder that cannot be opened, one of nothing: its claim is the lock."""
    if not is_folder:
        return os.open(path, os.O_RDWR | os.O_CREAT | posix.NO_FOLLOW | posix.NO_WAIT | posix.BINARY, 0o666)
    return os.open(os.devnull, os.O_RDONLY) if posix.DIRECTORY is None else os.open(path, os.O_RDONLY | posix.DIRECTORY)


def _lock(descriptor: int, *, shared: bool) -> bool | None:
    """Whether the lock was had; None where the file system knows none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return None
    return True


def _claim_of(path: Path) -> Path:
    return path / ".lock-folder-claim" if path.is_dir() else path.with_name(f"{path.name}-claim")


def _claim(path: Path) -> bool:
    """Make the claim ours, if nobody has one; one whose process is gone is taken away first."""
    claim = _claim_of(path)
    stale = _read(claim)
    if _holder_of_claim(claim) is not None:
        return False
    if stale is not None:
        aside = claim.with_name(f"{claim.name}-{os.getpid()}")
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(claim, aside)
            if _read(aside) != stale:  # and has made its own, meanwhile
                os.rename(aside, claim)
                return False
            aside.unlink()
    try:
        descriptor = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | posix.NO_FOLLOW, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(_own_text())
    return True


def _holder_of_claim(claim: Path) -> str | None:
    text = _read(claim)
    if text is None:
        return None
    name = _NAME.match(text)
    if name is None:  # not written yet, or never
        with suppress(FileNotFoundError):
            return "unknown" if time.time() - claim.stat().st_mtime < _WRITING_SECONDS else None
        return None
    if name["host"] != _host():
        return f"{name[0]}; if it is gone, delete {claim}"
    pid, start = int(name["pid"]), text[name.end() :].strip()
    return name[0] if is_alive(pid) and start in ("", _start_of(pid)) else None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())


def _own_name() -> str:
    return f"pid {os.getpid()} on {_host()}"


def _own_text() -> str:
    return f"{_own_name()}\n{_start_of(os.getpid())}\n"


def _start_of(pid: int) -> str:
    """What tells a process from a later one with its number: its start and the machine's; empty where unknown."""
    ticks = _read(Path(f"/proc/{pid}/stat"))
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    return f"{ticks.rpartition(')')[2].split()[19]} {boot.strip()}" if ticks and boot else ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
