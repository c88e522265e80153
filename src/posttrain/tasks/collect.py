"""Rows to examples, one by one, where a row that cannot be used is left out and counted by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from posttrain.errors import DataError
from posttrain.tasks.base import Task
from posttrain.tasks.reading import Row
from posttrain.types import Example


class Dropped(Exception):
    """A row that is left out and counted; the text is the reason, the same for all such rows."""


@dataclass(slots=True)
class Collected:
    """Examples in the order of their rows, and how many rows were left out, by reason."""

    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def require_examples(self, place: str) -> None:
        """Refuse data of which nothing can be used.

        Raises:
            DataError: there were rows, and all of them were dropped; the message has the reasons.
        """
        if not self.examples and self.dropped:
            reasons = show_counts(self.dropped)
            raise DataError(place, f"no row can be used: {reasons}. `posttrain explain TASK` says what a row must have")

    def as_task(self, name: str, place: str) -> Task:
        """All of it as a test split.

        Raises:
            DataError: there is nothing.
        """
        if not self.examples:
            raise DataError(place, "no usable examples in it; give a file with rows")
        return Task(name, "test", self.examples, dict(self.dropped))


def collect(
    rows: Iterable[Row], read: Callable[[Row], Example], place: str, dropped: Counter[str] | None = None
) -> Collected:
    """One example per row, where ``read`` raises ``Dropped`` for a row that is left out.

    ``dropped``: where ``rows`` itself counts what it leaves out; the rows that ``read`` leaves out are added.

    Raises:
        DataError: a malformed row, or rows of which none can be used.
    """
    collected = Collected(dropped=Counter() if dropped is None else dropped)
    for row in rows:
        try:
            collected.examples.append(read(row))
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
    collected.require_examples(place)
    return collected


def show_counts(counts: Counter[str]) -> str:
    """``2 × a reason, 1 × another``."""
    return ", ".join(f"{n} × {reason}" for reason, n in counts.items())
