"""Micro-batches: rows of an optimizer batch in pieces of at most so many tokens."""

from __future__ import annotations

from posttrain.types import Batch


def split_rows(batch: Batch, tokens_per_micro: int, rows_per_micro: int | None = None) -> list[list[int]]:
    """Row indices of each piece; every row is in exactly one.

    A row costs its own tokens, and its prompt's unless the prompt is already in the piece (rows of
    a group share it). Groups stay together where the budget allows. A row longer than the budget
    is a piece of its own. The gradient does not depend on the split: weights come from the whole
    optimizer batch.
    """
    lengths, groups, prefixes = batch.lengths.tolist(), batch.group.tolist(), batch.prefix.tolist()
    order = sorted(range(len(lengths)), key=lambda b: (groups[b], b))
    pieces: list[list[int]] = []
    current: list[int] = []
    seen: set[int] = set()
    used = 0
    for b in order:
        own = lengths[b] - prefixes[b]
        cost = own if groups[b] in seen else lengths[b]
        full = used + cost > tokens_per_micro or (rows_per_micro is not None and len(current) >= rows_per_micro)
        if current and full:
            pieces.append(current)
            current, seen, used = [], set(), 0
            cost = lengths[b]
        current.append(b)
        seen.add(groups[b])
        used += cost
    pieces.append(current)
    return pieces
