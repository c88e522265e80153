"""The processes that train one model together, as each of them sees it; a world of one does nothing and costs nothing.

What is shared by several is the work on a list of items (``share``, and ``gather`` to have all results everywhere) and
sums (``add``). All else every process computes for itself from the same numbers, so that all hold the same weights.
Every call is made by all of them, in the same order. ``train/distributed.py`` has the world of several; this module
imports nothing, so that any room can be told of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Within = Callable[[Callable[[], Any]], Any]  # gathers a model in parts around what is computed


class World:
    """A world of one process: rank 0 of 1.

    ``what`` is what an exchange is about, in words that stand in the message if it fails.
    """

    rank = 0
    size = 1
    starts_servers = False  # whether who started the processes starts servers for them, too

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

    def order(self, name: str, facts: Mapping[str, Any]) -> None:
        """Ask who started the processes for a server of a name; what is to be known of it is ``delivered``."""
        assert self.starts_servers, "nobody started this process who could start a server for it"

    def delivered(self, key: str) -> Any:
        """What was said under a key by who started the processes; None: nothing yet."""
        return None


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
