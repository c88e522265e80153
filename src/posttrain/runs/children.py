"""Processes that a sweep or a run starts. None of them outlives it, however it ends.

A child's standard input is a pipe to which its parent alone has the other end. When the parent ends, ``kill -9``
included, the system closes it, and a thread of the child ends the child with all of its process group.
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

LIFELINE = "POSTTRAIN_LIFELINE"  # in a child's environment: its standard input is that pipe
TIMEOUT_SECONDS = 10.0


@dataclass
class Child:
    """A running process; its output is in ``log`` from byte ``log_start`` on. ``started``: monotonic seconds."""

    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    started: float

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it works."""
        code = self.process.poll()
        if code is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def interrupt(self) -> None:
        """Ask it to save and end."""
        self.process.send_signal(signal.SIGINT)

    def describe_end(self, code: int) -> str:
        """Describe its end by its exit code and the last line of its log."""
        if code < 0:
            name = str(-code)
            if -code in set(signal.Signals):
                name = signal.Signals(-code).name
            hint = ""
            if -code == posix.SIGKILL:
                hint = ", as the system does where memory runs out"
            return f"its process was ended by {name}{hint}"
        lines: list[str] = []
        with suppress(OSError):
            lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").strip().splitlines()
        last = ""
        if lines:
            last = f": {harmless(lines[-1][-300:])} ({self.log})"
        return f"its process ended with exit code {code}{last}"


def start_child(
    command: Sequence[str], log: Path, what: str, num_threads: int, settings: Mapping[str, str] | None = None
) -> Child:
    """Start ``command``; its output is added to ``log``.

    Args:
        what: whose log it is, for an error.
        num_threads: of its computations, unless the environment says so.
        settings: further variables of its environment.

    Raises:
        StorageError: the log cannot be written, or the process not started.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(num_threads)  # the environment decides; MKL goes with OMP
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
            process_group=0,  # Ctrl-C in a terminal reaches us alone; we pass it on once
        )
    return Child(process, log, start, time.monotonic())


def end_children(children: Iterable[Child], seconds: float = TIMEOUT_SECONDS) -> None:
    """Ask all to save and end; those that have not after so many seconds are killed, with what they started."""
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
    """Let this process end when its parent does, if ``start_child`` started it."""
    if not os.environ.pop(LIFELINE, ""):  # what this process starts has a parent of its own
        return
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.read(pipe, 1):  # nothing is ever written: this returns when the parent is gone
            pass
        if not hasattr(os, "getpgrp") or os.getpgrp() == os.getpid():
            posix.kill_group(os.getpid())  # with what it has started itself
        os.kill(os.getpid(), posix.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def threads_per_child(default: int) -> int:
    """Return the number of threads that a child computes with: OMP_NUM_THREADS of the environment, else ``default``."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested.isascii() and requested.isdigit() and int(requested) > 0:
        return int(requested)
    return default


@contextmanager
def stop_on_signals(first: str = "stopping after this step, with a checkpoint") -> Iterator[Callable[[], bool]]:
    """Yield ``should_stop``: True after the first SIGINT, SIGTERM or SIGHUP, which prints ``first``. The second exits.

    A hang-up that is ignored (``nohup``) stays so. Outside of the main thread, where Python allows no handlers, it is
    always False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)
        # printing through Python's buffers from a handler may re-enter them; this may not
        with suppress(OSError):  # after a hang-up nobody may be there to read it
            os.write(2, f"\n{first}; once more to stop at once\n".encode())

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
