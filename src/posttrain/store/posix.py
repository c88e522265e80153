"""Calls and flags that POSIX systems have, with substitutes where they are missing (Windows)."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

# Flags of ``os.open``; 0 has no effect.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
DIRECTORY: int | None = getattr(os, "O_DIRECTORY", None)  # None: a folder cannot be opened
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once for either


def memory_bytes() -> int | None:
    """Return the memory of the machine, None where the system does not report it."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def read_at(descriptor: int, count: int, start: int) -> bytes:
    """Read from a place of an open file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, start)
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, count)


def kill_group(pid: int) -> None:
    """End a process at once, and its process group where there are such; nothing where it is gone."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(pid, SIGKILL)
        else:
            os.kill(pid, SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine has this number; True where that cannot be asked."""
    if not hasattr(os, "killpg"):  # Windows, where a signal 0 would be Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
