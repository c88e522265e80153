"""A pool of worker processes that can be killed: for functions that may hang, or eat all memory, on some inputs.

A worker is a fresh interpreter (no fork, so no threads, locks or device state of the parent come along) that
imports one function and answers items, one by one. Items and results are JSON over pipes; nothing is pickled. It has
none of the parent's environment, where keys and passwords may stand, and an empty folder of its own to be in.

Limits. What counts is the CPU time that a worker spends on an item, measured by the kernel in the worker
(``ITIMER_PROF``). Its signal keeps its default action, so that the kernel ends the process even in the middle of a
long multiplication. CPU time hardly depends on what else the machine does: that makes the verdict on a slow item
repeatable, and the same for any number of workers. A much larger limit on elapsed time catches what waits without
computing; a timer in the worker enforces it, so that it holds without the parent too, and the parent kills a
worker that is still there two seconds later. Memory is limited by how far the address space may grow during an
item.

A worker that dies condemns at most the item that it was at. Those behind it go to another worker. An item whose
worker died for no known reason (killed from outside, a fault in machine code) is tried once more.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.errors import RunFailure
from posttrain.graders.sandbox.worker_process import HEADER, MAX_RESULT_BYTES
from posttrain.world import local_size

MAX_CHUNK = 32  # items that a worker has before it at most
MAX_START_FAILURES = 3  # workers in a row that die before they are ready
MAX_ATTEMPTS = 2
# How a worker ends that passes its limit of computing or elapsed time; where there are no timers, its parent ends it.
_TIMERS = tuple(-getattr(signal, name) for name in ("SIGPROF", "SIGALRM") if hasattr(signal, name)) or (None,)
GRACE_SECONDS = 2.0
START_SECONDS = 120.0
READ_BYTES = 65536
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
    """What one item may use.

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
    """What became of an item: its ``value``; or a time-out or a crash, with the ``reason``."""

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
        self._failed_starts = 0

    def run(self, items: Sequence[Any]) -> list[Result]:
        """One result for each item (anything that JSON can hold), in order.

        Raises:
            RunFailure: no worker can be started.
        """
        self._forget_after_fork()
        with self._lock:
            batch = _Batch(items)
            try:
                while batch.left:
                    self._start(min(self.num_workers, batch.left))
                    for worker in self._workers:
                        worker.feed(batch, self.num_workers)
                    assert batch.waiting or any(worker.assigned for worker in self._workers), "an item was lost"
                    self._step(batch)
            except BaseException:  # Ctrl-C, say: what the workers would answer is nobody's any more
                self._stop()
                raise
            return batch.results

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        self._forget_after_fork()
        with self._lock:
            self._stop()

    def _close_at_exit(self) -> None:
        """As ``close``; but a thread that is left behind in ``run`` cannot hold up the end of the program."""
        held = self._lock.acquire(timeout=GRACE_SECONDS)
        for worker in self._workers if self._owner == os.getpid() else []:
            worker.kill()
        if held:
            self._lock.release()

    @property
    def pids(self) -> list[int]:
        """The workers that are there now."""
        return [worker.process.pid for worker in self._workers]

    def _start(self, wanted: int) -> None:
        if not self._workers:
            atexit.register(self._close_at_exit)
        while len(self._workers) < wanted:
            self._workers.append(_Worker(self.target, self.limits))

    def _step(self, batch: _Batch) -> None:
        """Wait until a worker can be read from or written to, or is overdue, and take what there is."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.results, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            now = time.monotonic()
            deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
            wait = max(0.0, min(deadlines) - now) if deadlines else None
            for key, events in selector.select(wait):
                worker = key.data
                if worker not in self._workers:
                    continue  # its end was read a moment ago
                if events & selectors.EVENT_WRITE:
                    worker.write()
                elif not worker.read(batch):
                    self._bury(worker, batch)
        now = time.monotonic()
        for worker in self._workers:
            if worker.ready:
                self._failed_starts = 0
            if worker.deadline is not None and now > worker.deadline:
                worker.kill()

    def _bury(self, worker: _Worker, batch: _Batch) -> None:
        """Take a dead worker away and settle the items that it had."""
        self._workers.remove(worker)
        code = worker.end()
        if not worker.ready:
            self._failed_starts += 1
            if worker.failure or self._failed_starts >= MAX_START_FAILURES:
                reason = worker.failure or _describe_end(code)
                raise RunFailure(f"a worker process for {self.target} cannot start: {reason}")
        elif worker.assigned and not worker.retired:
            guilty = worker.assigned.popleft()
            if worker.overdue or code in _TIMERS:
                cpu = code == _TIMERS[0]
                limit = self.limits.cpu_seconds if cpu else self.limits.wall_seconds
                batch.settle(
                    guilty, Result("timeout", reason=f"over {limit:g} s {'of CPU time' if cpu else 'elapsed'}")
                )
            else:
                batch.settle_death(guilty, _describe_end(code))
        batch.waiting.extendleft(reversed(worker.assigned))

    def _stop(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()
        self._workers = []
        atexit.unregister(self._close_at_exit)

    def _forget_after_fork(self) -> None:
        """In a forked copy of the parent the workers are the parent's: let go of them, and of who holds the lock."""
        if self._owner != os.getpid():
            for worker in self._workers:
                worker.let_go()
                worker.process.returncode = 0  # not our child: nothing to wait for
            self._workers, self._owner, self._lock = [], os.getpid(), threading.Lock()


class _Batch:
    """The items of one call: which wait, and what became of the others."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.waiting = deque(range(len(items)))
        self.left = len(items)
        self._results: list[Result | None] = [None] * len(items)
        self._deaths: Counter[int] = Counter()

    @property
    def results(self) -> list[Result]:
        return [result for result in self._results if result is not None]

    def settle(self, number: int, result: Result) -> None:
        assert self._results[number] is None, "an item is settled once"
        self._results[number] = result
        self.left -= 1

    def settle_death(self, number: int, reason: str) -> None:
        """A worker died over this item: another attempt, or a crash."""
        self._deaths[number] += 1
        if self._deaths[number] < MAX_ATTEMPTS:
            self.waiting.appendleft(number)
        else:
            self.settle(number, Result("crash", reason=reason))


class _Worker:
    """One process with its pipes and the items that were given to it and not answered yet."""

    def __init__(self, target: str, limits: Limits) -> None:
        if sys.platform == "win32":
            raise RunFailure(
                f"a worker process for {target} waits for its pipes as POSIX systems do, and Windows does not; "
                "run this under WSL, or choose a grader without workers (numeric, exact)"
            )
        try:
            self.folder = tempfile.mkdtemp(prefix="posttrain-worker-")
        except OSError as error:
            raise RunFailure(f"a worker process needs an empty folder, and none can be made: {error}") from None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-c", _BOOT, json.dumps([os.path.abspath(place) for place in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env=_ENVIRONMENT | {name: os.environ[name] for name in _FOR_THE_LOADER if name in os.environ},
            start_new_session=True,  # Ctrl-C in the terminal is not sent to it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.results = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.results, False)
        self.assigned: deque[int] = deque()
        self.unsent = bytearray()
        self.ready = self.retired = self.overdue = self.lost = False
        self.failure = ""
        self._unread = bytearray()
        self._wall_seconds = limits.wall_seconds
        self.deadline: float | None = time.monotonic() + START_SECONDS
        self._queue({"target": target} | asdict(limits))

    def feed(self, batch: _Batch, num_workers: int) -> None:
        """Give it more items when it has few left: its share of a round of four, so that all end together."""
        chunk = max(1, min(MAX_CHUNK, len(batch.waiting) // (4 * num_workers)))
        if not self.ready or self.retired or not batch.waiting or len(self.assigned) > chunk // 2:
            return
        numbers = [batch.waiting.popleft() for _ in range(min(chunk, len(batch.waiting)))]
        if not self.assigned:
            self._expect()
        self.assigned.extend(numbers)
        self._queue([[number, batch.items[number]] for number in numbers])

    def _queue(self, message: Any) -> None:
        body = json.dumps(message).encode()
        self.unsent += HEADER.pack(len(body)) + body

    def _expect(self) -> None:
        self.deadline = time.monotonic() + self._wall_seconds + GRACE_SECONDS

    def write(self) -> None:
        """Send what the pipe takes. If the process is gone, reading will tell."""
        try:
            sent = os.write(self.requests, self.unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:
            sent = len(self.unsent)
        del self.unsent[:sent]

    def read(self, batch: _Batch) -> bool:
        """Take the answers that are there; False when there will be no more."""
        try:
            data = os.read(self.results, READ_BYTES)
        except BlockingIOError:
            return True
        self._unread += data
        while not self.lost and len(self._unread) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._unread)
            if size <= 2 * MAX_RESULT_BYTES and len(self._unread) < HEADER.size + size:
                break
            body = bytes(self._unread[HEADER.size : HEADER.size + size])
            del self._unread[: HEADER.size + size]
            self.lost = not self._take(_parse(body), batch)
            if self.lost:  # never written by ours: what else it says counts for nothing
                self.kill()
        return bool(data)

    def _take(self, answer: Any, batch: _Batch) -> bool:
        """Settle an item, or learn that the process is ready; False if it says what none of ours says."""
        if not isinstance(answer, dict):
            return False
        if "number" not in answer:
            self.ready, self.failure = "ready" in answer, str(answer.get("failed", ""))
            self.deadline = None
            self._remove_folder()  # the process stays in it: nothing can be put there, and nothing is left behind
            return True
        if not self.assigned or self.assigned[0] != answer["number"] or not {"value", "crash"} & set(answer):
            return False
        number = self.assigned.popleft()
        if "crash" in answer:
            batch.settle(number, Result("crash", reason=answer["crash"]))
        else:
            batch.settle(number, Result("value", value=answer["value"]))
        self.retired = bool(answer.get("last"))
        if self.assigned and not self.retired:
            self._expect()
        else:
            self.deadline = None
        return True

    def kill(self) -> None:
        """End it now, by force; its end shows as the end of its results."""
        self.overdue = self.deadline is not None and time.monotonic() > self.deadline
        self.deadline = None
        self.process.kill()

    def end(self) -> int:
        """Wait for its end and close the pipes; the exit code, negative for a signal."""
        self.let_go()
        self._remove_folder()
        try:
            return self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its pipe and runs on
            self.process.kill()
            return self.process.wait()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def let_go(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _parse(body: bytes) -> Any:
    """The message, or None if it is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    return f"the process was ended by {signal.Signals(-code).name}"


_POOLS: dict[tuple[str, int, Limits], WorkerPool] = {}
_POOLS_LOCK = threading.Lock()


def shared_pool(target: str, num_workers: int, limits: Limits) -> WorkerPool:
    """The pool of this process with these settings; made on first use."""
    key = (target, num_workers, limits)
    with _POOLS_LOCK:
        if key not in _POOLS:
            _POOLS[key] = WorkerPool(*key)
        return _POOLS[key]


def count_cpus() -> int:
    """Processors that this process may use: of those of the machine its share, where several train one model."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, there // local_size())
