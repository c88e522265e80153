"""The thread that trains and samples, and the promises that clients ask for until they are kept."""

from __future__ import annotations

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

MOST_WAITING = 4_096  # requests that are not done
MOST_KEPT = 8_192  # of promises, of which the oldest kept ones go first
MOST_KEPT_BYTES = 1 << 28

RequestResult = dict[str, object] | bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that failed; ``is_users``: because of the request itself."""

    message: str
    is_users: bool

    @property
    def body(self) -> dict[str, object]:
        """The answer of the protocol."""
        category = "server"
        if self.is_users:
            category = "user"
        return {"error": self.message, "category": category}


@dataclass(eq=False)
class Promise:
    """A request that was taken. ``work`` computes its answer, in the thread of all work; or it samples."""

    id: str
    work: Callable[[], RequestResult] | SampleJob
    done: Future[RequestResult | Failed] = field(default_factory=Future)
    is_cancelled: bool = False
    error: BaseException | None = None


class SampleDrawer(Protocol):
    """An object that samples for several jobs of one group."""

    def draw(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Return them."""
        ...


class Worker:
    """One thread that takes requests in their order; those that sample alike are sampled together.

    One thread: a model has one state, and which request came first decides what the next one finds.
    """

    def __init__(self, sampler: SampleDrawer) -> None:
        self.sampler = sampler
        self._news = threading.Condition()
        self._waiting: deque[Promise] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def submit(self, promise: Promise) -> None:
        """Take a request.

        Raises:
            BadRequest: too many wait already; the client may try again.
        """
        with self._news:
            if len(self._waiting) >= MOST_WAITING or self._is_closed:
                message = f"{MOST_WAITING:,} requests wait already; try again when some are done"
                raise BadRequest(message, None, "server_busy", 429)
            self._waiting.append(promise)
            self._news.notify()

    def close(self) -> None:
        """End after the request that is in work; the others fail."""
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
            promise.done.set_result(Failed("the server ends", is_users=False))

    def _take(self) -> list[Promise]:
        """Take the next request, and all that sample alike."""
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
                one.done.set_result(Failed("the client cancelled this request", is_users=True))
        if not wanted:
            return
        first = wanted[0]
        answers: Sequence[RequestResult | Failed] = []
        try:
            if isinstance(first.work, SampleJob):
                jobs = [one.work for one in wanted if isinstance(one.work, SampleJob)]
                answers = [write_samples(drawn) for drawn in self.sampler.draw(jobs)]
            else:
                answers = [first.work()]
        except Exception as error:  # noqa: BLE001  # of the model's code, which may raise anything
            first.error = error
        if first.error is not None:
            answers = [_describe(first.error)] * len(wanted)
        for promise, answer in zip(wanted, answers, strict=True):
            promise.done.set_result(answer)


def _describe(error: BaseException) -> Failed:
    """Return the answer of the protocol; an error that is no refusal is printed whole on the terminal of the server."""
    if isinstance(error, PosttrainError):
        return Failed(str(error), isinstance(error, UsageError))
    traceback.print_exception(error, file=sys.stderr)
    return Failed(f"the server failed ({type(error).__name__}); its terminal says more", is_users=False)


class Promises:
    """The promises of a server by id; those of a client by the number that it gave the request.

    A client that got no answer sends a request again, with the same number: it gets the same promise.
    """

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Promise] = OrderedDict()
        self._by_number: OrderedDict[tuple[str, int], tuple[str, str]] = OrderedDict()

    def find(self, request_id: str) -> Promise:
        """Return a promise.

        Raises:
            BadRequest: there is none, or no more.
        """
        if request_id not in self._by_id:
            message = "request_id: there is no such request here, or its answer is gone; send the request again"
            raise BadRequest(message, "request_id", "request_not_found", 404)
        return self._by_id[request_id]

    def repeated(self, owner: str, number: int | None, digest: str) -> Promise | None:
        """Return the promise of a request that came before.

        Raises:
            BadRequest: another request had this number.
        """
        if number is None or (owner, number) not in self._by_number:
            return None
        request_id, known = self._by_number[owner, number]
        if known != digest:
            raise BadRequest(f"seq_id: {owner} has had another request with number {number}; count on", "seq_id")
        return self._by_id.get(request_id)

    def add(self, promise: Promise, owner: str, number: int | None, digest: str) -> None:
        """Keep a promise; the oldest that are kept and have been done go when there are too many."""
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
