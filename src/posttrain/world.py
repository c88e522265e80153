"""The processes that train one model together, as each of them sees it; a world of one does nothing and costs nothing.

What is shared by several is the work on a list of items (``share``, and ``gather`` to have all results everywhere) and
sums (``add``). All else every process computes for itself from the same numbers, so that all hold the same weights.
Every call is made by all of them, in the same order. ``train/distributed.py`` has the world of several; this module
imports none of ours, so that any room can be told of one. What a process sees of its machine is here, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Within = Callable[[Callable[[], Any]], Any]  # gathers a model in parts around what is computed
_MEMORY = "/sys/fs/cgroup"  # what a group of processes (a job, a container) may take, of either version
_GROUPS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class World:
    """A world of one process: rank 0 of 1.

    ``what`` is what an exchange is about, in words that stand in the message if it fails.
    """

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes records and checkpoints: rank 0."""
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
        """Around what takes main memory for a while: so many of a machine's processes are inside at a time as it holds.

        It ends behind the last of all processes; inside there is no exchange.
        """
        return nullcontext()


ONE = World()


def whole(tensor: Any) -> Any:
    """The tensor itself; of one that lies in parts, one in each process, all of it: then every process asks for it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def own_part(tensor: Any) -> Any:
    """What this process has of a tensor."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def local_size() -> int:
    """How many of the processes are on this machine, as who started them says (``LOCAL_WORLD_SIZE``)."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(stated)) if stated.isdecimal() else 1


def local_rank() -> int | None:
    """Which of the processes on this machine this is, as who started it says (``LOCAL_RANK``); None: it is alone."""
    stated = os.environ.get("LOCAL_RANK", "")
    return int(stated) if stated.isdecimal() else None


def peak_resident_bytes() -> int:
    """The most of main memory that this process has held so far."""
    try:
        import resource
    except ImportError:  # Windows does not say
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory_bytes() -> int:
    """What is left of main memory: of the machine's, and of what this process's group may take. 0: nothing tells."""
    left = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    groups = [line.rsplit(":", 1)[1] for line in _lines("/proc/self/cgroup") if ":memory:" in line or "::" in line]
    for group in ("/", *groups):  # a container's own is mounted as the topmost
        for root in (_MEMORY, f"{_MEMORY}/memory"):
            for most, taken in _GROUPS:
                with suppress(OSError, ValueError):  # no such file, or "max"
                    place = Path(f"{root}{group}")
                    limit, used = (int((place / name).read_text(encoding="ascii")) for name in (most, taken))
                    cached = dict(line.split() for line in _lines(place / "memory.stat"))  # files, let go in need
                    left.append(limit - used + int(cached.get("total_inactive_file", cached.get("inactive_file", 0))))
    return max(0, min(left, default=0))


def _lines(path: str | Path) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").splitlines()
    return []
