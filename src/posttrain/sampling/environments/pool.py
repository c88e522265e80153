"""Threads that run environments: a limited number at a time, and a hanging call delays no other.

The time of a job counts from its beginning. A late job is given up: its thread is left alone (Python cannot end it)
and another takes its place. A caller waits for one job, so no result depends on the order in which jobs finish.
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
    """A function in the pool: its ``result`` or ``error`` once it is ``done``. A ``late`` one may become done later.

    ``cancels``: a coroutine of it is cancelled when it is late.
    """

    def __init__(self, function: Callable[[], Any], seconds: float, cancels: bool = False) -> None:
        self.function = function
        self.seconds = seconds
        self.cancels = cancels
        self.coroutine: Future[object] | None = None
        self.ends: float | None = None  # the end of its time, once it has begun
        self.done = False
        self.late = False
        self.result: object = None
        self.error: BaseException | None = None


class Pool:
    """``num_threads`` daemon threads that are started as they are needed."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[EnvironmentJob] = deque()
        self._running: list[EnvironmentJob] = []
        self._free = num_threads  # how many more may run
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], Any], seconds: float, *, cancels: bool = False) -> EnvironmentJob:
        """Run the function as soon as there is room; a coroutine that it returns is run to its end.

        ``cancels``: until its end, or until it is late.
        """
        job = EnvironmentJob(function, seconds, cancels)
        with self._changed:
            self._waiting.append(job)
            self._start()
        return job

    def wait(self, job: EnvironmentJob) -> EnvironmentJob:
        """Wait until the job is done or late."""
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
        """Begin nothing more."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            loop = self._loop
            self._loop = None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _start(self) -> None:
        """Start a thread if there is work and room. The lock is held."""
        if self._waiting and self._free and not self._is_closed:
            self._free -= 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up_late(self) -> None:
        """Give the places of late jobs to others. The lock is held."""
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
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the caller gets it
                job.error = error
            with self._changed:
                job.done = True
                self._changed.notify_all()
                if job.late:  # another thread has its place
                    return
                self._running.remove(job)

    def _finish(self, job: EnvironmentJob, coroutine: Coroutine[object, object, object]) -> object:
        """Run a coroutine in the one event loop of this pool, to which an environment's connections belong."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environment loop", daemon=True).start()
            job.coroutine = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            if job.cancels and job.late:
                job.coroutine.cancel()
        return job.coroutine.result()
