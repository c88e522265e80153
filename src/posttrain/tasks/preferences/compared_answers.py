"""Two answers to an instruction, compared by people: test sets for reward models (LLMBar, PandaLM)."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Any

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Dropped, collect
from posttrain.tasks.preferences.rows import read_prompt, require
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.types import Example, Message, Response

ANNOTATORS = ("annotator1", "annotator2", "annotator3")


@register("task")
@reads_rows
def llmbar(*, path: str) -> Task:
    """LLMBar from a local file: pairs of which one follows the instruction; the other often reads better.

    Zeng et al. (2023), "Evaluating large language models at evaluating instruction following". Keys: ``input`` (the
    instruction), ``output_1``, ``output_2``, ``label`` (1 or 2: the better one) and maybe ``subset``, kept in meta.
    There is one split. Dropped and counted: equal or blank outputs.

    Args:
        path: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """

    def read(row: Row) -> Example:
        label = row.data.get("label")
        if label not in (1, 2) or isinstance(label, bool):
            raise row.fail(f"'label' must be 1 or 2; got {label!r}")
        return Example(
            id=f"llmbar/{row.line}",
            messages=(Message("user", row.text("input").strip()),),
            responses=compared(row, ("output_1", "output_2"), label),
            meta={"subset": row.text("subset")} if row.has("subset") else {},
        )

    collected = collect(read_file(path), read, path)
    return collected.as_task("llmbar", path)


@register("task")
@reads_rows
def pandalm(*, path: str) -> Task:
    """PandaLM's human test set from a local file: answers of small models, compared by three annotators.

    Wang et al. (2023), "PandaLM: an automatic evaluation benchmark for LLM instruction tuning optimization". Keys:
    ``instruction``, ``input`` (may be blank), ``response1``, ``response2``, ``annotator1`` to ``annotator3`` (1 or 2:
    the better one; 0: a tie) and maybe ``motivation_app``, kept in meta as ``source``. The better answer is the one
    that at least two annotators named. An answer that is a number or a truth value stands for its text, as the
    published file has a few. There is one split. Dropped and counted: ties, no majority, equal or blank answers.

    Args:
        path: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """

    def read(row: Row) -> Example:
        votes: list[Any] = [row.data.get(key) for key in ANNOTATORS]
        if any(vote not in (0, 1, 2) or isinstance(vote, bool) for vote in votes):
            raise row.fail(f"{', '.join(ANNOTATORS)} must each be 0, 1 or 2; got {votes}")
        verdict, count = Counter(votes).most_common(1)[0]
        if count == 1:
            raise Dropped("no two annotators agree")
        if verdict == 0:
            raise Dropped("a tie")
        return Example(
            id=f"pandalm/{row.line}",
            messages=read_prompt(row),
            responses=compared(row, ("response1", "response2"), verdict),
            meta={"source": row.text("motivation_app")} if row.has("motivation_app") else {},
        )

    collected = collect(read_file(path), read, path)
    return collected.as_task("pandalm", path)


def compared(row: Row, keys: tuple[str, str], better: int) -> tuple[Response, Response]:
    """The better answer (the first or the second, counted from 1) with score 1, then the other with score 0.

    Raises:
        Dropped: one is missing or blank, or both are the same.
        DataError: one is neither text nor a number nor a truth value.
    """
    for key in keys:
        require(row, key)
        if isinstance(row.data[key], float) and not isfinite(row.data[key]):
            raise row.fail(f"{key!r} must be text, a number or a truth value; got {row.data[key]!r}")
    first, second = (
        str(row.data[key]) if isinstance(row.data[key], bool | int | float) else row.text(key) for key in keys
    )
    if first == second:
        raise Dropped("both answers are the same")
    chosen, rejected = (first, second) if better == 1 else (second, first)
    return Response(chosen, 1.0), Response(rejected, 0.0)
