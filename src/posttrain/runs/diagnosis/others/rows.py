"""Rows of another trainer's records in one form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from posttrain.data.reading import Row, read_file
from posttrain.errors import DataError, UsageError
from posttrain.registry import suggest
from posttrain.untrusted import kind_of_file

MOST_NUMBERS = 1 << 20  # of a list in a row
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """One answer of another trainer; what its record has not is None.

    batch: number of the batch that it was sampled in, from 0. step: as the trainer counts. prompt, answer: texts that
    are equal for equal ones. parts: rewards by name, None of a function that gave none; weights: of them.
    uneven: its tokens have several advantages. sampler, trainer: log-probabilities at the trained tokens. trained: the
    number of trained tokens; written: of those that the model wrote. group_size: as the trainer was told.
    """

    batch: int
    step: int
    prompt: str
    answer: str
    parts: Mapping[str, float | None]
    weights: Mapping[str, float] | None = None
    advantage: float | None = None
    uneven: bool = False
    sampler: Sequence[float] | None = None
    trainer: Sequence[float] | None = None
    trained: int | None = None
    written: int | None = None
    group_size: int | None = None
    epoch: int | None = None

    @property
    def reward(self) -> float | None:
        """The weighted sum of the parts that are there; None if none is, or no weight is known."""
        known = {name: x for name, x in self.parts.items() if x is not None}
        if not known:
            return None
        if self.weights is None:
            if len(self.parts) > 1:
                return None
            return sum(known.values())
        return math.fsum(self.weights.get(name, 1.0) * x for name, x in known.items())


@dataclass(frozen=True, slots=True)
class ForeignRecords:
    """All answers of a run in their order, and what a reader found no column for, by name."""

    answers: Sequence[ForeignAnswer]
    missing: Sequence[str] = ()

    def batches(self) -> Iterator[list[ForeignAnswer]]:
        """Yield the answers of each batch."""
        for _, members in groupby(self.answers, key=lambda one: one.batch):
            yield list(members)


def files_of(path: Path, suffixes: Sequence[str], what: str) -> list[Path]:
    """Return the file, or those of a folder in the order of the numbers in their names.

    Raises:
        UsageError: it is neither, or a folder without such a file.
    """
    kind = kind_of_file(path)
    if kind == "file":
        return [path]
    if kind != "folder":
        problem = "there is no such file"
        if kind != "nothing":
            problem = f"this is a {kind}"
        near = ""
        if kind_of_file(path.parent) == "folder":
            near = suggest(path.name, [one.name for one in path.parent.iterdir()])
        raise UsageError(f"{path}: {problem}. Give {what}.{near}")
    found = [one for one in path.iterdir() if one.name.endswith(tuple(suffixes)) and kind_of_file(one) == "file"]
    if not found:
        raise UsageError(f"{path}: no file of this folder ends with {' or '.join(suffixes)}. Give {what}")
    return sorted(found, key=lambda one: (number_in(one), one.name))


def number_in(path: Path) -> int:
    """Return the last number in the name of a file; 0 without one."""
    digits = "".join(c if c.isascii() and c.isdigit() else " " for c in path.stem).split()
    if not digits:
        return 0
    return int(digits[-1][:15])


def rows_of_records(path: Path) -> list[Row]:
    """Return all rows of a file.

    Raises:
        DataError: a damaged line, by its number; or no row at all.
    """
    rows = list(read_file(str(path)))
    if not rows:
        raise DataError(path, "it has no rows. Give the records of a run that has made a step")
    return rows


def number_under(row: Row, name: str) -> float | None:
    """Return a number; None where the row has none, NaN included.

    Raises:
        DataError: it is something else, or infinite.
    """
    value = unwrapped(row.data.get(name))
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise row.fail(f"{name}: a finite number is needed, not {str(value)[:40]!r}")
    return float(value)


def numbers_under(row: Row, name: str) -> list[float] | None:
    """Return a list of numbers, which may be the only entry of a list; None where the row has none.

    Raises:
        DataError: it is something else.
    """
    value = row.data.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or len(value) > MOST_NUMBERS:
        raise row.fail(f"{name}: a list of numbers is needed, not {type(value).__name__}")
    numbers: list[float] = []
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) < LARGEST:
            raise row.fail(f"{name}: finite numbers are needed, not {str(one)[:40]!r}")
        numbers.append(float(one))
    return numbers


def text_under(row: Row, name: str) -> str:
    """Return a text; messages and token ids as their JSON.

    Raises:
        DataError: the column is missing.
    """
    value = unwrapped(row.data.get(name))
    if value is None:
        raise row.fail(f"{name}: the column is missing. There are {', '.join(list(row.data)[:12])}")
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def unwrapped(value: object) -> object:
    """Return the only entry of a list of one number or text; anything else as it is."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list | dict):
        return value[0]
    return value
