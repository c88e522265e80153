"""Decode steps as CUDA graphs: one launch per step instead of more than 20 per layer.

A graph replays fixed kernels on fixed memory. Therefore the cache column to write is a number on the device, and steps
read a fixed window of columns under a mask. There is one graph per row count (all slots, half, a quarter ...) and
window. Memory read by a graph is owned by the schedule, decoder, cache, ``RecordedSteps`` or the graph, so it outlives
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from posttrain.errors import first_line
from posttrain.sampling.native.cache import SlotCache, Window

if TYPE_CHECKING:
    from posttrain.sampling.native.fast_path import FastDecoder
LEAST_ROWS = 8  # smaller batches get no separate graph
LEAST_COLUMNS = 128  # window ends are multiples of this, or of a quarter to an eighth of their width
MOST_GRAPHS = 64  # at a time


class StepRows(Protocol):
    """The part of a ``Schedule`` that a step reads and changes."""

    cache: SlotCache
    tokens: Tensor
    counters: Tensor

    def draw_next(self, logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``Schedule.draw_next``."""


class RecordedSteps:
    """Decode steps for one ``Schedule``: executed once per window, then recorded and replayed.

    On CPU they are always executed, which tests compare with the schedule's steps. If a GPU cannot record, they are
    also executed, after a notice through ``say``. ``most_kept``: maximum set size in ``draw_kept``; 0 without kept
    sets.
    """

    def __init__(
        self,
        decoder: FastDecoder,
        num_slots: int,
        limit: int,
        most_steps: int,
        say: Callable[[str], None],
        *,
        most_kept: int = 0,
    ) -> None:
        device, dtype = decoder.device, torch.promote_types(decoder.dtype, torch.float32)
        self.decoder, self.say = decoder, say
        self.can_record = device.type == "cuda"
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.starts = torch.zeros(num_slots, dtype=torch.long, device=device)
        # Slots without a row count on beyond their end.
        self.last = torch.tensor([[decoder.max_positions - 1], [limit - 1]], device=device)
        # Draws since the last transfer to the host, and the number of steps.
        self.ids = torch.zeros((most_steps, num_slots), dtype=torch.long, device=device)
        self.probabilities = torch.zeros((most_steps, num_slots), dtype=dtype, device=device)
        self.sets: Tensor | None = None
        if most_kept:
            self.sets = torch.zeros((most_steps, num_slots, 1 + most_kept), dtype=torch.int32, device=device)
        self.num_steps = torch.zeros(1, dtype=torch.long, device=device)
        self._graphs: dict[tuple[int, int, int], Callable[[], None] | None] = {}  # None: called once
        self._keys: Tensor | None = None  # of the cache's first layer; a cache that grew or was shifted has others
        # Memory and stream shared by all graphs; memory is only reused within one stream.
        self._memory: object = None
        self._stream: object = None

    def run(self, schedule: StepRows, rows: int, steps: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Decode and draw ``steps`` times for the first ``rows`` slots.

        Returns ids and probabilities ``[steps, rows]``, and kept sets ``[steps, rows, 1 + K]`` if enabled.
        """
        cache, size = schedule.cache, rows_of_graph(rows, len(self.starts))
        self.num_steps.zero_()
        done = 0
        while done < steps:
            # An empty slot sees at least one column, which keeps its output finite.
            self.starts.copy_(torch.from_numpy(cache.starts.clip(max=cache.cursor)))
            self.column.fill_(cache.cursor)
            if self._keys is not cache.keys[0] or len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
                self._keys, self._memory = cache.keys[0], None  # graph memory ends with the last graph
            first, end = window_of(cache)
            count = min(steps - done, end - cache.cursor)
            for _ in range(count):
                self._step(schedule, size, first, end)
            for _ in range(count):
                cache.advance()
            done += count
        sets: Tensor | None = None
        if self.sets is not None:
            sets = self.sets[:steps, :rows]
        return self.ids[:steps, :rows], self.probabilities[:steps, :rows], sets

    def _step(self, schedule: StepRows, size: int, first: int, end: int) -> None:
        place, cache = (size, first, end), schedule.cache
        if self.can_record and place in self._graphs:
            self._graphs[place] = replay = self._graphs[place] or self._recorded(
                lambda: self._compute(schedule, size, Window(cache, size, first, end, self.column, self.starts))
            )
            if replay is not None:
                replay()
                return
        # Libraries initialize in the first step.
        self._compute(schedule, size, Window(cache, size, first, end, self.column, self.starts))
        self._graphs[place] = None

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Record ``step``; on failure disable recording and return None."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self.column.device)
        try:
            return record(step, self.column.device, self._stream, self._memory)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.can_record = False
            self.say(f"decode steps are launched one by one, for no CUDA graph can be made: {first_line(error)}")
            return None

    def _compute(self, schedule: StepRows, size: int, window: Window) -> None:
        """Run one step for the first ``size`` slots. Empty slots compute too, but their draws are ignored."""
        tokens, counters = schedule.tokens[:size], schedule.counters[:, :size]
        positions, drawn = torch.minimum(counters, self.last)
        self.decoder.forget_workspace()  # graphs use a private workspace
        ids, probability, kept = schedule.draw_next(self.decoder.decode(tokens, positions, window), drawn)
        self.decoder.forget_workspace()
        self.ids[:, :size].index_copy_(0, self.num_steps, ids[None])
        self.probabilities[:, :size].index_copy_(0, self.num_steps, probability[None])
        if self.sets is not None and kept is not None:
            self.sets[:, :size].index_copy_(0, self.num_steps, kept[None])
        tokens.copy_(ids)
        for counter in (counters, self.column, self.num_steps):
            counter.add_(1)


def rows_of_graph(rows: int, num_slots: int) -> int:
    """Choose the smallest of all slots, half, a quarter ... that fits ``rows``."""
    size = num_slots
    while size // 2 >= max(rows, LEAST_ROWS):
        size //= 2
    return size


def window_of(cache: SlotCache) -> tuple[int, int]:
    """Return (first, end) of the columns that a step at the cursor reads; few windows follow one another."""
    grain = max(LEAST_COLUMNS, 1 << max(0, (cache.cursor + 1).bit_length() - 3))
    first = cache.first // (4 * grain) * (4 * grain)
    return first, min(cache.capacity, (cache.cursor // grain + 1) * grain)


def record(step: Callable[[], None], device: torch.device, stream: Any, memory: Any) -> Callable[[], None]:
    """Return ``step`` as the replay of a CUDA graph; nothing is computed meanwhile. Other threads may use the GPU."""
    with torch.cuda.device(device):
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
    return graph.replay
