"""The mathematics suites that models are compared on. All are test sets, for evaluation only.

Those in the common layout are rows of a table; MATH-500 and SVAMP have layouts of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Literal

from posttrain.graders.answers import last_boxed
from posttrain.option_types import shorten
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Dropped, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.tasks.verifiable import math
from posttrain.types import Example, Message

# Under these keys a suite may state what kind of problem a row is; kept in meta under the names on the right.
_META = {
    "subject": "subject",
    "subfield": "subject",
    "Type": "type",
    "type": "type",
    "level": "level",
    "difficulty": "difficulty",
    "answer_type": "answer_type",
    "year": "year",
}
_MISSPELLED = {"Common-Divison": "Common-Division"}  # of one row of SVAMP


@register("task", held_out="test")
@reads_rows
def math500(*, split: Literal["test"] = "test", path: str | None = None, hub: str = "HuggingFaceH4/MATH-500") -> Task:
    """MATH-500: 500 problems of the MATH test set, of all subjects and levels, graded by ``math``.

    Keys as in the task ``math``: ``problem``, ``solution``, ``answer``, ``subject``, ``level``.

    Args:
        split: there is nothing but a test split.

    Source: Lightman et al. 2023 (arXiv 2305.20050), who set these problems apart.
    """

    def read(row: Row) -> Example:
        return math.read_example(row, split, "math500")

    return _read_suite("math500", path, hub, "test", read)


@register("task", held_out="test")
@reads_rows
def svamp(
    *,
    split: Literal["test"] = "test",
    path: str | None = None,
    hub: str = "ChilleD/SVAMP",
    hub_split: str = "train+test",
) -> Task:
    """SVAMP: 1,000 word problems of one step, varied to catch those who do not read; graded by ``numeric``.

    Keys: ``Body`` and ``Question``, which are joined; ``Answer``; ``Type`` (optional, kept in meta as ``type``).

    Args:
        split: there is nothing but a test split: all 1,000 problems.
        hub: name of the data set on the hub, where the problems were parted into 700 and 300.
        hub_split: what its split is called there.

    Source: Patel et al. 2021 (arXiv 2103.07191).
    """

    def read(row: Row) -> Example:
        body, question = row.text("Body").strip(), row.text("Question").strip()
        joined = f"{body}{'' if body[-1] in '.?!,;:' else '.'} {question}"
        return _example("svamp", row, joined, read_golds(row, ("Answer",)), "numeric")

    return _read_suite("svamp", path, hub, hub_split, read)


_OPTIONS = """
Args:
    split: there is nothing but a test split.
    hub_split: what its split is called there.
"""


def _suite(
    name: str, at: str, at_split: str, says: str, *, grader: str = "math", source: str = ""
) -> Callable[..., Task]:
    """The task of a suite in the common layout: a problem and its answer or answers. ``at``: where on the hub."""

    def suite(
        *, split: Literal["test"] = "test", path: str | None = None, hub: str = at, hub_split: str = at_split
    ) -> Task:
        def read(row: Row) -> Example:
            key = "question" if "problem" not in row.data and "question" in row.data else "problem"
            golds = read_golds(row, ("answer", "final_answer"))
            return _example(name, row, row.text(key).strip(), golds, grader)

        return _read_suite(name, path, hub, hub_split, read)

    suite.__name__ = suite.__qualname__ = name
    suite.__doc__ = f"{says}{_OPTIONS}" + (f"\nSource: {source}\n" if source else "")
    return register("task", held_out="test")(reads_rows(suite))


_AIME = """The 30 problems of AIME {year}; answers are whole numbers from 0 to 999, graded by ``numeric``.

Keys: ``problem``; ``answer``, or a ``solution`` with a box; ``difficulty`` and ``year`` (optional, kept in meta).
"""
aime24 = _suite("aime24", "HuggingFaceH4/aime_2024", "train", _AIME.format(year=2024), grader="numeric")
aime25 = _suite("aime25", "math-ai/aime25", "test", _AIME.format(year=2025), grader="numeric")
amc = _suite(
    "amc",
    "AI-MO/aimo-validation-amc",
    "train",
    """83 problems of AMC 12 of 2022 and 2023, rewritten to ask for a number; graded by ``math``.

Keys: ``problem`` (or ``question``), ``answer``; ``difficulty`` (optional, kept in meta). For the 40 problems that
others call AMC 23 set ``hub: math-ai/amc23`` and ``hub_split: test``.
""",
)
minerva_math = _suite(
    "minerva_math",
    "math-ai/minervamath",
    "test",
    """272 problems of undergraduate science (OCWCourses), graded by ``math``, or ``any_answer``.

Keys: ``problem`` (or ``question``); ``answer``, a text or a list of alternatives each of which is right
(``meta["answers"]``).
""",
    source="Lewkowycz et al. 2022 (arXiv 2206.14858), section 3.",
)
olympiad_bench = _suite(
    "olympiad_bench",
    "math-ai/olympiadbench",
    "test",
    """The 675 English problems of OlympiadBench with text and an answer alone, graded by ``math``.

Keys: ``problem`` (or ``question``); ``answer`` (or ``final_answer``), a text or a list of alternatives, where one
text may state several values, all of which are asked for; ``subfield`` and ``answer_type`` (optional, kept in
meta, the first as ``subject``).
""",
    source="He et al. 2024 (arXiv 2402.14008).",
)


def _read_suite(name: str, path: str | None, hub: str, hub_split: str, read: Callable[[Row], Example]) -> Task:
    def read_answered(row: Row) -> Example:
        example = read(row)
        if example.answer is None:
            raise Dropped("no answer")
        return example

    rows, place = read_source(path, hub, None, hub_split)
    return collect(rows, read_answered, place).as_task(name, place)


def _example(name: str, row: Row, problem: str, golds: list[str], grader: str) -> Example:
    meta: dict[str, Any] = {}
    for key, kept in _META.items():
        if row.has(key) and kept not in meta:
            value = row.plain(key)
            is_endless = isinstance(value, float) and not isfinite(value)
            if not isinstance(value, str | int | float) or isinstance(value, bool) or is_endless:
                raise row.fail(f"{key!r} must be text or a number; got {shorten(value)}")
            meta[kept] = _MISSPELLED.get(value, value) if isinstance(value, str) else value
    if len(golds) > 1:
        if grader != "math":
            raise row.fail(f"one answer is expected; got {len(golds)}: {', '.join(golds)}")
        meta["answers"], grader = tuple(golds), "any_answer"
    return Example(
        id=f"{name}/test/{row.line}",
        messages=(Message("user", problem),),
        answer=golds[0] if golds else None,
        solution=row.text("solution").strip()
        if row.has("solution") and isinstance(row.data["solution"], str)
        else None,
        meta=meta,
        grader=grader,
    )


def read_golds(row: Row, keys: tuple[str, ...]) -> list[str]:
    """The gold answers under the first of ``keys`` that is there: one, or a list of alternatives without repetitions.

    A whole number that is stored as 145.0 is 145. Without any of the keys it is the last box of ``solution``.

    Raises:
        DataError: something that is neither text nor a number, or blank.
    """
    key = next((key for key in keys if row.has(key)), None)
    if key is None:
        boxed = last_boxed(row.text("solution")) if row.has("solution") else None
        if boxed is None and not any(name in row.data for name in keys):
            row.text(keys[0])  # raises with the keys that there are
        return [boxed] if boxed else []
    value = row.data[key]
    values = list(value) if isinstance(value, list | tuple) else [value]
    return list(dict.fromkeys(_read_gold(row, key, item) for item in values))


def _read_gold(row: Row, key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not isfinite(value):
            raise row.fail(f"{key!r} must be a finite number or text; got {value!r}")
        return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)
    return row.checked(value, key).strip()
