"""Where each feature of a dictionary is active: one exact pass over recorded activations.

Of a document only the token at which a feature is strongest counts as a context, and of documents that agree up to that
token only the first: activations look back, so that the others say the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.training_rows import StoreRows

NUM_BINS = 32
# Activations that exist at a time: 256 MiB in fp32, unless one document has more.
MAX_ELEMENTS = 1 << 26
ENCODED_ROWS = 1024


@dataclass(slots=True)
class FeatureStatistics:
    """What a pass over ``rows`` rows found about S features.

    ``active`` int64 [S]: rows at which each is above 0; ``total`` float64 [S]: the sum of its activations;
    ``maximum`` float32 [S]. ``counts`` int64 [S, NUM_BINS]: how many of its activations lie in each bin, the first of
    which begins at 0; ``exponents`` int64 [S]: a bin is 2**exponent / NUM_BINS wide.

    ``top`` float32 [K, S]: the strongest activation of each context, falling (0: there are no more); ``top_rows`` int64
    [K, S]: its row (-1: none); ``windows`` float32 [K, S, before + 1 + after]: activations at the tokens around it, NaN
    where there is no token or its row was dropped.
    """

    rows: int
    before: int
    active: Tensor
    total: Tensor
    maximum: Tensor
    exponents: Tensor
    counts: Tensor
    top: Tensor
    top_rows: Tensor
    windows: Tensor


@torch.no_grad()
def find_contexts(
    dictionary: Dictionary,
    rows: StoreRows,
    *,
    features: Tensor | None = None,
    contexts: int = 10,
    before: int = 20,
    after: int = 10,
    chunk_rows: int = 8192,
    observe: Callable[[int, int], None] | None = None,
) -> FeatureStatistics:
    """Read all rows once, in order, on the dictionary's device.

    Args:
        rows: of the site and source that the dictionary is for.
        features: int64 [S]: which; None: all.
        contexts: K, how many of each feature.
        before, after: tokens on both sides of the strongest one whose activations are kept.
        chunk_rows: rows at a time, about; documents are not cut. The result does not depend on it.
        observe: is told (rows done, rows in all).
    """
    chosen = torch.arange(dictionary.features) if features is None else features
    limit = max(1, min(chunk_rows, MAX_ELEMENTS // dictionary.features))
    search = _Search(dictionary, rows, chosen, contexts, before, after)
    for start, end in whole_documents(rows, limit):
        search.read(start, end)
        if observe is not None:
            observe(end, rows.num_rows)
    return search.found


def whole_documents(rows: StoreRows, limit: int) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive rows that no document crosses: at most ``limit``, but where a document is longer."""
    start = 0
    while start < rows.num_rows:
        end = start
        cut = start
        while cut <= start:
            end += limit
            cut = rows.boundary(end) if end < rows.num_rows else rows.num_rows
        yield start, cut
        start = cut


class _Search:
    """The state of one pass."""

    def __init__(
        self, dictionary: Dictionary, rows: StoreRows, chosen: Tensor, contexts: int, before: int, after: int
    ) -> None:
        self.dictionary, self.rows = dictionary, rows
        self.device = dictionary.b_dec.device
        self.chosen = chosen.to(self.device)
        self.offsets = torch.arange(-before, after + 1, device=self.device)
        size, width = len(chosen), before + 1 + after
        self.keys = torch.zeros((contexts, size), dtype=torch.int64, device=self.device)
        self.found = FeatureStatistics(
            rows=0,
            before=before,
            active=torch.zeros(size, dtype=torch.int64, device=self.device),
            total=torch.zeros(size, dtype=torch.float64, device=self.device),
            maximum=torch.zeros(size, device=self.device),
            exponents=torch.zeros(size, dtype=torch.int64, device=self.device),
            counts=torch.zeros((size, NUM_BINS), dtype=torch.int64, device=self.device),
            top=torch.zeros((contexts, size), device=self.device),
            top_rows=torch.full((contexts, size), -1, dtype=torch.int64, device=self.device),
            windows=torch.full((contexts, size, width), torch.nan, device=self.device),
        )

    def read(self, start: int, end: int) -> None:
        """Take in the rows ``start`` … ``end``, which are whole documents."""
        values = self._encode(start, end)
        chunk = _Chunk.of(self.rows.store, start, end, self.device)
        self._count(values)
        self._keep_strongest(values, chunk)

    def _encode(self, start: int, end: int) -> Tensor:
        """float32 [n, S]."""
        values = torch.empty((end - start, len(self.chosen)), device=self.device)
        for first in range(start, end, ENCODED_ROWS):
            last = min(first + ENCODED_ROWS, end)
            x = self.rows.gather(torch.arange(first, last)).to(self.device)
            values[first - start : last - start] = self.dictionary.encode(x)[:, self.chosen]
        return values

    def _count(self, values: Tensor) -> None:
        found = self.found
        found.rows += len(values)
        found.active += (values > 0).sum(0)
        found.total += values.sum(0, dtype=torch.float64)
        found.maximum = torch.maximum(found.maximum, values.amax(0))
        self._widen(torch.frexp(found.maximum).exponent.long())
        places, features = (values > 0).nonzero(as_tuple=True)
        scaled = torch.ldexp(values[places, features], -found.exponents[features]) * NUM_BINS
        slots = features * NUM_BINS + scaled.long()
        found.counts += torch.bincount(slots, minlength=found.counts.numel()).view_as(found.counts)

    def _widen(self, exponents: Tensor) -> None:
        """Let the bins reach up to 2**exponents. Powers of two, so that bins are joined in pairs and none is split."""
        found = self.found
        is_empty = found.counts.sum(1) == 0
        found.exponents = torch.where(is_empty, exponents, found.exponents)
        while bool((grows := found.exponents < exponents).any()):
            joined = torch.zeros_like(found.counts)
            joined[:, : NUM_BINS // 2] = found.counts.view(-1, NUM_BINS // 2, 2).sum(2)
            found.counts = torch.where(grows[:, None], joined, found.counts)
            found.exponents = found.exponents + grows.long()

    def _keep_strongest(self, values: Tensor, chunk: _Chunk) -> None:
        found, size = self.found, len(self.found.top)
        strongest = [part.max(0) for part in values.split(chunk.rows_per_document)]
        local = torch.stack([place for _, place in strongest]) + chunk.first_rows[:, None]
        top = torch.cat([found.top, torch.stack([value for value, _ in strongest])])
        keys = torch.cat([self.keys, chunk.prefixes[local]])
        kept = top.argsort(dim=0, descending=True, stable=True)
        kept = kept.gather(0, _later_twins(keys.gather(0, kept)).long().argsort(dim=0, stable=True))[:size]
        all_rows = torch.cat([found.top_rows, local + chunk.start])
        windows = found.windows.gather(0, kept.clamp(max=size - 1)[..., None].expand_as(found.windows))
        places, features = (kept >= size).nonzero(as_tuple=True)
        came = local[kept[places, features] - size, features]
        windows[places, features] = chunk.around(values, came, features, self.offsets)
        found.top = top.gather(0, kept)
        found.top_rows = all_rows.gather(0, kept).masked_fill(found.top <= 0, -1)
        found.windows = windows.masked_fill(found.top[..., None] <= 0, torch.nan)
        self.keys = keys.gather(0, kept)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole documents: n rows from ``start`` on, over T tokens, some of whose rows were dropped.

    ``rows_per_document`` of each of D; ``first_rows`` [D]: in the chunk; ``prefixes`` [n]: a hash of the document up to
    each row; ``tokens`` [n]: where each row's token is among the T; ``ends`` [n, 2]: where its document begins and ends
    there; ``rows_of`` [T]: the row of each token, -1 where it was dropped.
    """

    start: int
    rows_per_document: list[int]
    first_rows: Tensor
    prefixes: Tensor
    tokens: Tensor
    ends: Tensor
    rows_of: Tensor

    @classmethod
    def of(cls, store: ActivationStore, start: int, end: int, device: torch.device) -> _Chunk:
        rows = torch.arange(start, end)
        documents, counts = store.documents(rows).unique_consecutive(return_counts=True)
        texts = [store.document_tokens(int(number)) for number in documents.tolist()]
        lengths = torch.tensor([len(ids) for ids in texts])
        begins = lengths.cumsum(0) - lengths
        tokens = store.positions(rows) + begins.repeat_interleave(counts)
        rows_of = torch.full((int(lengths.sum()),), -1, dtype=torch.long)
        rows_of[tokens] = rows - start
        hashes = torch.cat([hash_prefixes(ids) for ids in texts])
        ends = torch.stack([begins, begins + lengths], dim=1).repeat_interleave(counts, dim=0)
        first_rows = counts.cumsum(0) - counts
        moved = (x.to(device) for x in (first_rows, hashes[tokens], tokens, ends, rows_of))
        return cls(start, counts.tolist(), *moved)

    def around(self, values: Tensor, rows: Tensor, features: Tensor, offsets: Tensor) -> Tensor:
        """[m, W]: of m (row, feature) the activations at the tokens around; NaN where there is none."""
        tokens = self.tokens[rows, None] + offsets
        inside = (tokens >= self.ends[rows, :1]) & (tokens < self.ends[rows, 1:])
        near = self.rows_of[tokens.clamp(0, len(self.rows_of) - 1)]
        inside &= near >= 0
        return values[near.clamp(min=0), features[:, None]].masked_fill(~inside, torch.nan)


def hash_prefixes(ids: list[int]) -> Tensor:
    """int64 [T]: for each token a hash of the document up to it. Two that differ agree with a chance of 2**-64."""
    tokens = np.asarray(ids, dtype=np.uint64)
    mixed = tokens + (np.arange(1, len(ids) + 1, dtype=np.uint64) << np.uint64(32))
    with np.errstate(over="ignore"):  # splitmix64, modulo 2**64
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        return torch.from_numpy(np.cumsum(mixed, dtype=np.uint64).view(np.int64))


def _later_twins(keys: Tensor) -> Tensor:
    """bool [m, S]: whether the same key stands further up in its column."""
    order = keys.argsort(dim=0, stable=True)
    ranked = keys.gather(0, order)
    same = torch.zeros_like(ranked, dtype=torch.bool)
    same[1:] = ranked[1:] == ranked[:-1]
    return torch.zeros_like(same).scatter(0, order, same)
