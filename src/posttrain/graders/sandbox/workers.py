"""Pool of killable worker processes, for functions that may hang or exhaust memory on some inputs.

Workers are fresh interpreters (not forks, so they inherit no threads, locks or device state). Each imports one
function and processes items as JSON lines, with an empty environment and a process group that is killed as a whole.

The main limit is CPU time, measured by the kernel (``ITIMER_PROF``, whose signal ends a process even within a long
multiplication) and nearly independent of machine load. A much larger wall-clock limit stops processes that wait. If a
worker dies for unknown reasons, its item is retried once.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.errors import RunFailure
from posttrain.process_group import local_size

MAX_RESULT_BYTES = 65536
NUM_ATTEMPTS = 2
GRACE_SECONDS = 2.0
START_SECONDS = 120.0
# The workers' entire environment. A fixed hash seed makes set iteration order reproducible, hence verdicts too. Some
# interpreters cannot start without the loader's variables.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The time zone decides what a chat template shows as today.
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONHOME", "TZ")
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from posttrain.graders.sandbox.worker_process import main; main()"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per item.

    ``cpu_seconds``: CPU time. ``wall_seconds``: elapsed time; keep it far above CPU time, otherwise machine load
    decides. ``memory_bytes``: address space growth (Linux only). ``compiles``: whether the function may turn text
    into code (``eval``); other side effects remain forbidden. ``max_result_bytes``: reply size as JSON; larger
    replies count as crashes.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 512 * 2**20
    compiles: bool = False
    max_result_bytes: int = MAX_RESULT_BYTES


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Outcome for an item: a ``value``, or a time-out or crash with a ``reason``."""

    kind: Literal["value", "timeout", "crash"]
    value: Any = None
    reason: str = ""


class WorkerPool:
    """Runs a function on many items in killable processes.

    Args:
        target: ``module:function`` with one argument, importable in a fresh interpreter.
        num_workers: maximum number of processes. Started on demand, then kept.
        limits: limits per item.

    ``run`` is thread-safe; concurrent calls wait for each other. Workers exit once the pool is closed, at program
    exit, or if this process dies.
    """

    def __init__(self, target: str, num_workers: int, limits: Limits) -> None:
        self.target = target
        self.num_workers = num_workers
        self.limits = limits
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        atexit.register(self._kill)

    def run(self, items: Sequence[object]) -> list[WorkerResult]:
        """Run all items in order, returning JSON-compatible results.

        Raises:
            RunFailure: no worker could be started.
        """
        waiting = deque(enumerate(items))
        results: dict[int, WorkerResult] = {}
        failures: list[RunFailure] = []
        size = min(self.num_workers, len(items))
        shared = (waiting, results, failures)
        with self._lock:
            self._workers += [_Worker(self.target, self.limits) for _ in range(size - len(self._workers))]
            # No executor, whose threads would delay program exit. A single worker runs without a thread.
            threads = [threading.Thread(target=one.serve, args=shared, daemon=True) for one in self._workers[1:size]]
            for thread in threads:
                thread.start()
            try:
                for worker in self._workers[:1]:
                    worker.serve(*shared)
                for thread in threads:
                    thread.join()
                if failures:
                    raise failures[0]
            except BaseException:  # Ctrl-C, too
                self._kill()
                for thread in threads:
                    thread.join()
                self._end()
                raise
        return [results[number] for number in range(len(items))]

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        with self._lock:
            self._end()

    @property
    def pids(self) -> list[int]:
        """Currently running workers."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _kill(self) -> None:
        """Kill workers from another thread. A forked copy of this process must not touch them."""
        if self._owner != os.getpid():
            return
        for worker in self._workers:
            worker.is_stopped = True
            if worker.process is not None:
                worker.process.kill()


class _Worker:
    """A process started on demand, replaced if it dies."""

    def __init__(self, target: str, limits: Limits) -> None:
        self.target = target
        self.limits = limits
        self.is_stopped = False
        self.process: subprocess.Popen[bytes] | None = None

    def serve(
        self, waiting: deque[tuple[int, object]], results: dict[int, WorkerResult], failures: list[RunFailure]
    ) -> None:
        """Process items until none remain, storing results."""
        try:
            while not self.is_stopped:
                number, item = waiting.popleft()
                results[number] = self._answer(item)
        except IndexError:  # queue is empty
            return
        except RunFailure as error:
            failures.append(error)
            waiting.clear()

    def _answer(self, item: object) -> WorkerResult:
        answer: dict[str, Any] = {"code": 0}
        for _ in range(NUM_ATTEMPTS):
            if self.is_stopped:
                break
            if self.process is None:
                self._start()
            answer = self._ask(item, self.limits.wall_seconds + GRACE_SECONDS, ("value", "crash"))
            if answer.get("last"):
                self.end()
            if "crash" in answer:
                return WorkerResult("crash", reason=str(answer["crash"]))
            if "value" in answer:
                return WorkerResult("value", value=answer["value"])
            if answer["code"] == -signal.SIGPROF:
                return WorkerResult("timeout", reason=f"over {self.limits.cpu_seconds:g} s of CPU time")
            if answer["is_late"] or answer["code"] == -signal.SIGALRM:
                return WorkerResult("timeout", reason=f"over {self.limits.wall_seconds:g} s elapsed")
        return WorkerResult("crash", reason=_describe_end(answer["code"]))

    def _start(self) -> None:
        if sys.platform == "win32":
            raise RunFailure(
                f"a worker process for {self.target} waits for its pipes as POSIX systems do, and Windows does not; "
                "run this under WSL, or choose a grader without workers (numeric, exact)"
            )
        self._channel, theirs = socket.socketpair()
        search_path = json.dumps([os.path.abspath(place) for place in sys.path])
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-c", _BOOT, search_path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_ENVIRONMENT | passed_on,
                start_new_session=True,  # Ctrl-C in the terminal is not sent to it
            )
        settings = {"target": self.target} | asdict(self.limits)
        answer = self._ask(settings, START_SECONDS, ("ready", "failed"))
        if "ready" not in answer:
            reason = answer.get("failed") or _describe_end(answer.get("code", 0))
            self.end()
            raise RunFailure(f"a worker process for {self.target} cannot start: {reason}")

    def _ask(self, message: object, seconds: float, keys: tuple[str, str]) -> dict[str, Any]:
        """Send a message and return its reply, which has one of ``keys``.

        If no valid reply arrives in time, kill the process and set its exit ``code`` and ``is_late``.
        """
        is_late = False
        has_ended = False
        data = bytearray()
        deadline = time.monotonic() + seconds
        self._channel.settimeout(seconds)
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
            while not data.endswith(b"\n") and len(data) <= 2 * self.limits.max_result_bytes:
                self._channel.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._channel.recv(MAX_RESULT_BYTES)
                data += part
                if not part:
                    raise ConnectionError("its end is closed")
            answer = json.loads(data)
            if isinstance(answer, dict) and not answer.keys().isdisjoint(keys):
                return answer
        except (OSError, ValueError) as error:  # process died, timed out, or sent invalid JSON
            is_late = isinstance(error, TimeoutError)
            has_ended = isinstance(error, ConnectionError)
        return {"code": self.end(has_ended=has_ended), "is_late": is_late}

    def end(self, *, has_ended: bool = False) -> int:
        """Kill the process group. Returns its exit code, negative for signals.

        A process that already closed its channel is exiting and keeps its code.
        """
        process = self.process
        self.process = None
        if process is None:
            return 0
        if has_ended:
            self._channel.close()
        with suppress(ProcessLookupError, ChildProcessError):
            if has_ended:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its limits end it
            os.killpg(process.pid, signal.SIGKILL)
        self._channel.close()  # before the kill, it would exit normally with a success code
        return process.wait()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    return f"the process was ended by {signal.Signals(-code).name}"


_POOLS: dict[tuple[int, str, int, Limits], WorkerPool] = {}


def shared_pool(target: str, num_workers: int, limits: Limits) -> WorkerPool:
    """Get this process's pool for these settings, creating it on first use."""
    key = (os.getpid(), target, num_workers, limits)
    if key not in _POOLS:
        _POOLS.setdefault(key, WorkerPool(target, num_workers, limits))
    return _POOLS[key]


def count_cpus() -> int:
    """Count processors available to this process: its share during multi-process training."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    return max(1, there // local_size())
