"""Concurrent sampling: small requests share a batch, and batches take turns on the model.

Model time is divided in proportion to the number of requests in each generation. A large request therefore delays
a small one by at most the small one's own duration. A single thread does all decoding and detokenization, since
a second thread would compete for the GIL at every operation.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from posttrain.errors import PosttrainError
from posttrain.models.forward.predictions import gpu_memory_of
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.native.engine import Generation, NativeEngine
from posttrain.sampling.native.schedule import check_finite
from posttrain.store.posix import memory_bytes

SMALL_REQUEST_ROWS = 8  # answers; larger requests get a separate generation
FEWEST_SLOTS = 8
LARGE_REQUEST_SLOTS = 32  # on a CPU, where step time grows with rows and other requests wait for a step
SLICE_SECONDS = 0.002  # maximum lead of a generation over others
# Maximum lead of a new generation, restored after others have worked equally long. Short requests need not wait for
# their turn, and many short requests in a row cannot starve others.
HEAD_START_SECONDS = 0.05
MEMORY_SHARE = 0.25  # fraction of machine or GPU memory for KV caches
LARGE_SHARE = 0.5  # fraction of the KV budget for requests with a separate generation
WAIT_SECONDS = 600.0  # for memory

Take = Callable[[int, Sequence[tuple[int, float]], bool], bool]
End = Callable[[BaseException | None], None]


class ServerBusy(PosttrainError):
    """A request has waited too long for memory that others hold."""

    status = 503
    code = "server_busy"


@dataclass(eq=False)
class TurnsTask:
    """Answers to a complete request, or a single streamed answer.

    Args:
        prompts: token ids; rows refer to prompts by index.
        take: called in the decoding thread with row index, new tokens with log-probabilities, and a flag for the final
            tokens. Returns True to end the row early.
        finish: called in the decoding thread after all rows ended, or with the error that aborted them.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Conversation]
    sampling: Sampling
    take: Take
    finish: End
    is_cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    given: list[int] = field(default_factory=list)  # tokens per row passed to ``take``
    open_rows: list[int] = field(default_factory=list)  # unfinished rows

    longest: int = 0  # row length including prompt
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.given = [0] * len(self.rows)
        self.open_rows = list(range(len(self.rows)))
        self.longest = max(len(self.prompts[row.prompt]) + row.limit for row in self.rows)

    @property
    def key(self) -> Hashable:
        """Sampling options shared by all rows in a batch."""
        return replace(self.sampling, max_tokens=1)

    @property
    def is_small(self) -> bool:
        """True if it shares a generation with other requests."""
        return len(self.rows) <= SMALL_REQUEST_ROWS

    def tokens_in_flight(self, slots: int) -> int:
        """Compute the maximum number of tokens in the KV cache at a time."""
        return self.longest * min(slots, len(self.rows))


@dataclass(eq=False)
class SharedGeneration:
    """A generation and the tasks that share it; ``used``: seconds of model time per task so far."""

    generation: Generation
    key: Hashable
    tasks: list[TurnsTask]
    used: float = 0.0
    error: BaseException | None = None


class DecodingThread:
    """The thread that decodes for all requests."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.device = engine.model.get_input_embeddings().weight.device
        self._news = threading.Condition()
        self._has_news = False
        self._submitted: deque[TurnsTask] = deque()
        self._is_closed = False
        self._waiting: list[TurnsTask] = []
        self._shares: list[SharedGeneration] = []
        self._budget: int | None = None
        self._head_start = HEAD_START_SECONDS  # of the next new generation
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, task: TurnsTask) -> None:
        """Queue a task. Sampling starts at the next step, if memory is available."""
        with self._news:
            if not self._is_closed:
                self._submitted.append(task)
                self._has_news = True
                self._news.notify()
                return
        task.finish(ServerBusy("the server ends"))

    def cancel(self, task: TurnsTask) -> None:
        """End a task whose answers nobody awaits."""
        task.is_cancelled = True
        with self._news:
            self._has_news = True
            self._news.notify()

    def close(self) -> None:
        """End all work."""
        with self._news:
            self._is_closed = True
            self._has_news = True
            self._news.notify()
        self._thread.join(timeout=30)

    def _work(self) -> None:
        try:
            while not self._is_closed:
                self._take_news()
                self._start_waiting()
                if self._shares:
                    self._take_turn(min(self._shares, key=lambda share: share.used))
        finally:  # the thread has ended, so nobody would notify
            with self._news:
                self._is_closed = True
            for task in [*self._submitted, *self._waiting, *(one for share in self._shares for one in share.tasks)]:
                task.finish(ServerBusy("the server ends"))

    def _take_news(self) -> None:
        with self._news:
            while not (self._has_news or self._shares):
                timeout = None
                if self._waiting:
                    timeout = 1.0
                if not self._news.wait(timeout):
                    break
            self._has_news = False
            self._waiting += self._submitted
            self._submitted.clear()

    def _start_waiting(self) -> None:
        """Start tasks that fit into memory, grouping equal options; drop cancelled tasks."""
        started: list[TurnsTask] = []
        for task in self._waiting:
            if task.is_cancelled:
                task.finish(None)
            elif self._has_room(task, started):
                started.append(task)
            elif time.monotonic() - task.submitted > WAIT_SECONDS:
                problem = f"no free memory for {WAIT_SECONDS:.0f} s because of other requests; try again"
                task.finish(ServerBusy(problem))
            else:
                continue
            self._waiting = [one for one in self._waiting if one is not task]
        small = [task for task in started if task.is_small and not self._join(task)]
        large = [task for task in started if not task.is_small]
        by_key: dict[Hashable, list[TurnsTask]] = {}
        for task in small:
            by_key.setdefault(task.key, []).append(task)
        for tasks in by_key.values():
            while tasks:
                tasks = self._open(tasks)
        for task in large:
            self._open([task])

    def _has_room(self, task: TurnsTask, started: Sequence[TurnsTask]) -> bool:
        if self._budget is None:
            self._budget = int(_memory_of(self.device) * MEMORY_SHARE / max(1, self.engine.bytes_per_token))
        active = [*started, *(one for share in self._shares for one in share.tasks)]
        if not task.is_small:
            active = [one for one in active if not one.is_small]
        if not active:
            return True
        slots = self.engine.slots
        needed = task.tokens_in_flight(slots) + sum(one.tokens_in_flight(slots) for one in active)
        if task.is_small:
            return needed <= self._budget
        return needed <= self._budget * LARGE_SHARE

    def _join(self, task: TurnsTask) -> bool:
        """Add a task to a running generation with equal options, if there is room."""
        for share in self._shares:
            if share.key == task.key and share.generation.join(task.prompts, task.rows):
                share.tasks.append(task)
                return True
        return False

    def _open(self, tasks: list[TurnsTask]) -> list[TurnsTask]:
        """Begin a generation for the first tasks; return those that did not fit."""
        first = tasks[0]
        rest = tasks[1:]
        key: Hashable = None
        slots = self.engine.slots
        if first.is_small:
            key = first.key
            wanted = max(FEWEST_SLOTS, sum(len(task.rows) for task in tasks))
            slots = min(slots, 1 << (wanted - 1).bit_length())
        elif self.device.type == "cpu":
            slots = min(slots, LARGE_REQUEST_SLOTS)
        try:
            generation = self.engine.begin_generation(first.prompts, first.rows, first.sampling, slots=slots)
        except Exception as error:  # noqa: BLE001  # of the model's code, which may raise anything
            first.error = error
            first.finish(first.error)
            return rest
        used = min((share.used for share in self._shares), default=0.0) - self._head_start
        self._head_start = 0.0
        self._shares.append(SharedGeneration(generation, key, [first], used))
        return [task for task in rest if not self._join(task)]

    def _take_turn(self, share: SharedGeneration) -> None:
        """Let a generation work until another has had less time, or something new has come."""
        rival = min((other.used for other in self._shares if other is not share), default=math.inf)
        began = time.perf_counter()

        def is_enough() -> bool:
            self._pass_on(share)
            spent = time.perf_counter() - began
            return self._has_news or share.used + spent / max(1, len(share.tasks)) > rival + SLICE_SECONDS

        num_tasks = max(1, len(share.tasks))
        try:
            share.generation.run(is_enough)
        except Exception as problem:  # noqa: BLE001  # its requests get it, the server goes on
            share.error = problem
        spent = time.perf_counter() - began
        share.used += spent / num_tasks
        self._head_start = min(HEAD_START_SECONDS, self._head_start + spent)
        if share.error is not None:
            for task in share.tasks:
                task.finish(share.error)
            share.tasks.clear()
        self._pass_on(share)
        if share.error is not None or share.generation.is_done:
            self._shares.remove(share)

    def _pass_on(self, share: SharedGeneration) -> None:
        """Deliver new tokens, and remove finished tasks."""
        for task in list(share.tasks):
            if task.is_cancelled:
                for row in task.rows:
                    row.finish = row.finish or "length"
                share.tasks.remove(task)
                task.finish(None)
                continue
            for number in list(task.open_rows):
                self._pass_row(task, number, task.rows[number])
            if not task.open_rows:
                share.tasks.remove(task)
                task.finish(None)

    def _pass_row(self, task: TurnsTask, number: int, row: Conversation) -> None:
        is_last = row.finish is not None
        begin = task.given[number]
        tokens = list(zip(row.ids[begin:], row.logprobs[begin:], strict=True))
        if not tokens and not is_last:
            return
        task.given[number] = len(row.ids)
        if is_last:
            task.open_rows.remove(number)
            try:
                check_finite(row)
            except PosttrainError as error:
                task.is_cancelled = True
                task.finish(error)
                return
        if task.take(number, tokens, is_last) and row.finish is None:
            row.finish = "stop"


def _memory_of(device: torch.device) -> int:
    """Measure device memory in bytes."""
    return gpu_memory_of(device) or memory_bytes() or 8 << 30
