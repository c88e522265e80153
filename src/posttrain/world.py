"""The processes that train one model together, as each of them sees it; a single process does nothing here.

The work on a list of items is shared (``share``, and ``gather`` to have all results everywhere), and sums are taken
(``add``). All else every process computes for itself from the same numbers, so that all hold the same weights. Every
call is made by all processes, in the same order. ``train/distributed.py`` has several processes; this module imports
none of ours, so that every package can take one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")
Within = Callable[[Callable[[], Any]], Any]  # gathers a sharded model around what is computed


class World:
    """A single process: rank 0 of 1. ``what`` names an exchange in the message of its failure."""

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes records and checkpoints: rank 0."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """The items that are this process's work: every ``size``-th, from the ``rank``-th on."""
        return list(items[self.rank :: self.size])

    def gather(self, mine: Sequence[T], what: str) -> list[T]:
        """One result for each item of ``share``, from all processes, in the order of the items."""
        return list(mine)

    def add(self, tensors: Sequence[Any], what: str) -> None:
        """Each tensor becomes the sum over all processes, in place; shapes and types are the same everywhere."""

    def tell(self, value: T, what: str) -> T:
        """The value of rank 0, for all."""
        return value

    def agree(self, flag: bool, what: str) -> bool:
        """True for all where it is True for any."""
        return flag

    def in_turn(self) -> AbstractContextManager[object]:
        """Around what takes much main memory: one process of a machine is inside at a time, and all leave together."""
        return nullcontext()


ONE = World()


def whole(tensor: Any) -> Any:
    """The tensor itself; a sharded one is gathered, which every process has to ask for."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def own_part(tensor: Any) -> Any:
    """The part of a tensor that this process has."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def local_size() -> int:
    """Number of the processes on this machine (``LOCAL_WORLD_SIZE``)."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(stated)) if stated.isdecimal() else 1


def local_rank() -> int | None:
    """Rank of this process among those of its machine (``LOCAL_RANK``); None: it is alone."""
    stated = os.environ.get("LOCAL_RANK", "")
    return int(stated) if stated.isdecimal() else None


def peak_resident_bytes() -> int:
    """The most main memory that this process has held so far; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
