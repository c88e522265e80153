"""Runs whose balances are read: what each of them measured, at which update, and what was told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from posttrain.balances import checks
from posttrain.balances.findings import Reading
from posttrain.balances.record import StepRecord
from posttrain.recipes.recipe import Recipe
from small_runs import Events, watched


@dataclass
class Read:
    """Every reading of a run, with its update, and what the observer was told."""

    readings: list[tuple[int, Reading]] = field(default_factory=list)
    events: Events = field(default_factory=Events)

    @property
    def violated(self) -> dict[str, int]:
        """The balances that did not hold, with the first update of each."""
        first: dict[str, int] = {}
        for step, reading in self.readings:
            if not reading.holds:
                first.setdefault(reading.check, step)
        return first

    @property
    def worst(self) -> dict[str, float]:
        """The largest share of its limit that each balance came to; a limit of 0 counts exceptions."""
        shares: dict[str, float] = {}
        for _, reading in self.readings:
            share = reading.gap
            if reading.limit:
                share = reading.gap / reading.limit
            shares[reading.check] = max(shares.get(reading.check, 0.0), share)
        return shares

    @property
    def notices(self) -> list[str]:
        return [str(one["message"]) for one in self.events.of("notice")]


@contextmanager
def reading(read: Read) -> Iterator[None]:
    """Keep every reading of the balances that are drawn inside the block."""
    draw = checks.read_balances

    def kept(record: StepRecord) -> Iterator[Reading]:
        for one in draw(record):
            read.readings.append((record.step, one))
            yield one

    with mock.patch.object(checks, "read_balances", kept):
        yield


def read_run(folder: Path, recipe: Recipe, *, resume: bool = False, stop_after: int | None = None) -> Read:
    """Train in ``folder``, and return what its balances read."""
    read = Read()
    with reading(read):
        watched(folder, recipe, read.events, resume=resume, stop_after=stop_after)
    return read
