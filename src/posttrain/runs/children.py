"""Child processes of a sweep or a run, which never outlive their parent.

A child's standard input is a pipe, and only the parent holds the write end. If the parent ends, even by ``kill -9``,
the system closes the pipe. A thread in the child then kills the child's process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from posttrain.store import posix
from posttrain.store.durable import storage_errors
from posttrain.untrusted import harmless

LIFELINE = "POSTTRAIN_LIFELINE"  # set in a child's environment: standard input is the lifeline pipe
TIMEOUT_SECONDS = 10.0


@dataclass
class Child:
    """A running process. Its output is in ``log`` from byte ``log_start`` on. ``started``: monotonic seconds."""

    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    started: float

    def poll(self) -> int | None:
        """Poll the exit code, negative for a signal; None while running."""
        code = self.process.poll()
        if code is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def interrupt(self) -> None:
        """Ask the child to save and exit."""
        self.process.send_signal(signal.SIGINT)

    def describe_end(self, code: int) -> str:
        """Describe how the child ended: exit code or signal, and the last line of the log."""
        if code < 0:
            name = str(-code)
            if -code in set(signal.Signals):
                name = signal.Signals(-code).name
            hint = ""
            if -code == posix.SIGKILL:
                hint = ", which usually means that memory ran out"
            return f"the process was killed by {name}{hint}"
        lines: list[str] = []
        with suppress(OSError):
            lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").strip().splitlines()
        last = ""
        if lines:
            last = f": {harmless(lines[-1][-300:])} ({self.log})"
        return f"the process exited with code {code}{last}"


def start_child(
    command: Sequence[str], log: Path, what: str, num_threads: int, settings: Mapping[str, str] | None = None
) -> Child:
    """Start ``command`` and append its output to ``log``.

    Args:
        what: owner of the log, for error messages.
        num_threads: compute threads, unless OMP_NUM_THREADS or MKL_NUM_THREADS is set.
        settings: additional environment variables.

    Raises:
        StorageError: the log is not writable, or the process cannot start.
    """
    # the environment takes precedence; MKL defaults to OMP
    threads = os.environ.get("OMP_NUM_THREADS") or str(num_threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS") or threads,
    }
    if settings is not None:
        environment.update(settings)
    environment[LIFELINE] = "stdin"
    with storage_errors(f"the log of {what}", log), log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal reaches only the parent, which forwards it once
        )
    return Child(process, log, start, time.monotonic())


def end_children(children: Iterable[Child], seconds: float = TIMEOUT_SECONDS) -> None:
    """Ask all children to save and exit. After ``seconds``, kill the remaining ones and their subprocesses."""
    working = list(children)
    if seconds:
        for child in working:
            child.interrupt()
    deadline = time.monotonic() + seconds
    for child in working:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        if child.poll() is None:
            posix.kill_group(child.process.pid)
            child.process.wait()
            child.poll()


def end_with_parent() -> None:
    """If ``start_child`` started this process, end it when the parent ends."""
    if not os.environ.pop(LIFELINE, ""):  # grandchildren watch this process, not the original parent
        return
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.read(pipe, 1):  # nothing is ever written: the read returns when the parent is gone
            pass
        if not hasattr(os, "getpgrp") or os.getpgrp() == os.getpid():
            posix.kill_group(os.getpid())  # subprocesses too
        os.kill(os.getpid(), posix.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def threads_per_child(default: int) -> int:
    """Read the child's number of compute threads from OMP_NUM_THREADS, else use ``default``."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested.isascii() and requested.isdigit() and int(requested) > 0:
        return int(requested)
    return default


@contextmanager
def stop_on_signals(first: str = "stopping after this step, with a checkpoint") -> Iterator[Callable[[], bool]]:
    """Yield ``should_stop``: True after the first SIGINT, SIGTERM or SIGHUP, which prints ``first``. The second exits.

    An ignored hang-up (``nohup``) stays ignored. Python allows signal handlers only in the main thread, so elsewhere
    ``should_stop`` is always False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)
        # printing through Python's buffers is not reentrant in a handler; os.write is safe
        with suppress(OSError):  # after a hang-up the terminal may be gone
            os.write(2, f"\n{first}; repeat to stop immediately\n".encode())

    sys.stderr.flush()
    caught = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
