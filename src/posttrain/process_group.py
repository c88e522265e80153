"""Processes training a model together, seen from each process; trivial if there is only one.

Methods divide item lists (``share``, plus ``gather`` for collecting results everywhere), sum tensors (``add``), and
send rank 0's decisions or data to everyone (``broadcast``). Anything else is computed redundantly from identical
numbers, so all processes hold identical weights. Every process must make every call, in the same order; ``what`` names
the call in error messages. The multi-process class is in ``training/distributed.py``; this module imports nothing from
posttrain.
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
Within = Callable[[Callable[[], Any]], Any]  # gathers a sharded model around a computation


class ProcessGroup:
    """A single process: rank 0 of 1."""

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Check if this process writes records and checkpoints (rank 0)."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Select this process's items: every ``size``-th, starting at ``rank``."""
        return list(items[self.rank :: self.size])

    def gather(self, mine: Sequence[T], what: str) -> list[T]:
        """Collect ``share`` results from all processes, in original item order."""
        return list(mine)

    def add(self, tensors: Sequence[Tensor], what: str) -> None:
        """Sum each tensor across processes in place; shapes and dtypes must match."""

    def broadcast(self, value: T, what: str) -> T:
        """Send rank 0's value to everyone; other values are ignored."""
        return value

    def agree(self, flag: bool, what: str) -> bool:
        """Combine flags by logical or."""
        return flag

    def in_turn(self) -> AbstractContextManager[object]:
        """Run a memory-hungry block (such as loading) one process at a time per machine; all leave together."""
        return nullcontext()


SINGLE_PROCESS = ProcessGroup()


def whole(tensor: Tensor) -> Any:
    """Gather sharded tensors, called by every process; others are returned unchanged."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.full_tensor()


def own_part(tensor: Tensor) -> Any:
    """Get this process's shard."""
    if not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()


def local_size() -> int:
    """Count processes on this machine (``LOCAL_WORLD_SIZE``)."""
    return max(1, _number("LOCAL_WORLD_SIZE") or 1)


def local_rank() -> int | None:
    """Find this process's rank within its machine (``LOCAL_RANK``); None if alone."""
    return _number("LOCAL_RANK")


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        return None
    return int(value)


def peak_resident_bytes() -> int:
    """Measure peak resident memory in bytes; 0 if unsupported (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
