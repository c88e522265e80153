"""Processes that a comparison or a study starts. None of them outlives it, however it ends.

A child holds the reading end of a pipe whose only writing end is its parent's. When the parent ends, ``kill -9``
included, the system closes that end; a thread of the child waits for nothing else, and ends the child with all of its
process group at once. What it had saved is what the same command goes on from. (Linux could send a signal at the
parent's death, but counts that of the thread which started the child; a pipe is the same everywhere.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.store.durable import storage_errors

LIFELINE = "POSTTRAIN_LIFELINE"  # in a child's environment: the descriptor of its end of the pipe
PATIENCE_SECONDS = 10.0


@dataclass
class Child:
    """A process at work; what it says is in ``log`` from byte ``log_start`` on. ``started``: monotonic seconds."""

    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    lifeline: int
    started: float

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it works."""
        code = self.process.poll()
        if code is not None and self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return code

    def interrupt(self) -> None:
        """Ask it to save and end."""
        self.process.send_signal(signal.SIGINT)


def start_child(command: Sequence[str], log: Path, what: str, num_threads: int) -> Child:
    """Start ``command``; its output is added to ``log``.

    Args:
        what: whose log it is, for an error.
        num_threads: of its computations, unless the environment says so.

    Raises:
        StorageError: the log cannot be written, or the process not started.
    """
    reading, writing = os.pipe()
    environment = {**os.environ, **thread_settings(num_threads), LIFELINE: str(reading)}
    try:
        with storage_errors(f"the log of {what}", log), log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(reading,),
                process_group=0,  # Ctrl-C in a terminal reaches us alone; we pass it on once
            )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return Child(process, log, start, writing, time.monotonic())


def end_children(children: Iterable[Child]) -> None:
    """Ask all to save and end; those that have not after ``PATIENCE_SECONDS`` are killed."""
    working = list(children)
    for child in working:
        child.interrupt()
    deadline = time.monotonic() + PATIENCE_SECONDS
    for child in working:
        try:
            child.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.poll()


def end_with_parent() -> None:
    """In a child: from here on it ends when its parent does. Does nothing in any other process."""
    descriptor = os.environ.pop(LIFELINE, "")  # what this process starts has a parent of its own
    if not descriptor:
        return
    os.set_inheritable(int(descriptor), False)
    threading.Thread(target=_watch, args=(int(descriptor),), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):  # nothing is ever written: this returns when the parent is gone
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with what it has started itself
    os.kill(os.getpid(), signal.SIGKILL)


def threads_per_child(default: int) -> int:
    """How many threads a child computes with: what OMP_NUM_THREADS of the environment says, else ``default``."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isascii() and asked.isdigit() and int(asked) > 0 else default


def thread_settings(default: int) -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS of a child. What the environment says is obeyed; MKL goes with OMP."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(default)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS") or threads}
