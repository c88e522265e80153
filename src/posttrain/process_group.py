"""The processes that train one model together, as each of them sees it; a single process does nothing here.

The work on a list of items is shared (``share``, and ``gather`` to have all results everywhere), sums are taken
(``add``), and what rank 0 decides or reads goes to all (``broadcast``). All else every process computes for itself from
the same numbers, so that all hold the same weights. Every call is made by all processes, in the same order; ``what``
names it in the message of a failure. The class for several processes is in ``training/distributed.py``; this module
imports none of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Within = Callable[[Callable[[], Any]], Any]  # gathers a sharded model around what is computed


class ProcessGroup:
    """A single process: rank 0 of 1."""

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """True if this process writes records and checkpoints: rank 0."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Return the items that are this process's work: every ``size``-th, from the ``rank``-th on."""
        return list(items[self.rank :: self.size])

    def gather(self, mine: Sequence[T], what: str) -> list[T]:
        """Return one result for each item of ``share``, from all processes, in the order of the items."""
        return list(mine)

    def add(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace each tensor by the sum over all processes; shapes and types are the same everywhere."""

    def broadcast(self, value: T, what: str) -> T:
        """Return the value of rank 0; what the other processes give is not sent."""
        return value

    def agree(self, flag: bool, what: str) -> bool:
        """Return True where it is True for any."""
        return flag

    def in_turn(self) -> AbstractContextManager[object]:
        """Enter a block with one process of a machine at a time, as loading takes much memory; all leave together."""
        return nullcontext()


SINGLE_PROCESS = ProcessGroup()


def whole(tensor: Tensor) -> Any:
    """Return the tensor itself; a sharded one is gathered, which every process has to call."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.full_tensor()


def own_part(tensor: Tensor) -> Any:
    """Return the part of a tensor that this process has."""
    if not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()


def local_size() -> int:
    """Return the number of the processes on this machine (``LOCAL_WORLD_SIZE``)."""
    return max(1, _number("LOCAL_WORLD_SIZE") or 1)


def local_rank() -> int | None:
    """Return the rank of this process among those of its machine (``LOCAL_RANK``); None: it is alone."""
    return _number("LOCAL_RANK")


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        return None
    return int(value)


def peak_resident_bytes() -> int:
    """Return the most main memory that this process has held; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
