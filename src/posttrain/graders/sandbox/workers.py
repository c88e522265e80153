"""A pool of worker processes that can be killed: for functions that may hang, or eat all memory, on some inputs.

A worker is a fresh interpreter (no fork, so no threads, locks or device state of the parent come along) that imports
one function and answers items, one by one. Items and results are lines of JSON; nothing is pickled. It has none of the
parent's environment, where keys and passwords may stand, and an empty folder of its own.

The limit that counts is the CPU time of an item, measured by the kernel in the worker (``ITIMER_PROF``). Its signal
keeps its default action, so that the kernel ends the process even in the middle of a long multiplication. CPU time
hardly depends on the load of the machine: the verdict on a slow item is repeatable, and the same for any number of
workers. A much larger limit on elapsed time catches what waits without computing. Memory is limited by how far the
address space may grow during an item. An item whose worker died for no known reason is tried once more.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.errors import RunFailure
from posttrain.graders.sandbox.worker_process import MAX_RESULT_BYTES
from posttrain.world import local_size

MAX_START_FAILURES = 3  # workers in a row that die before they are ready
MAX_ATTEMPTS = 2
GRACE_SECONDS = 2.0
START_SECONDS = 120.0
# How a worker ends that passes its limit of computing or elapsed time; where there are no timers, its parent ends it.
_BY_CPU, _BY_TIME = (-getattr(signal, name, 0) for name in ("SIGPROF", "SIGALRM"))
# All that a worker sees of the environment. Hashes are seeded alike: the order in which a set is walked is then no
# source of different verdicts. Where the loader's names are set, the interpreter may not start without them.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_FOR_THE_LOADER = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONHOME")
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from posttrain.graders.sandbox.worker_process import main; main()"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one item.

    ``cpu_seconds``: computing time. ``wall_seconds``: elapsed time; keep it far above the first, or the load of the
    machine decides. ``memory_bytes``: growth of the address space (Linux; elsewhere there is no such limit).
    ``compiles``: whether the function may turn text into code (``eval``); all other effects stay refused.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 512 * 2**20
    compiles: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of an item: its ``value``; or a time-out or a crash, with the ``reason``."""

    kind: Literal["value", "timeout", "crash"]
    value: Any = None
    reason: str = ""


class WorkerPool:
    """Calls one function on many items in killable processes; see the module.

    Args:
        target: ``module:function``, of one argument. It must be importable in a new interpreter, and it should
            import nothing heavy that it does not need.
        num_workers: processes at most. They start when there is work, and stay.
        limits: for each item.

    ``run`` may be called from any thread; calls wait for one another. The workers end when the pool is closed, at
    the end of the program, or when this process dies.
    """

    def __init__(self, target: str, num_workers: int, limits: Limits) -> None:
        assert num_workers >= 1
        self.target = target
        self.num_workers = num_workers
        self.limits = limits
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._owner = os.getpid()

    def run(self, items: Sequence[Any]) -> list[Result]:
        """Return one result for each item (anything that JSON can hold), in order.

        Raises:
            RunFailure: no worker can be started.
        """
        self._forget_after_fork()
        waiting = deque(enumerate(items))
        results: dict[int, Result] = {}
        failures: list[RunFailure] = []
        size = min(self.num_workers, len(items))
        with self._lock:
            if size and not self._workers:
                atexit.register(self._close_at_exit)
            self._workers += [_Worker(self.target, self.limits) for _ in range(size - len(self._workers))]
            asked = (waiting, results, failures)
            # No executor: its threads would hold up the end of the program.
            threads = [threading.Thread(target=one.serve, args=asked, daemon=True) for one in self._workers[:size]]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException:  # Ctrl-C, say
                waiting.clear()
                for worker in self._workers:
                    worker.stop()
                for thread in threads:
                    thread.join()
                self._stop()
                raise
            if failures:
                self._stop()
                raise failures[0]
        return [results[number] for number in range(len(items))]

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        self._forget_after_fork()
        with self._lock:
            self._stop()

    def _close_at_exit(self) -> None:
        """Kill the workers, also where a thread is left behind in ``run``."""
        if self._owner == os.getpid():
            for worker in self._workers:
                worker.stop()

    @property
    def pids(self) -> list[int]:
        """The workers that are there now."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def _stop(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []
        atexit.unregister(self._close_at_exit)

    def _forget_after_fork(self) -> None:
        """In a forked copy of the parent the workers are the parent's: let go of them, and of who holds the lock."""
        if self._owner != os.getpid():
            for worker in self._workers:
                worker.forget()
            self._workers, self._owner, self._lock = [], os.getpid(), threading.Lock()


class _Worker:
    """One process at a time, which is started when an item needs it."""

    def __init__(self, target: str, limits: Limits) -> None:
        self.target, self.limits = target, limits
        self.process: subprocess.Popen[bytes] | None = None
        self._is_overdue = self._has_ended = self._is_stopped = False

    def serve(self, waiting: deque[tuple[int, Any]], results: dict[int, Result], failures: list[RunFailure]) -> None:
        """Take items until none is left, and note their results."""
        try:
            self._serve(waiting, results)
        except RunFailure as error:
            failures.append(error)
            waiting.clear()

    def _serve(self, waiting: deque[tuple[int, Any]], results: dict[int, Result]) -> None:
        while waiting:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another worker took the last one
                return
            for attempt in range(1, MAX_ATTEMPTS + 1):
                if self._is_stopped:
                    return
                result, is_known = self._answer(item)
                if is_known or attempt == MAX_ATTEMPTS:
                    break
            results[number] = result

    def _answer(self, item: Any) -> tuple[Result, bool]:
        """Return the result of an item, and whether it is this item's own."""
        line = json.dumps(item).encode() + b"\n"
        self._start()
        while not self._send(line):  # it was killed while it waited for work
            self.end()
            self._start()
        answer = self._read(self.limits.wall_seconds + GRACE_SECONDS)
        if answer is None or not {"value", "crash"} & set(answer):
            is_overdue, code = self._is_overdue, self.end()
            if is_overdue or code in (_BY_CPU, _BY_TIME):
                cpu = not is_overdue and code == _BY_CPU
                limit = self.limits.cpu_seconds if cpu else self.limits.wall_seconds
                return Result("timeout", reason=f"over {limit:g} s {'of CPU time' if cpu else 'elapsed'}"), True
            return Result("crash", reason=_describe_end(code)), False
        if answer.get("last"):
            self.end()
        if "crash" in answer:
            return Result("crash", reason=str(answer["crash"])), True
        return Result("value", value=answer["value"]), True

    def _start(self) -> None:
        for _ in range(MAX_START_FAILURES):
            if self.process is not None:
                return
            self._open()
            answer = self._read(START_SECONDS)
            shutil.rmtree(self._folder, ignore_errors=True)  # the process stays in it: nothing is left behind
            if answer is not None and "ready" in answer:
                return
            code = self.end()
            reason = str(answer["failed"]) if answer is not None and "failed" in answer else _describe_end(code)
            if answer is not None:
                break
        raise RunFailure(f"a worker process for {self.target} cannot start: {reason}")

    def _open(self) -> None:
        if sys.platform == "win32":
            raise RunFailure(
                f"a worker process for {self.target} waits for its pipes as POSIX systems do, and Windows does not; "
                "run this under WSL, or choose a grader without workers (numeric, exact)"
            )
        try:
            self._folder = tempfile.mkdtemp(prefix="posttrain-worker-")
        except OSError as error:
            raise RunFailure(f"a worker process needs an empty folder, and none can be made: {error}") from None
        self._unread = bytearray()
        self._is_overdue = self._has_ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-c", _BOOT, json.dumps([os.path.abspath(place) for place in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=self._folder,
            env=_ENVIRONMENT | {name: os.environ[name] for name in _FOR_THE_LOADER if name in os.environ},
            start_new_session=True,  # Ctrl-C in the terminal is not sent to it
        )
        self._send(json.dumps({"target": self.target} | asdict(self.limits)).encode() + b"\n")

    def _send(self, line: bytes) -> bool:
        """Send a line to a process that reads; whether it is there."""
        assert self.process is not None
        assert self.process.stdin is not None
        parts = memoryview(line)
        try:
            while parts:
                parts = parts[os.write(self.process.stdin.fileno(), parts) :]
        except OSError:  # it is gone
            return False
        return True

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line as a mapping; None if there is none in time, or another thing than ours write."""
        process = self.process
        assert process is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        poll = select.poll()
        try:
            poll.register(process.stdout, select.POLLIN)
            while b"\n" not in self._unread:
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    self._is_overdue = True
                    return None
                part = os.read(process.stdout.fileno(), MAX_RESULT_BYTES)
                self._unread += part
                self._has_ended = not part
                if self._has_ended or len(self._unread) > 2 * MAX_RESULT_BYTES:
                    return None
            line, _, self._unread = self._unread.partition(b"\n")
            answer = json.loads(line)
        except ValueError:  # no JSON
            return None
        return answer if isinstance(answer, dict) and not self._unread else None

    def stop(self) -> None:
        """Kill the process, from another thread; its item gets no other one."""
        self._is_stopped = True
        process = self.process
        if process is not None:
            process.kill()

    def forget(self) -> None:
        """Let go of a process that is another one's child."""
        process, self.process = self.process, None
        if process is not None:
            process.returncode = 0
            self._close(process)

    def end(self) -> int:
        """Kill the process if it is there; its exit code, negative for a signal.

        One that closed its pipe is ending by itself, and keeps its own code.
        """
        process, self.process = self.process, None
        if process is None:
            return 0
        try:
            return process.wait(GRACE_SECONDS if self._has_ended else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            self._close(process)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    return f"the process was ended by {signal.Signals(-code).name}"


_POOLS: dict[tuple[str, int, Limits], WorkerPool] = {}
_POOLS_LOCK = threading.Lock()


def shared_pool(target: str, num_workers: int, limits: Limits) -> WorkerPool:
    """Return the pool of this process with these settings; made on first use."""
    key = (target, num_workers, limits)
    with _POOLS_LOCK:
        if key not in _POOLS:
            _POOLS[key] = WorkerPool(*key)
        return _POOLS[key]


def count_cpus() -> int:
    """Return the processors that this process may use: its share, where several train one model."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, there // local_size())
