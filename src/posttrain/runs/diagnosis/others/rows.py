"""Common row format for records from other trainers."""

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

MOST_NUMBERS = 1 << 20  # per list in a row
MOST_BYTES = 1 << 29  # of a file's rows, estimated
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """One completion from a different trainer. Missing values are None.

    batch: index of the sampled batch, from 0. step: the trainer's step number. prompt, answer: text for equality
    checks. parts: rewards by name, None if a function returned none. weights: reward weights by name. uneven:
    advantages differ between tokens. sampler, trainer: log-probabilities at trained tokens. trained: number of
    trained tokens. written: number of generated tokens. group_size: the trainer's setting.
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
        """Weighted sum over the available rewards; None without rewards, or if several have unknown weights."""
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
    """All completions of a run in order, and names of missing columns."""

    answers: Sequence[ForeignAnswer]
    missing: Sequence[str] = ()

    def batches(self) -> Iterator[list[ForeignAnswer]]:
        """Yield completions batch by batch."""
        for _, members in groupby(self.answers, key=lambda one: one.batch):
            yield list(members)


def files_of(path: Path, suffixes: Sequence[str], what: str) -> list[Path]:
    """List the file, or the matching files in a folder sorted by the numbers in their names.

    Raises:
        UsageError: neither exists, or the folder has no such file.
    """
    kind = kind_of_file(path)
    if kind == "file":
        return [path]
    if kind != "folder":
        problem = "no such file"
        if kind != "nothing":
            problem = f"not a regular file but a {kind}"
        near = ""
        if kind_of_file(path.parent) == "folder":
            near = suggest(path.name, [one.name for one in path.parent.iterdir()])
        raise UsageError(f"{path}: {problem}. Give {what}.{near}")
    found = [one for one in path.iterdir() if one.name.endswith(tuple(suffixes)) and kind_of_file(one) == "file"]
    if not found:
        raise UsageError(f"{path}: no {' or '.join(suffixes)} file in this folder. Give {what}")
    return sorted(found, key=lambda one: (number_in(one), one.name))


def number_in(path: Path) -> int:
    """Parse the last number in a file name; 0 if absent."""
    digits = "".join(c if c.isascii() and c.isdigit() else " " for c in path.stem).split()
    if not digits:
        return 0
    return int(digits[-1][:15])


def rows_of_records(path: Path) -> list[Row]:
    """Read all rows from a file.

    Raises:
        DataError: a damaged line, by number, an empty file, or one that does not fit into memory.
    """
    rows: list[Row] = []
    size = 0
    for row in read_file(str(path)):
        size += sum(_size_of(value) for value in row.data.values())
        if size > MOST_BYTES:
            raise DataError(path, f"more than {MOST_BYTES >> 20:,} MiB of records. Give a part of the run", row.line)
        rows.append(row)
    if not rows:
        raise DataError(path, "the file is empty. Give records from a run with at least one step")
    return rows


def _size_of(value: object) -> int:
    """Estimate the bytes of a value in memory."""
    if isinstance(value, str):
        return 64 + len(value)
    if isinstance(value, list):
        return 64 + 40 * len(value)
    if isinstance(value, dict):
        return 64 + sum(map(_size_of, value.values()))
    return 128  # with its place in the row


def number_under(row: Row, name: str) -> float | None:
    """Read a number; None if absent or NaN.

    Raises:
        DataError: not a number, or infinite.
    """
    value = unwrapped(row.data.get(name))
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise row.fail(f"{name}: expected a finite number, not {str(value)[:40]!r}")
    return float(value)


def numbers_under(row: Row, name: str) -> list[float] | None:
    """Read a list of numbers, possibly nested in a single-element list; None if absent.

    Raises:
        DataError: not a list of numbers.
    """
    value = row.data.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or len(value) > MOST_NUMBERS:
        raise row.fail(f"{name}: expected a list of numbers, not {type(value).__name__}")
    numbers: list[float] = []
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) < LARGEST:
            raise row.fail(f"{name}: expected finite numbers, not {str(one)[:40]!r}")
        numbers.append(float(one))
    return numbers


def text_under(row: Row, name: str) -> str:
    """Read text; messages and token ids are dumped as JSON.

    Raises:
        DataError: the column is missing.
    """
    value = unwrapped(row.data.get(name))
    if value is None:
        raise row.fail(f"{name}: missing column. Found: {', '.join(list(row.data)[:12])}")
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def unwrapped(value: object) -> object:
    """Unwrap a single-element list with a number or text; leave anything else unchanged."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list | dict):
        return value[0]
    return value
