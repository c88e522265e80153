"""Micro-batches: optimizer batches or texts divided into token-bounded pieces.

``MicroBatching`` runs whole batches for training, scoring and evaluation, across any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.types import Batch

T = TypeVar("T")


class ForwardPass(Protocol):
    """A forward pass, as far as the division into micro-batches depends on it."""

    @property
    def is_sharded(self) -> bool:
        """True if a pass gathers weights from all processes."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows computed together. ``counts``: False for dummy passes by processes lacking rows."""

    rows: list[int]
    part: Batch
    counts: bool


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Splits batches into micro-batches, distributed across processes (see ``split_rows``)."""

    max_tokens: int
    max_rows: int | None = None
    process_group: ProcessGroup = SINGLE_PROCESS

    def over(self, batch: Batch, forward: ForwardPass) -> Iterator[MicroBatch]:
        """Yield micro-batches for this process to run through ``forward``.

        Sharded models gather weights collectively, so every process must run equally many passes. Processes having
        fewer micro-batches repeat their first unit, uncounted.
        """
        pieces = split_rows(batch, self.max_tokens, self.max_rows, self.process_group)
        most = len(pieces)
        if forward.is_sharded:
            most = max(self.process_group.gather([most], "number of micro-batches"))
        for rows in pieces:
            yield MicroBatch(rows, batch.select(rows), counts=True)
        for _ in range(most - len(pieces)):
            rows = list(range(batch.rows_per_unit))
            yield MicroBatch(rows, batch.select(rows), counts=False)

    def each(self, batch: Batch, forward: ForwardPass, compute: Callable[[Batch], T]) -> Iterator[tuple[list[int], T]]:
        """Yield row indices plus computed results per local micro-batch."""
        for micro in self.over(batch, forward):
            computed = compute(micro.part)
            if micro.counts:
                yield micro.rows, computed

    def total(
        self, batch: Batch, forward: ForwardPass, measure: Callable[[Batch], tuple[float, float]], what: str
    ) -> tuple[float, float]:
        """Sum two numbers over micro-batches across processes; ``what`` labels failures."""
        first = 0.0
        second = 0.0
        for _, (one, other) in self.each(batch, forward, measure):
            first += one
            second += other
        of_processes = self.process_group.gather([(first, second)], what)
        return sum(one for one, _ in of_processes), sum(other for _, other in of_processes)


def split_rows(
    batch: Batch, tokens_per_micro: int, rows_per_micro: int | None = None, process_group: ProcessGroup = SINGLE_PROCESS
) -> list[list[int]]:
    """Divide rows into pieces per process; every row lands in exactly one piece.

    A row costs its tokens, plus its prompt's if no group member precedes it in that piece. Units stay whole and
    ordered; groups stay whole if budgets allow. Oversized units form separate pieces. Processes receive consecutive
    units with similar token totals, possibly none.
    """
    lengths = batch.lengths.tolist()
    groups = batch.prompt_groups.tolist()
    prefixes = batch.prefix.tolist()
    each = batch.rows_per_unit
    order = sorted(range(0, len(lengths), each), key=lambda first: (groups[first], first))
    if process_group.size > 1:
        order = _span(order, [sum(lengths[first : first + each]) for first in order], process_group)
    pieces: list[list[int]] = [[]]
    used = 0  # tokens in the current piece
    seen: set[int] = set()  # its groups

    def cost_of(unit: range) -> int:
        cost = 0
        for b in unit:
            cost += lengths[b]
            if groups[b] in seen:
                cost -= prefixes[b]
            seen.add(groups[b])
        return cost

    for first in order:
        unit = range(first, first + each)
        used += cost_of(unit)
        too_many = rows_per_micro is not None and len(pieces[-1]) + each > rows_per_micro
        if pieces[-1] and (used > tokens_per_micro or too_many):
            pieces.append([])
            seen.clear()
            used = cost_of(unit)
        pieces[-1] += unit
    if process_group.size > 1 and not pieces[-1]:  # no unit for this process
        return []
    return pieces


def _span(order: Sequence[int], costs: Sequence[int], process_group: ProcessGroup) -> list[int]:
    """Select units whose midpoint falls within this process's share of total cost."""
    total = sum(costs)
    before = itertools.accumulate(costs, initial=0)
    middles = ((2 * start + cost) / 2 for start, cost in zip(before, costs, strict=False))
    ranks = (middle * process_group.size // total for middle in middles)
    return [unit for unit, rank in zip(order, ranks, strict=True) if rank == process_group.rank]


def split_padded(
    order: Iterable[int], lengths: Sequence[int] | Mapping[int, int], max_tokens: float, max_rows: int | None = None
) -> list[list[int]]:
    """Group texts in ``order``, keeping padded size within ``max_tokens`` (single texts may exceed it).

    ``lengths``: token counts.
    """
    pieces: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not pieces or longest * (len(pieces[-1]) + 1) > max_tokens or len(pieces[-1]) == max_rows:
            pieces.append([])
            longest = lengths[index]
        pieces[-1].append(index)
    return pieces


def by_length(lengths: Sequence[int]) -> list[int]:
    """Indices, the shortest first."""
    return sorted(range(len(lengths)), key=lambda index: lengths[index])
