"""One decode step as a function of tensors that stay where they are, and its replay as one CUDA graph.

A step feeds the tokens, attends, draws, writes down what was drawn and marks which rows go on: all on the device, in
the same tensors every time, with no number read by the host in between. So it can be recorded once for each number of
rows (a few sizes, up to which a batch is filled) and replayed, which launches hundreds of kernels at once. What a step
reads is put there between two looks of the host. On a CPU the same function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.base import Sampling
from posttrain.engines.native.lean import Attend, Layer, LeanDecoder, Workspace
from posttrain.engines.native.paged.attention import PagedAttention, PageView, gathered
from posttrain.engines.native.paged.pool import Pool
from posttrain.engines.native.projection import Projection
from posttrain.engines.native.sampler import draw, uniform_numbers
from posttrain.engines.native.schedule import STEPS_BETWEEN_LOOKS

LEAST_ROWS = 8  # a batch is filled up to this, or twice this, four times, ...
LEAST_TOKENS = 128  # of a row that are gathered, or twice as many, four times, ...
STATE = ("token", "position", "num_drawn", "limit", "key", "finished")  # of a row, in this order

# Of how tokens are drawn: a row's limit is part of its state.
NOT_OF_A_STEP: dict[str, Any] = {"max_tokens": 1, "max_total_tokens": None, "max_turn_tokens": None}


class Steps:
    """Decode steps of up to ``num_rows`` rows of at most ``num_pages`` pages, over one pool and one way to sample.

    Which sizes a step has follows from its rows alone, not from how many could be held: their bits do not depend on
    what was sampled before.

    Args:
        decoder: over the parameters of the model, by reference.
        graphs: on a GPU steps are recorded and replayed.
    """

    def __init__(
        self,
        decoder: LeanDecoder,
        pool: Pool,
        attention: PagedAttention,
        sampling: Sampling,
        *,
        num_rows: int,
        num_pages: int,
        graphs: bool,
    ) -> None:
        self.decoder, self.pool, self.attention, self.sampling = decoder, pool, attention, sampling
        self.least_pages = max(1, LEAST_TOKENS // pool.page_size)
        num_slots, num_pages = _bucket(num_rows, LEAST_ROWS), _bucket(num_pages, self.least_pages)
        self.num_slots, self.num_pages = num_slots, num_pages
        device = decoder.device
        self.graphs = graphs
        self.state = torch.zeros((len(STATE), num_slots), dtype=torch.long, device=device)
        self.table = torch.zeros((num_slots, num_pages), dtype=torch.int32, device=device)
        self.stops = torch.tensor(sorted(sampling.stop_ids), dtype=torch.long, device=device)
        # What was drawn since the host looked, and how many steps that were.
        self.ids = torch.zeros((STEPS_BETWEEN_LOOKS, num_slots), dtype=torch.long, device=device)
        wide = torch.promote_types(decoder.dtype, torch.float32)
        self.probabilities = torch.zeros((STEPS_BETWEEN_LOOKS, num_slots), dtype=wide, device=device)
        self.num_steps = torch.zeros(1, dtype=torch.long, device=device)
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._memory = torch.cuda.graph_pool_handle() if graphs and device.type == "cuda" else None

    def seat(self, state: np.ndarray) -> None:
        """Put rows into the first slots, ``int64 [6, R]`` as ``STATE`` names them; nobody is in the others."""
        filled = np.zeros(self.state.shape, dtype=np.int64)
        filled[-1] = 1
        filled[:, : state.shape[1]] = state
        self.state.copy_(torch.from_numpy(filled))

    def run(self, table: np.ndarray, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Decode and draw ``steps`` times; ids and log-probabilities as ``[steps][R]``.

        Args:
            table: ``int32 [R, W]``, the pages of the first R slots, which hold all that these feed.
        """
        rows = len(table)
        size = _bucket(rows, LEAST_ROWS)
        width = _bucket(table.shape[1], self.least_pages) if self.attention is gathered else self.num_pages
        filled = np.zeros((size, width), dtype=np.int32)
        filled[:rows, : table.shape[1]] = table
        self.table[:size, :width].copy_(torch.from_numpy(filled))
        self.num_steps.zero_()
        step = self._step_of(size, width)
        for _ in range(steps):
            step()
        ids, probabilities = self.ids[:steps, :rows], self.probabilities[:steps, :rows]
        return ids.tolist(), probabilities.log().tolist()

    def takes_over(self, decoder: LeanDecoder, sampling: Sampling) -> bool:
        """Whether these steps do the same as new ones would; what ``decoder`` computed from parameters is copied."""
        mine, others = ([_identity(x) for x in parameters_of(d)] for d in (self.decoder, decoder))
        reach, same = len(decoder.cos), replace(sampling, **NOT_OF_A_STEP) == replace(self.sampling, **NOT_OF_A_STEP)
        if mine != others or not same or len(self.decoder.cos) < reach:
            return False
        self.decoder.cos[:reach].copy_(decoder.cos)
        self.decoder.sin[:reach].copy_(decoder.sin)
        for layer, other in zip(self.decoder.layers, decoder.layers, strict=True):
            if layer.head_norm is not None and other.head_norm is not None:
                layer.head_norm.copy_(other.head_norm)
        return True

    def _step_of(self, size: int, width: int) -> Callable[[], None]:
        if (size, width) not in self._recorded:
            step = partial(self.step, size, width)
            changed = (self.state, self.num_steps)
            self._recorded[size, width] = recorded(step, changed, self._memory) if self.graphs else step
        return self._recorded[size, width]

    def step(self, size: int, width: int) -> None:
        """One step of the first ``size`` slots, whose rows have at most ``width`` pages.

        A row that has finished stays as it is: it writes the same key and value in the same place again.
        """
        token, position, num_drawn, limit, key, finished = self.state[:, :size]
        self.decoder.drop_workspace()  # a graph must have one in its own memory
        view = PageView(self.pool, self.attention, self.table[:size, :width], position)
        logits = decode(self.decoder, token, position, view)
        uniform = None if self.sampling.temperature == 0 else uniform_numbers(key, num_drawn)[:, None]
        drawn, probability = draw(logits, uniform, self.sampling)
        self.ids[:, :size].index_copy_(0, self.num_steps, drawn[None])
        self.probabilities[:, :size].index_copy_(0, self.num_steps, probability[None])
        self.num_steps.add_(1)
        num_drawn.add_(1)
        goes_on = (finished == 0) & (num_drawn < limit) & (drawn[:, None] != self.stops).all(1)
        token.copy_(torch.where(goes_on, drawn, token))
        position.add_(goes_on)
        finished.copy_(~goes_on)


def decode(decoder: LeanDecoder, tokens: Tensor, positions: Tensor, view: PageView) -> Tensor:
    """Logits ``[R, V]`` behind ``int64 [R]`` tokens at their positions, whose keys and values are written."""

    def begin(cos: Tensor, sin: Tensor) -> Attend:
        def attend(index: int, layer: Layer, work: Workspace) -> Tensor:
            q, k = decoder.turn(layer, work, cos, sin)
            return view.attend(index, q, k, work.values, decoder.scale)

        return attend

    return decoder.run(tokens, positions, begin)


def recorded(step: Callable[[], None], changed: Sequence[Tensor], memory: Any) -> Callable[[], None]:
    """``step`` as one CUDA graph in ``memory``, or itself on a CPU.

    It is called once before it is recorded, which the libraries need to prepare themselves; ``changed`` are the tensors
    that a second call would find changed, and are put back. (Keys and values are written as they will be.)
    """
    device = changed[0].device
    if device.type != "cuda":
        return step
    with torch.cuda.device(device):
        before = [x.clone() for x in changed]
        aside, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            step()
        current.wait_stream(aside)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            step()
    return graph.replay


def parameters_of(decoder: LeanDecoder) -> Iterator[Tensor | float | None]:
    """What a step reads where it lies in the model, and the scales that are part of it."""
    yield from (decoder.embedding, decoder.head, decoder.head_bias, decoder.norm)
    for layer in decoder.layers:
        yield from (layer.norm1, layer.norm2)
        for part in (getattr(layer, name) for name in Layer.__slots__):
            if isinstance(part, Projection):
                yield from (part.weight, part.bias)
                for term in part.adapters:
                    yield from (term.down, term.up, term.scale)


def _identity(x: Tensor | float | None) -> object:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _bucket(count: int, least: int) -> int:
    """The first of ``least``, twice, four times ... that is not below ``count``."""
    size = least
    while size < count:
        size *= 2
    return size
