"""Decode steps as CUDA graphs: one launch for a step, which otherwise makes about 35 for every layer.

A graph replays the same kernels on the same tensors, so a step must find everything where it was: the column of the
cache that it writes is a number on the device, and it reads a fixed window of columns, of which a mask hides those that
a row may not see. There is one graph for each number of rows (the slots, a half of them, a quarter ...) and each
window. Graphs belong to one generation: they hold addresses of its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.engines.native.cache import VALUE_AXIS, SlotCache
from posttrain.engines.native.sampler import draw

if TYPE_CHECKING:
    from posttrain.engines.native.lean import LeanDecoder
    from posttrain.engines.native.schedule import Schedule

LEAST_ROWS = 8  # fewer rows are not worth a graph of their own
LEAST_COLUMNS = 128  # a window ends at a multiple of this, or of an eighth of its width
MOST_GRAPHS = 64  # of one generation at a time; their memory is shared, but not what describes them


class Window:
    """Columns ``first`` to ``end`` of a ``SlotCache``, as a step reads them whose column only the device knows.

    It takes the place of the cache in ``Decoder.decode``.

    Args:
        rows: slots that take part.
        column: ``int64 [1]``, the column that the step writes.
        starts: ``int64 [num_slots]``, the first column that each row may see.
    """

    shared = None

    def __init__(self, cache: SlotCache, rows: int, first: int, end: int, column: Tensor, starts: Tensor) -> None:
        assert cache.shared is None, "prompts lie in the rows' own columns"
        self.cache, self.rows, self.first, self.width = cache, rows, first, end - first
        self.column, self.starts = column, starts[:rows, None]
        self.columns = torch.arange(first, end, device=column.device)

    def mask(self) -> Tensor:
        """Return ``[rows, 1, 1, width]``: 0 where a row may look, -inf elsewhere."""
        hidden = (self.columns < self.starts) | (self.columns > self.column)
        bias = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[rows, heads, dim]`` at the column; return the window's views, as ``SlotCache.write`` does."""
        views = []
        sides = (self.cache.keys[layer], keys, self.cache.key_axis), (self.cache.values[layer], values, VALUE_AXIS)
        for whole, new, axis in sides:
            rows = whole[: self.rows]
            rows.index_copy_(axis, self.column, new.unsqueeze(axis))
            views.append(rows.narrow(axis, self.first, self.width))
        return views[0], views[1]


class RecordedSteps:
    """The decode steps of one ``Schedule``, recorded when they are first made and then replayed.

    On a CPU the same steps are called, which tests compare with the schedule's own.
    """

    def __init__(self, schedule: Schedule, decoder: LeanDecoder, most_steps: int) -> None:
        self.schedule, self.decoder = schedule, decoder
        slots, device = schedule.num_slots, decoder.device
        wide = torch.promote_types(decoder.dtype, torch.float32)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.starts = torch.zeros(slots, dtype=torch.long, device=device)
        # The draws of the steps since the host last looked, and their number.
        self.ids = torch.zeros((most_steps, slots), dtype=torch.long, device=device)
        self.probabilities = torch.zeros((most_steps, slots), dtype=wide, device=device)
        self.num_steps = torch.zeros(1, dtype=torch.long, device=device)
        # A graph reads the tensors of its window at their addresses, so the window lives as long as the graph.
        self._recorded: dict[tuple[int, int, int], tuple[Callable[[], None], Window]] = {}
        self._generation = -1
        self._memory: Any = None

    def run(self, rows: int, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Decode and draw ``steps`` times for the first ``rows`` slots; ids and log-probabilities ``[steps][rows]``."""
        cache, size = self.schedule.cache, rows_of_graph(rows, self.schedule.num_slots)
        self.num_steps.zero_()
        done = 0
        while done < steps:
            if done == 0 or self._generation != cache.generation:  # a cache that grew has other columns
                self.starts.copy_(torch.from_numpy(cache.starts))
                self.column.fill_(cache.cursor)
            first, end = window_of(cache)
            step = self._step_of(size, first, end)
            count = min(steps - done, end - cache.cursor)
            for _ in range(count):
                step()
            for _ in range(count):
                cache.advance()
            done += count
        return self.ids[:steps, :rows].tolist(), self.probabilities[:steps, :rows].log().tolist()

    def _step_of(self, size: int, first: int, end: int) -> Callable[[], None]:
        cache = self.schedule.cache
        if self._generation != cache.generation or len(self._recorded) >= MOST_GRAPHS:
            self._recorded.clear()
            self._generation = cache.generation
            if self.column.device.type == "cuda":
                self._memory = torch.cuda.graph_pool_handle()  # the last one ended with its last graph
        if (size, first, end) not in self._recorded:
            window = Window(cache, size, first, end, self.column, self.starts)
            schedule = self.schedule
            changed = (schedule.tokens, schedule.counters, self.column, self.num_steps)
            step = recorded(partial(self._step, size, window), changed, self._memory)
            self._recorded[size, first, end] = step, window
        return self._recorded[size, first, end][0]

    def _step(self, size: int, window: Any) -> None:
        """One step of the first ``size`` slots. Slots without a row compute, too: nothing reads what they draw."""
        schedule, decoder = self.schedule, self.decoder
        sampling, draws = schedule.sampling, schedule.draws
        tokens, counters = schedule.tokens[:size], schedule.counters[:, :size]
        decoder.drop_workspace()  # a graph has one in its own memory
        positions, drawn = counters[0].clamp(max=decoder.max_positions - 1), counters[1, :, None]
        logits = decoder.decode(tokens, positions, window)
        uniform = None if draws is None else draws[:size].gather(1, drawn.clamp(max=draws.shape[1] - 1))
        ids, probability = draw(logits, uniform, sampling)
        self.ids[:, :size].index_copy_(0, self.num_steps, ids[None])
        self.probabilities[:, :size].index_copy_(0, self.num_steps, probability[None])
        tokens.copy_(ids)
        for counter in (counters, self.column, self.num_steps):
            counter.add_(1)
        decoder.drop_workspace()


def rows_of_graph(rows: int, num_slots: int) -> int:
    """Return the smallest of all slots, a half of them, a quarter ..., that holds ``rows``."""
    size = num_slots
    while size // 2 >= max(rows, LEAST_ROWS):
        size //= 2
    return size


def window_of(cache: SlotCache) -> tuple[int, int]:
    """Return (first, end) of the columns that a step at the cursor reads; few windows follow one another."""
    width = cache.cursor + 1
    grain = max(LEAST_COLUMNS, 1 << max(0, width.bit_length() - 3))
    first = cache.first // (4 * grain) * (4 * grain)
    return first, min(cache.capacity, (cache.cursor // grain + 1) * grain)


def recorded(step: Callable[[], None], changed: Sequence[Tensor], memory: Any) -> Callable[[], None]:
    """Return ``step`` as the replay of a CUDA graph in ``memory``; on a CPU ``step`` itself.

    It is called once before it is recorded, which the libraries need to prepare themselves; the tensors ``changed`` are
    then put back. (Keys and values are written again as they are.)
    """
    device = changed[0].device
    if device.type != "cuda":
        return step
    with torch.cuda.device(device):
        before = [x.clone() for x in changed]
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            step()
        current.wait_stream(side)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            step()
    return graph.replay
