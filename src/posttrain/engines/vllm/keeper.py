"""Runs a command for as long as somebody holds this program's standard input: the file is the program.

Whoever started it may be killed at any moment; the system then closes the pipe, and the command with everything that it
started is ended: asked to (SIGTERM), and ten seconds later made to. Standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


def keep(words: list[str]) -> int:
    """The exit code of the command; its whole group of processes is gone when this returns."""
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_keeper)
    signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=_end, args=(child,)).start())

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock this thread would hold when the program ends
            pass
        _end(child)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _signal(child, signal.SIGKILL)  # what outlived it
    return code


def _end_with_keeper() -> None:
    """Runs in the command's process: should the keeper itself be killed, the command is asked to end (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[bytes]) -> None:
    _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child, signal.SIGKILL)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
