"""Processes that a sweep or a run starts. None of them outlives it, however it ends.

A child holds the reading end of a pipe whose only writing end is its parent's. When the parent ends, ``kill -9``
included, the system closes that end, and a thread of the child ends the child with all of its process group.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import RunFailure
from posttrain.store import posix
from posttrain.store.durable import storage_errors
from posttrain.untrusted import harmless

if TYPE_CHECKING:
    from posttrain.train.distributed import Meeting

LIFELINE = "POSTTRAIN_LIFELINE"  # in a child's environment: the descriptor of its end of the pipe
FOLLOW = "__follow"  # the command of a process that trains with others
PATIENCE_SECONDS = 10.0
LAST_SECONDS = 40.0  # for this process to notice that another one ended, where it waits for that one


@dataclass
class Child:
    """A running process; its output is in ``log`` from byte ``log_start`` on. ``started``: monotonic seconds."""

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
    reading, writing = os.pipe()
    environment = {**os.environ, **thread_settings(num_threads), **(settings or {}), LIFELINE: str(reading)}
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
    if not hasattr(os, "getpgrp") or os.getpgrp() == os.getpid():
        posix.kill_group(os.getpid())  # with what it has started itself
    os.kill(os.getpid(), posix.SIGKILL)


def threads_per_child(default: int) -> int:
    """Number of threads that a child computes with: OMP_NUM_THREADS of the environment, else ``default``."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isascii() and asked.isdigit() and int(asked) > 0 else default


def thread_settings(default: int) -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS of a child. The environment decides; MKL goes with OMP."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(default)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS") or threads}


@contextmanager
def following(meeting: Meeting, folder: Path) -> Iterator[None]:
    """Start ranks 1 and up of a run on this machine, for the time of the block; this process is rank 0.

    They keep nothing, so they are killed behind the block. A rank that ends before leaves its record in the
    ``meeting``. Its output is in ``log-RANK.txt`` of the ``folder``.
    """
    import torch

    num_threads = torch.get_num_threads()
    own = threads_per_child(max(1, num_threads // meeting.size))
    shared = {"LOCAL_WORLD_SIZE": str(meeting.size)}
    if "lo" in (name for _, name in socket.if_nameindex()):
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # they talk within this machine alone
    before = {name: os.environ.get(name) for name in shared}
    place = {"WORLD_SIZE": str(meeting.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.store.port)}
    children: dict[int, Child] = {}
    ended = threading.Event()
    try:
        os.environ.update(shared)
        torch.set_num_threads(own)
        for rank in range(1, meeting.size):
            settings = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "posttrain", FOLLOW]
            children[rank] = start_child(command, folder / f"log-{rank}.txt", f"rank {rank}", own, settings)
        watch = threading.Thread(target=_watch_ranks, args=(meeting, children, ended), name="ranks", daemon=True)
        watch.start()
        yield
    finally:
        ended.set()
        for child in children.values():
            _end_at_once(child)
        torch.set_num_threads(num_threads)
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _end_at_once(child: Child) -> None:
    """Kill a child with what it has started itself; remove an empty log."""
    if child.poll() is None:
        posix.kill_group(child.process.pid)
        child.process.wait()
        child.poll()
    with suppress(OSError):
        if child.log.stat().st_size == 0:
            child.log.unlink()


def _watch_ranks(meeting: Meeting, children: Mapping[int, Child], ended: threading.Event) -> None:
    """Leave a record of the first rank that ends with an error; end this process if it hangs for that reason."""
    while not ended.wait(0.1):
        codes = {rank: child.process.poll() for rank, child in children.items()}
        for rank, code in codes.items():
            if code:
                meeting.fail(rank, describe_end(code, children[rank]), RunFailure.exit_code)
                if not ended.wait(LAST_SECONDS) and not meeting.noticed and (failure := meeting.failure()):
                    os.write(2, f"posttrain: {failure}\n".encode())
                    os._exit(failure.exit_code)
                return


def describe_end(code: int, child: Child) -> str:
    """Describe the end of a process by its exit code and the last line of its log."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = ", as the system does where memory runs out" if -code == posix.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    with suppress(OSError):
        said = child.log.read_bytes()[child.log_start :].decode(errors="replace").strip()
        if said:
            return f"its process ended with exit code {code}: {harmless(said.splitlines()[-1][-300:])} ({child.log})"
    return f"its process ended with exit code {code}"
