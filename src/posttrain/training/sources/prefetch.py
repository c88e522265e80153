"""Prefetch rollout batches on a schedule (``rollout.staleness``).

Weights version v has been trained on v rollout batches. With staleness S, batch b (from 0) is sampled with version
max(0, b − S): before updating on batch c, batch c + S is sampled and stored.

Engines that share trainer weights sample immediately. Checkpoints store pending batches, so resumed runs match
uninterrupted runs bit for bit. Servers sample in a background thread. Checkpoints then store finished batches, and the
remaining ones are sampled again with the same seeds but newer weights.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import CheckpointError, RunFailure
from posttrain.models.forward.attention import in_own_thread
from posttrain.process_group import SINGLE_PROCESS
from posttrain.training.sources.rollouts import RolloutSource
from posttrain.training.sources.stored import START_AGAIN, Drawn, check_written, read_drawn, write_drawn

HELD = "ahead"  # JSON bytes in a checkpoint's rollout buffer
UNTIMED = {"generate_seconds": 0.0, "score_seconds": 0.0}
NOT_OURS = "the checkpoint's rollout_buffer.safetensors does not contain this run's prefetched batches"


class PrefetchSource(RolloutSource):
    """Rollout source with prefetched batches.

    ``in_thread``: the engine runs elsewhere, so the main process samples for the whole process group and sends
    results.
    """

    def __init__(self, *parts: Any, in_thread: bool = False) -> None:
        super().__init__(*parts)
        self.everyone = self.sampler.process_group
        self._thread: ThreadPoolExecutor | None = None
        if in_thread:
            self._thread = ThreadPoolExecutor(1, "sampling", in_own_thread)
            self.sampler = replace(self.sampler, process_group=SINGLE_PROCESS)
        steps = self.train.steps
        if steps is None:
            steps, _ = self.length_of(self.train.num_epochs or 0.0)
        self._last = -(-steps // self.updates) - 1  # last batch in the run
        self._waiting: dict[int, Future[Drawn]] = {}
        self._next = 0  # first batch not yet started

    def wait(self) -> None:
        wait(list(self._waiting.values()))

    def take(self, step: int, cycle: int) -> Drawn:
        """Get rollout batch ``cycle``, first used in update ``step``, and start batches that are due.

        Raises:
            PosttrainError: sampling or grading failed.
            CheckpointError: batch missing from the checkpoint on resume.
        """
        self.wait()
        receives = self._thread is not None and not self.everyone.is_main
        begun = [] if receives else self._due(cycle)
        syncing = time.perf_counter()
        if self.everyone.broadcast(bool(begun), "whether a batch begins") if self._thread else begun:
            self.engine.sync(step - 1)
        syncing = time.perf_counter() - syncing
        if receives:
            received: Any = self.everyone.broadcast(None, "the batch that was sampled ahead")
            return read_drawn(received, self)
        for batch in begun:
            self._begin(batch, cycle)
        if cycle not in self._waiting:
            raise CheckpointError(f"{NOT_OURS} (batch {cycle} is missing); {START_AGAIN}")
        started = time.perf_counter()
        drawn = self._waiting[cycle].result()
        drawn.timing |= {"sync_seconds": syncing, "waited_seconds": time.perf_counter() - started}
        if self._thread is None:
            self.engine.rest()
        elif self.everyone.size > 1:
            self.everyone.broadcast(write_drawn(drawn), "the batch that was sampled ahead")
        return drawn

    def _due(self, cycle: int) -> list[int]:
        """List batches to start with current weights."""
        for batch in [b for b in self._waiting if b < cycle]:
            del self._waiting[batch]
        last = min(cycle + self.options.staleness, max(cycle, self._last))
        # after a server failure, retry once with current weights
        lost = [b for b, waiting in self._waiting.items() if waiting.done() and type(waiting.exception()) is RunFailure]
        due = range(max(self._next, cycle), last + 1)
        self._next = max(self._next, due.stop)
        return [*lost, *due]

    def _begin(self, batch: int, version: int) -> None:
        """Sample a batch with current weights (``version``)."""

        def sample() -> Drawn:
            drawn = self.draw(batch * self.updates + 1, batch)
            drawn.version = version
            return drawn

        self._waiting[batch] = _done(sample()) if self._thread is None else self._thread.submit(sample)

    def rollout_buffer(self, step: int) -> dict[str, Tensor] | None:
        """See ``Source.rollout_buffer``. Also includes sampled batches not used in the first ``step`` updates."""
        buffer = super().rollout_buffer(step)
        if not self.everyone.is_main:
            return buffer
        waiting = ((b, ready) for b, ready in sorted(self._waiting.items()) if b * self.updates >= step)
        done = takewhile(lambda item: item[1].done() and item[1].exception() is None, waiting)
        rows = [{"batch": batch, **write_drawn(ready.result()), "timing": UNTIMED} for batch, ready in done]
        if not rows:
            return buffer
        content = bytearray(json.dumps(rows).encode())
        return {HELD: torch.frombuffer(content, dtype=torch.uint8)} | (buffer or {})

    def restore(
        self, rollout_buffer: dict[str, Tensor] | None, state: dict[str, float], vocabulary: int = sys.maxsize
    ) -> None:
        super().restore(rollout_buffer, state, vocabulary)
        if HELD not in (rollout_buffer or {}):
            return
        assert rollout_buffer is not None
        try:
            for row in json.loads(rollout_buffer[HELD].numpy().tobytes()):
                check_written(row, self, vocabulary)
                self._waiting[row["batch"]] = _done(read_drawn({**row, "timing": UNTIMED}, self))
            self._next = max(self._waiting) + 1
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{NOT_OURS} ({type(error).__name__}); {START_AGAIN}") from None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _done(drawn: Drawn) -> Future[Drawn]:
    ready = Future[Drawn]()
    ready.set_result(drawn)
    return ready
