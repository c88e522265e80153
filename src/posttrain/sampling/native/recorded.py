"""Decode steps as CUDA graphs: one launch for a step, which otherwise makes more than 20 for every layer.

A graph repeats the same kernels on the same memory. So the column of the cache that a step writes is a number on the
device, and the step reads a fixed window of columns under a mask. There is a graph for each number of rows (the slots,
a half of them, a quarter ...) and each window. Whatever a graph reads belongs to the schedule, its decoder, its cache,
``RecordedSteps`` or the graph itself, so that none of it is given back before the graph is.
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
LEAST_ROWS = 8  # fewer rows have no graph of their own
LEAST_COLUMNS = 128  # a window ends at a multiple of this, or of a quarter to an eighth of its width
MOST_GRAPHS = 64  # at a time


class StepRows(Protocol):
    """The part of a ``Schedule`` that a step reads and changes."""

    cache: SlotCache
    tokens: Tensor
    counters: Tensor

    def draw_next(self, logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``Schedule.draw_next``."""


class RecordedSteps:
    """The decode steps of one ``Schedule``: called the first time in a window, then recorded and replayed.

    On a CPU they are called every time, which tests compare with the schedule's own steps; so they are on a GPU that
    cannot record them, with a notice by ``say``. ``most_kept``: of a set of ``draw_kept``; 0 if they are not kept.
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
        # What was drawn since the host last looked, and in how many steps.
        self.ids = torch.zeros((most_steps, num_slots), dtype=torch.long, device=device)
        self.probabilities = torch.zeros((most_steps, num_slots), dtype=dtype, device=device)
        self.sets: Tensor | None = None
        if most_kept:
            self.sets = torch.zeros((most_steps, num_slots, 1 + most_kept), dtype=torch.int32, device=device)
        self.num_steps = torch.zeros(1, dtype=torch.long, device=device)
        self._graphs: dict[tuple[int, int, int], Callable[[], None] | None] = {}  # None: called once
        self._keys: Tensor | None = None  # of the cache's first layer; a cache that grew or was shifted has others
        # Memory of all graphs, and the one stream on which they are recorded: another would get none of it.
        self._memory: object = None
        self._stream: object = None

    def run(self, schedule: StepRows, rows: int, steps: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Decode and draw ``steps`` times for the first ``rows`` slots.

        Ids and probabilities are ``[steps, rows]``, and sets ``[steps, rows, 1 + K]`` where they are kept.
        """
        cache, size = schedule.cache, rows_of_graph(rows, len(self.starts))
        self.num_steps.zero_()
        done = 0
        while done < steps:
            # A slot without a row sees at least one column, so that what it writes is finite.
            self.starts.copy_(torch.from_numpy(cache.starts.clip(max=cache.cursor)))
            self.column.fill_(cache.cursor)
            if self._keys is not cache.keys[0] or len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
                self._keys, self._memory = cache.keys[0], None  # the graphs' memory ends with the last of them
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
        # The libraries prepare themselves in the first step.
        self._compute(schedule, size, Window(cache, size, first, end, self.column, self.starts))
        self._graphs[place] = None

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Return the replay of ``step``, or None from now on where this GPU cannot record it."""
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
        """Make one step of the first ``size`` slots. Those without a row compute, too: nothing reads what they draw."""
        tokens, counters = schedule.tokens[:size], schedule.counters[:, :size]
        positions, drawn = torch.minimum(counters, self.last)
        self.decoder.forget_workspace()  # a graph has one in its own memory
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
    """Return the smallest of all slots, a half of them, a quarter ..., that holds ``rows``."""
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
