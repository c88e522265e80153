"""Rows that cannot be used are counted by reason; a file of nothing else is refused with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from posttrain.errors import DataError
from posttrain.tasks.reader import Collected, Dropped, collect
from posttrain.tasks.reading import Row
from posttrain.types import Example, Message


def rows(*numbers: int) -> Iterator[Row]:
    return (Row("f", line, {"x": number}) for line, number in enumerate(numbers, start=1))


def read(row: Row) -> Example:
    if row.data["x"] < 0:
        raise Dropped("negative")
    if row.data["x"] == 0:
        raise Dropped("zero")
    return Example(f"e/{row.line}", (Message("user", str(row.data["x"])),))


def test_what_is_left_keeps_its_order_and_the_rest_is_counted() -> None:
    found = collect(rows(3, -1, 2, 0, -5), read, "f")
    assert [example.id for example in found.examples] == ["e/1", "e/3"]
    assert found.dropped == {"negative": 2, "zero": 1}


def test_nothing_left_is_refused_with_the_reasons() -> None:
    with pytest.raises(
        DataError, match=r"^f: no row can be used: 2 × negative, 1 × zero\. `posttrain explain TASK` says "
    ):
        collect(rows(-1, 0, -2), read, "f")
    assert collect(rows(), read, "f").examples == []  # an empty file is for the splits to refuse
    Collected(dropped=Counter()).require_examples("f")
    with pytest.raises(
        DataError, match=r"^f: no usable examples in it; give a file with rows$"
    ):  # a task without splits
        collect(rows(), read, "f").as_task("x", "f")


def test_errors_pass() -> None:
    with pytest.raises(DataError, match="f:1: the key 'y' is missing"):
        collect(rows(1), lambda row: Example(row.text("y"), ()), "f")
