"""Calls and flags that POSIX systems have, with what stands in for them where they are missing (Windows)."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

# Flags of ``os.open``; 0 has no effect. Windows alone translates line ends where it is not told to leave bytes alone.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
DIRECTORY: int | None = getattr(os, "O_DIRECTORY", None)  # None: a folder cannot be opened
BINARY = getattr(os, "O_BINARY", 0)
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once for either


def user_id() -> int:
    """Return the number of the user whose files these are; 0, as ``os.stat`` has it, where users have none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def memory_bytes() -> int | None:
    """Return the memory of the machine, None where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def read_at(descriptor: int, count: int, start: int) -> bytes:
    """Read from a place of an open file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, start)
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, count)


def write_at(descriptor: int, content: bytes, start: int) -> None:
    """Write to a place of an open file."""
    if hasattr(os, "pwrite"):
        os.pwrite(descriptor, content, start)
    else:
        os.lseek(descriptor, start, os.SEEK_SET)
        os.write(descriptor, content)


def kill_group(pid: int) -> None:
    """End a process at once, and where there are process groups what it has started; nothing where it is gone."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(pid, SIGKILL)
        else:
            os.kill(pid, SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine has this number."""
    if sys.platform == "win32":  # a signal 0 would be Ctrl-C there
        import ctypes

        system, code = ctypes.windll.kernel32, ctypes.c_ulong()
        handle = system.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return bool(system.GetLastError() == 5)  # access denied: it is another user's
        running = system.GetExitCodeProcess(handle, ctypes.byref(code)) and code.value == 259  # STILL_ACTIVE
        system.CloseHandle(handle)
        return bool(running)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True
