"""Pages of keys and values, who refers to them, and which are free.

A page holds the keys and values of ``page_size`` neighbouring tokens of one row, in every layer. Rows whose prompts are
the same refer to the same pages as far as these are full (Kwon et al. 2023, PagedAttention). Memory is taken once, so
nothing that a batch does can run out of it: pages run out, which is seen before a step and not within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.engines.native.prefixes import LayerShape, Prefix


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of a row whose keys and values have to be computed; those before ``start`` are in its pages already."""

    ids: Sequence[int]
    start: int
    pages: Sequence[int]


class Pool:
    """``num_pages`` pages for keys ``[1 + num_pages, page_size, heads, dim]`` and values of every layer.

    Page 0 is no row's: what fills a batch up to its fixed size writes there.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, device: torch.device) -> None:
        self.shapes = tuple(shapes)
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        # Zeros, because what a row does not look at may still be multiplied: it must be finite.
        places = (1 + num_pages, page_size)
        self.keys = [torch.zeros((*places, s.heads, s.key_dim), dtype=s.dtype, device=device) for s in shapes]
        self.values = [torch.zeros((*places, s.heads, s.value_dim), dtype=s.dtype, device=device) for s in shapes]
        self.references = np.zeros(1 + num_pages, dtype=np.int64)
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def serves(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, device: torch.device) -> bool:
        """Whether it is as good as a new one of these sizes."""
        same = (self.shapes, self.page_size, self.device) == (tuple(shapes), page_size, device)
        return same and self.num_pages >= num_pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Pages that were free, each with one reference; the caller has seen that there are as many."""
        assert count <= len(self._free), f"{count} pages of {len(self._free)}"
        pages = [self._free.pop() for _ in range(count)]
        self.references[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more reference to each of these different pages."""
        self.references[list(pages)] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """One reference less to each of these different pages; what nobody refers to is free."""
        self.references[list(pages)] -= 1
        self._free += [page for page in pages if self.references[page] == 0]

    def fill(self, prefix: Prefix, readings: Sequence[Reading]) -> None:
        """Put what was computed for ``readings`` (in the order of ``prefix``) into their pages."""
        size = self.page_size
        times = [np.arange(reading.start, len(reading.ids)) for reading in readings]
        prompt = np.repeat(np.arange(len(readings)), [len(t) for t in times])
        places = [np.array(r.pages)[t // size] * size + t % size for r, t in zip(readings, times, strict=True)]
        index = [torch.from_numpy(x).to(self.device) for x in (prompt, np.concatenate(times), np.concatenate(places))]
        for tensors, sources in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.flatten(0, 1).index_copy_(0, index[2], source[index[0], index[1]])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pages ``sources`` into ``targets``, all of them different."""
        source, target = (torch.tensor(list(pages), device=self.device) for pages in (sources, targets))
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))
