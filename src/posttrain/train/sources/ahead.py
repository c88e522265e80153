"""Rollout batches that are sampled before they are trained on, on a schedule (``rollout.staleness``).

Version v of the weights is trained by v rollout batches. With staleness S batch b (from 0) is sampled with version
max(0, b − S): before the updates of batch c, batch c + S is sampled and waits here.

An engine over the trainer's own weights samples at once; a checkpoint stores the batches that wait, so that a resumed
run equals the undisturbed one bit for bit. A server samples in a thread while the trainer works; a checkpoint stores
what is done, and the rest is sampled again from the same seeds, with the weights of then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import CheckpointError, RunFailure
from posttrain.models.forward.attention import in_own_thread
from posttrain.train.sources.rollouts import START_AGAIN, Drawn, RolloutSource
from posttrain.train.sources.stored import check_written, read_drawn, write_drawn
from posttrain.world import ONE, World

HELD = "ahead"  # in a checkpoint's rollout buffer: JSON as bytes
UNTIMED = {"generate_seconds": 0.0, "score_seconds": 0.0}
NOT_OURS = "the checkpoint's rollout_buffer.safetensors does not hold the batches that this run sampled ahead"


class Ahead:
    """The batches of ``source`` that wait to be trained on.

    Args:
        staleness: S.
        num_batches: of the whole run.
        in_thread: the engine computes elsewhere; the main process samples for all of ``world``, and tells the others.
    """

    def __init__(
        self, source: RolloutSource, staleness: int, num_batches: int, *, world: World = ONE, in_thread: bool = False
    ) -> None:
        self.source, self.staleness, self.num_batches, self.world = source, staleness, num_batches, world
        self._thread = ThreadPoolExecutor(1, "sampling", in_own_thread) if in_thread else None
        if in_thread:
            source.world = ONE
        self._waiting: dict[int, Future[Drawn]] = {}
        self._next = 0  # the first batch that was not begun

    @property
    def in_thread(self) -> bool:
        """Whether batches are sampled while the trainer works."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait until nothing is being sampled, so that the engine may get other weights."""
        wait(list(self._waiting.values()))

    def draw(self, step: int, cycle: int) -> Drawn:
        """Return rollout batch ``cycle``, whose first update is ``step``, and begin those that are due.

        Raises:
            PosttrainError: it could not be sampled or graded.
            CheckpointError: the run was resumed from a checkpoint that has not got it.
        """
        self.wait()
        is_told = self.in_thread and not self.world.is_main
        begun = [] if is_told else self._due(cycle)
        syncing = time.perf_counter()
        if self.world.tell(bool(begun), "whether a batch begins") if self.in_thread else begun:
            self.source.engine.sync(step - 1)
        syncing = time.perf_counter() - syncing
        if is_told:
            stated: Any = self.world.tell(None, "the batch that was sampled ahead")
            return read_drawn(stated, self.source)
        for batch in begun:
            self._begin(batch, cycle)
        if cycle not in self._waiting:
            raise CheckpointError(f"{NOT_OURS} (there is no batch {cycle}); {START_AGAIN}")
        started = time.perf_counter()
        drawn = self._waiting[cycle].result()
        drawn.timing |= {"sync_seconds": syncing, "waited_seconds": time.perf_counter() - started}
        if self.in_thread and self.world.size > 1:
            self.world.tell(write_drawn(drawn), "the batch that was sampled ahead")
        return drawn

    def _due(self, cycle: int) -> list[int]:
        """The batches to begin with the current weights."""
        for batch in [b for b in self._waiting if b < cycle]:
            del self._waiting[batch]
        last = min(cycle + self.staleness, max(cycle, self.num_batches - 1))
        # a server that failed on the way has the weights of now, and is asked once more
        lost = [b for b, waiting in self._waiting.items() if waiting.done() and type(waiting.exception()) is RunFailure]
        due = range(max(self._next, cycle), last + 1)
        self._next = max(self._next, due.stop)
        return [*lost, *due]

    def held(self, step: int) -> dict[str, Tensor]:
        """The sampled batches that the first ``step`` updates did not train on, as a tensor to save."""
        if not self.world.is_main:
            return {}
        waiting = ((b, ready) for b, ready in sorted(self._waiting.items()) if b * self.source.updates >= step)
        done = takewhile(lambda item: item[1].done() and item[1].exception() is None, waiting)
        rows = [{"batch": batch, **write_drawn(ready.result()), "timing": UNTIMED} for batch, ready in done]
        content = bytearray(json.dumps(rows).encode())
        return {HELD: torch.frombuffer(content, dtype=torch.uint8)} if rows else {}

    def restore(self, rollout_buffer: Mapping[str, Tensor], vocabulary: int) -> None:
        """Take back what ``held`` gave, of a model with so large a vocabulary.

        Raises:
            CheckpointError: it is something else.
        """
        if HELD not in rollout_buffer:
            return
        try:
            for row in json.loads(rollout_buffer[HELD].numpy().tobytes()):
                check_written(row, self.source, vocabulary)
                self._waiting[row["batch"]] = ready = Future[Drawn]()
                ready.set_result(read_drawn({**row, "timing": UNTIMED}, self.source))
            self._next = max(self._waiting) + 1
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{NOT_OURS} ({type(error).__name__}); {START_AGAIN}") from None

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, batch: int, version: int) -> None:
        """Sample a batch with the current weights, which are ``version``."""

        def sample() -> Drawn:
            self.source.engine.in_background = self.in_thread
            try:
                drawn = self.source.draw(batch * self.source.updates + 1, batch)
            finally:
                self.source.engine.in_background = False
            drawn.version = version
            return drawn

        if self._thread is not None:
            self._waiting[batch] = self._thread.submit(sample)
            return
        drawn, ready = sample(), Future[Drawn]()
        ready.set_result(drawn)
        self._waiting[batch] = ready
