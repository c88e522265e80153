"""Worker thread for training and sampling, and promises that clients poll until fulfilled."""

from __future__ import annotations

import hashlib
import sys
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.commands.serve.requests import BadRequest
from posttrain.commands.serve.tinker.samplers import MOST_ROWS, SampleJob
from posttrain.commands.serve.tinker.wire import SampleResult, write_samples
from posttrain.errors import PosttrainError, UsageError

MOST_WAITING = 4_096  # pending requests
MOST_WAITING_BYTES = 1 << 28  # of their bodies
MOST_KEPT = 8_192  # promises; the oldest fulfilled ones are evicted first
MOST_KEPT_BYTES = 1 << 28

RequestResult = dict[str, object] | bytes


@dataclass(frozen=True, slots=True)
class BodyMark:
    """SHA-256 and number of bytes of a request's body."""

    digest: str
    size: int


def describe_body(content: bytes) -> BodyMark:
    """Compute the mark of a body."""
    return BodyMark(hashlib.sha256(content).hexdigest(), len(content))


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that failed; ``is_users``: because of the request itself."""

    message: str
    is_users: bool

    @property
    def body(self) -> dict[str, object]:
        """Protocol response body."""
        category = "server"
        if self.is_users:
            category = "user"
        return {"error": self.message, "category": category}


@dataclass(eq=False)
class Promise:
    """An accepted request. ``work`` computes the result in the worker thread, or is a sampling job.

    ``size``: bytes of its body. Once done, ``work`` is None: it holds rows and a model, the promise only the result.
    """

    id: str
    work: Callable[[], RequestResult] | SampleJob | None
    size: int = 0
    done: Future[RequestResult | Failed] = field(default_factory=Future)
    is_cancelled: bool = False
    error: BaseException | None = None
    is_sampling: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_sampling = isinstance(self.work, SampleJob)

    def fulfil(self, answer: RequestResult | Failed) -> None:
        """Set the result and release what computed it."""
        self.work = None
        self.error = None
        self.done.set_result(answer)


class SampleDrawer(Protocol):
    """An object that samples multiple jobs in the same group."""

    def draw(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Return them."""
        ...


class Worker:
    """A thread that processes requests in order; compatible sampling jobs are batched.

    A single thread, because models are stateful and results depend on request order.
    """

    def __init__(self, sampler: SampleDrawer) -> None:
        self.sampler = sampler
        self._news = threading.Condition()
        self._waiting: deque[Promise] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def refuse_if_busy(self, size: int) -> None:
        """Check that a request with a body of ``size`` bytes may wait.

        Raises:
            BadRequest: too many wait already; the client may try again.
        """
        with self._news:
            waiting = sum(one.size for one in self._waiting)
            is_full = len(self._waiting) >= MOST_WAITING or (waiting > 0 and waiting + size > MOST_WAITING_BYTES)
            if is_full or self._is_closed:
                message = f"{len(self._waiting):,} requests are already waiting; try again later"
                raise BadRequest(message, None, "server_busy", 429)

    def submit(self, promise: Promise) -> None:
        """Take a request."""
        with self._news:
            self._waiting.append(promise)
            self._news.notify()

    def close(self) -> None:
        """Stop after the current request; pending requests fail."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._is_closed:
                    self._news.wait()
                if self._is_closed:
                    break
                promises = self._take()
            self._compute(promises)
        for promise in self._waiting:
            promise.fulfil(Failed("the server ends", is_users=False))

    def _take(self) -> list[Promise]:
        """Take the next request, plus compatible sampling jobs."""
        first = self._waiting.popleft()
        if not isinstance(first.work, SampleJob):
            return [first]
        taken = [first]
        num_rows = len(first.work.keys)
        for other in list(self._waiting):
            work = other.work
            if not isinstance(work, SampleJob) or work.group != first.work.group:
                continue
            if num_rows + len(work.keys) <= MOST_ROWS:
                num_rows += len(work.keys)
                taken.append(other)
                self._waiting.remove(other)
        return taken

    def _compute(self, promises: Sequence[Promise]) -> None:
        wanted = [one for one in promises if not one.is_cancelled]
        for one in promises:
            if one.is_cancelled:
                one.fulfil(Failed("the client cancelled this request", is_users=True))
        if not wanted:
            return
        first = wanted[0]
        answers: Sequence[RequestResult | Failed] = []
        try:
            answers = self._answers(wanted)
        except Exception as error:  # noqa: BLE001  # of the model's code, which may raise anything
            first.error = error
        if first.error is not None:
            answers = [_describe(first.error)] * len(wanted)
        for promise, answer in zip(wanted, answers, strict=True):
            promise.fulfil(answer)

    def _answers(self, promises: Sequence[Promise]) -> Sequence[RequestResult | Failed]:
        """Compute the results of a request, or of sampling jobs in a group."""
        work = promises[0].work
        if isinstance(work, SampleJob):
            jobs = [one.work for one in promises if isinstance(one.work, SampleJob)]
            return [write_samples(drawn) for drawn in self.sampler.draw(jobs)]
        assert work is not None, "it is computed once"
        return [work()]


def _describe(error: BaseException) -> Failed:
    """Encode a result for the protocol. Unexpected errors are also printed on the server."""
    if isinstance(error, PosttrainError):
        return Failed(str(error), isinstance(error, UsageError))
    traceback.print_exception(error, file=sys.stderr)
    return Failed(f"the server failed ({type(error).__name__}); see the server's terminal", is_users=False)


class Promises:
    """Promises by id, plus lookup by client and request number.

    A client that got no response repeats the request number, and receives the same promise.
    """

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Promise] = OrderedDict()
        self._by_number: OrderedDict[tuple[str, int], tuple[str, str]] = OrderedDict()

    def find(self, request_id: str) -> Promise:
        """Look up a promise.

        Raises:
            BadRequest: unknown or evicted.
        """
        if request_id not in self._by_id:
            message = "request_id: unknown request, or the result has expired; send the request again"
            raise BadRequest(message, "request_id", "request_not_found", 404)
        return self._by_id[request_id]

    def repeated(self, owner: str, number: int | None, digest: str) -> Promise | None:
        """Find the promise for a repeated request.

        Raises:
            BadRequest: a different request used this number.
        """
        if number is None or (owner, number) not in self._by_number:
            return None
        request_id, known = self._by_number[owner, number]
        if known != digest:
            raise BadRequest(
                f"seq_id: {owner} already sent a different request with number {number}; use the next number", "seq_id"
            )
        return self._by_id.get(request_id)

    def add(self, promise: Promise, owner: str, number: int | None, digest: str) -> None:
        """Store a promise; if there are too many, evict the oldest fulfilled ones."""
        self._by_id[promise.id] = promise
        if number is not None:
            self._by_number[owner, number] = promise.id, digest
        while len(self._by_number) > MOST_KEPT:
            self._by_number.popitem(last=False)
        size = 0
        kept = 0
        for known in reversed(list(self._by_id.values())):
            if not known.done.done():
                continue
            kept += 1
            answer = known.done.result()
            if isinstance(answer, bytes):
                size += len(answer)
            if kept > MOST_KEPT or size > MOST_KEPT_BYTES:
                del self._by_id[known.id]
