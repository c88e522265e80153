"""Thread pool for environments: limits concurrency, and isolates hanging calls.

Timeouts start when a job starts. Late jobs are abandoned: their threads cannot be killed in Python, so new threads
replace them. Each caller waits for a specific job, so results do not depend on completion order.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self

NUM_THREADS = 16


class EnvironmentJob:
    """A submitted function. ``result`` or ``error`` is set once ``done``; a ``late`` job may still finish.

    ``cancels``: cancel its coroutine at the deadline.
    """

    def __init__(self, function: Callable[[], Any], seconds: float, cancels: bool = False) -> None:
        self.function = function
        self.seconds = seconds
        self.cancels = cancels
        self.coroutine: Future[object] | None = None
        self.ends: float | None = None  # deadline, set at the start
        self.done = False
        self.late = False
        self.result: object = None
        self.error: BaseException | None = None


class Pool:
    """Pool with up to ``num_threads`` daemon threads, started on demand."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[EnvironmentJob] = deque()
        self._running: list[EnvironmentJob] = []
        self._free = num_threads  # free thread slots
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], Any], seconds: float, *, cancels: bool = False) -> EnvironmentJob:
        """Run a function once a thread is free; a returned coroutine is also awaited.

        ``cancels``: cancel the coroutine at the deadline.
        """
        job = EnvironmentJob(function, seconds, cancels)
        with self._changed:
            self._waiting.append(job)
            self._start()
        return job

    def wait(self, job: EnvironmentJob) -> EnvironmentJob:
        """Wait until a job is done or late."""
        with self._changed:
            while not (job.done or job.late):
                self._give_up_late()
                if job.done or job.late:
                    break
                ends = [one.ends for one in self._running if one.ends is not None]
                seconds = None
                if ends:
                    seconds = max(0.0, min(ends) - time.monotonic())
                self._changed.wait(seconds)
        return job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop starting jobs."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            loop = self._loop
            self._loop = None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _start(self) -> None:
        """Start a thread if jobs and a slot are available. Requires the lock."""
        if self._waiting and self._free and not self._is_closed:
            self._free -= 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up_late(self) -> None:
        """Free the slots of late jobs. Requires the lock."""
        now = time.monotonic()
        late = [job for job in self._running if job.ends is not None and job.ends <= now]
        for job in late:
            job.late = True
            if job.cancels and job.coroutine is not None:
                job.coroutine.cancel()
            self._running.remove(job)
            self._free += 1
            self._start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._is_closed:
                    self._free += 1
                    return
                job = self._waiting.popleft()
                job.ends = time.monotonic() + job.seconds
                self._running.append(job)
                self._changed.notify_all()
                self._start()
            try:
                job.result = job.function()
                if inspect.iscoroutine(job.result):
                    job.result = self._finish(job, job.result)
            except BaseException as error:  # noqa: BLE001 - user code may raise anything; callers receive it
                job.error = error
            with self._changed:
                job.done = True
                self._changed.notify_all()
                if job.late:  # another thread took over
                    return
                self._running.remove(job)

    def _finish(self, job: EnvironmentJob, coroutine: Coroutine[object, object, object]) -> object:
        """Run a coroutine in this pool's event loop, which owns all environment connections."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environment loop", daemon=True).start()
            job.coroutine = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            if job.cancels and job.late:
                job.coroutine.cancel()
        return job.coroutine.result()
