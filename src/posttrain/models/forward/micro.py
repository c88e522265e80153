"""Micro-batches: rows of an optimizer batch, or texts, in pieces of a bounded number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.types import Batch


def split_rows(
    batch: Batch, tokens_per_micro: int, rows_per_micro: int | None = None, process_group: ProcessGroup = SINGLE_PROCESS
) -> list[list[int]]:
    """Row indices of each piece of this process; every row is in exactly one piece of one process.

    A row costs its own tokens, and its prompt's unless a row of its group is in the piece. The rows of a unit stay
    together, in order; groups do where the budget allows. A unit larger than the budget is a piece of its own.
    Processes get neighbouring units, about as many tokens each, or none.
    """
    lengths, groups, prefixes = batch.lengths.tolist(), batch.group.tolist(), batch.prefix.tolist()
    each = batch.rows_per_unit
    order = sorted(range(0, len(lengths), each), key=lambda first: (groups[first], first))
    if process_group.size > 1:
        order = _span(order, [sum(lengths[first : first + each]) for first in order], process_group)
    pieces: list[list[int]] = [[]]
    used, seen = 0, set[int]()  # tokens of the last piece, and its groups

    def cost_of(unit: range) -> int:
        cost = 0
        for b in unit:
            cost += lengths[b] - prefixes[b] if groups[b] in seen else lengths[b]
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
    return pieces if pieces[-1] or process_group.size == 1 else []


def even_pieces(
    pieces: Sequence[list[int]], batch: Batch, process_group: ProcessGroup, *, is_sharded: bool
) -> Iterator[tuple[list[int], bool]]:
    """Each piece, and whether it counts.

    A pass of a sharded model gathers weights from all processes, so all make as many: a process with fewer pieces
    passes the first unit again, which does not count.
    """
    most = max(process_group.gather([len(pieces)], "number of micro-batches")) if is_sharded else len(pieces)
    yield from ((rows, True) for rows in pieces)
    yield from [(list(range(batch.rows_per_unit)), False)] * (most - len(pieces))


def _span(order: Sequence[int], costs: Sequence[int], process_group: ProcessGroup) -> list[int]:
    """Return the units whose middle lies in this process's part of the sum of all costs."""
    total, before = sum(costs), itertools.accumulate(costs, initial=0)
    middles = ((2 * start + cost) / 2 for start, cost in zip(before, costs, strict=False))
    ranks = (middle * process_group.size // total for middle in middles)
    return [unit for unit, rank in zip(order, ranks, strict=True) if rank == process_group.rank]


def split_padded(
    order: Iterable[int], lengths: Sequence[int] | Mapping[int, int], max_tokens: float, max_rows: int | None = None
) -> list[list[int]]:
    """Texts in this ``order``, in pieces that padded to their longest have at most ``max_tokens`` (or are one text).

    ``lengths``: tokens of each text.
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
