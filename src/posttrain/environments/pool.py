"""Threads that run what environments do: at most so many at a time, and one that hangs holds nobody up.

Each job may run for a time of its own, counted from when it begins. One that is late is given up: its thread is left
to itself (Python cannot end it) and another takes its place. Who waits is told by the job alone, so no result depends
on which of them finishes first.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

NUM_THREADS = 16


class Job:
    """Something that runs, or waits to: its ``result``, or the ``error`` that it raised, once it is ``done``.

    ``late``: it took longer than its time. It may still become done, which then only says that it has come back.
    """

    def __init__(self, function: Callable[[], Any], seconds: float) -> None:
        self.function, self.seconds = function, seconds
        self.ends: float | None = None  # when its time is over, once it has begun
        self.done = self.late = False
        self.result: Any = None
        self.error: BaseException | None = None


class _Kept:
    """What a user's function, which may raise anything, returned or raised: who waits for it is told."""

    result: Any = None
    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


class Pool:
    """``num_threads`` daemon threads that come as they are needed."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._free = num_threads  # how many more may run
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], Any], seconds: float) -> Job:
        """Have it run as soon as there is room; it may also give a coroutine, which is then run to its end."""
        job = Job(function, seconds)
        with self._changed:
            self._waiting.append(job)
            self._start()
        return job

    def wait(self, job: Job) -> Job:
        """Until the job is done or late."""
        with self._changed:
            while not (job.done or job.late):
                self._give_up_late()
                if not (job.done or job.late):
                    ends = [one.ends for one in self._running if one.ends is not None]
                    self._changed.wait(max(0.0, min(ends) - time.monotonic()) if ends else None)
        return job

    def has_come_back(self, job: Job) -> bool:
        """Whether a job that was late has ended by now."""
        with self._changed:
            return job.done

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """With the lock held: begin what there is room for."""
        if self._waiting and self._free and not self._closed:
            self._free -= 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up_late(self) -> None:
        """With the lock held: those whose time is over give their places to others."""
        now = time.monotonic()
        late = [one for one in self._running if one.ends is not None and one.ends <= now]
        for job in late:
            job.late = True
            self._running.remove(job)
            self._free += 1
            self._start()
        if late:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._closed:
                    self._free += 1
                    return
                job = self._waiting.popleft()
                job.ends = time.monotonic() + job.seconds
                self._running.append(job)
                self._changed.notify_all()
                self._start()
            with _Kept() as kept:
                kept.result = job.function()
                if inspect.iscoroutine(kept.result):
                    kept.result = self._finish(kept.result)
            with self._changed:
                job.result, job.error, job.done = kept.result, kept.error, True
                self._changed.notify_all()
                if job.late:  # another thread has its place
                    return
                self._running.remove(job)

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the one event loop of this pool: what an environment keeps open belongs to it."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environment loop", daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
