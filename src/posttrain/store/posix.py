"""POSIX calls and flags, with substitutes for Windows."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

# Flags for ``os.open``; 0 means unsupported.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
DIRECTORY: int | None = getattr(os, "O_DIRECTORY", None)  # None: cannot open folders
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows, SIGTERM also terminates immediately


def memory_bytes() -> int | None:
    """Total physical memory in bytes; None if unknown."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def read_at(descriptor: int, count: int, start: int) -> bytes:
    """Read ``count`` bytes starting at offset ``start``."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, start)
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, count)


def kill_group(pid: int) -> None:
    """Kill a process, with its process group if supported. Ignores processes that already ended."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(pid, SIGKILL)
        else:
            os.kill(pid, SIGKILL)


def is_alive(pid: int) -> bool:
    """Check if a local process with this id exists. Always True on Windows, which offers no safe check."""
    if not hasattr(os, "killpg"):  # on Windows, signal 0 would send Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # belongs to another user
        pass
    return True
