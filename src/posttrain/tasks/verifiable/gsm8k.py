"""Grade-school mathematics: GSM8K (Cobbe et al. 2021)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example, Message

_CALCULATION = re.compile(r"<<[^<>]*>>")


@register("task", held_out="validation")
@reads_rows
def gsm8k(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "openai/gsm8k",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """GSM8K from the hub, or from a local file with the keys ``question`` and ``answer``.

    ``answer`` is the worked solution and, behind ``####``, the result. The solution becomes a
    demonstration without its calculator notes (``<<48/2=24>>``).

    Args:
        split: there is no validation split upstream: ``validation`` is a part of the training rows
            chosen by a hash of the question, and ``train`` is the rest. ``test`` of a local file is
            the whole file.
        hub: name of the data set on the hub (its configuration ``main``).
        validation_share: share of the training rows that is held out.
    """
    rows, place = read_source(path, hub, "main", "test" if split == "test" else "train")
    return collect(rows, lambda row: read_example(row, split), place).as_task("gsm8k", place, split, validation_share)


def read_example(row: Row, split: str) -> Example:
    """One row as an example.

    Raises:
        DataError: a key is missing or empty, or there is no ``####`` with a result behind it.
    """
    working, mark, result = row.text("answer").rpartition("####")
    if not mark:
        working, result = result, row.answer("final_answer") if row.has("final_answer") else ""
    if not result.strip():
        raise row.fail("'answer' has no result: it must end with a line `#### 42` (or give 'final_answer' as well)")
    return Example(
        id=f"gsm8k/{split}/{row.line}",
        messages=(Message("user", row.text("question").strip()),),
        answer=result.strip(),
        solution=_CALCULATION.sub("", working).strip() or None,
    )
