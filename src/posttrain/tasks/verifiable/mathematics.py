"""Mathematics: GSM8K, MATH, and the suites that models are compared on."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.graders.answers import last_boxed
from posttrain.graders.math.extraction import read_boxes
from posttrain.option_types import shorten
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Dropped, Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example, Message

# Grade-school mathematics: GSM8K (Cobbe et al. 2021).

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
    return collect(rows, lambda row: read_gsm8k(row, split), place).as_task("gsm8k", place, split, validation_share)


def read_gsm8k(row: Row, split: str) -> Example:
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


# Competition mathematics: MATH (Hendrycks et al. 2021).

# "Enter only one of the foci, not both."
_ASKS_FOR_ONE = re.compile(r"\bonly one of\b|\bnot both\b", re.IGNORECASE)


@register("task", held_out="validation")
@reads_rows
def math(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "DigitalLearningGmbH/MATH-lighteval",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """MATH from the hub, or from a local file in its layout.

    Keys: ``problem``; ``solution`` (optional); ``answer`` (optional: otherwise the last ``\\boxed{}`` of the
    solution); ``level`` and ``subject`` or ``type`` (optional, kept in meta). Rows with neither an
    answer nor a box are dropped and counted. Where the solution ends in several boxes ("\\boxed{2} and \\boxed{1}")
    and ``answer`` is no more than the last of them, all of them are the answer; where the problem asks for only one,
    each of them is right (``meta["answers"]``).

    Args:
        split: ``validation`` is a part of the training rows chosen by a hash of the problem, and
            ``train`` is the rest. ``test`` of a local file is the whole file.
        validation_share: share of the training rows that is held out.
    """

    def read(row: Row) -> Example:
        example = read_example(row, split)
        if example.answer is None:
            raise Dropped("no answer and no \\boxed{} in the solution")
        return example

    rows, place = read_source(path, hub, None, "test" if split == "test" else "train")
    return collect(rows, read, place).as_task("math", place, split, validation_share)


def read_example(row: Row, split: str, name: str = "math") -> Example:
    """One row as an example of the task ``name``; its answer is None where the row gives none.

    Raises:
        DataError: the problem is missing, or a key has the wrong type or is empty.
    """
    solution = row.text("solution").strip() if row.has("solution") else None
    problem = row.text("problem").strip()
    boxed = last_boxed(solution or "") or None
    answer = row.answer("answer").strip() if row.has("answer") else boxed
    meta: dict[str, Any] = {}
    grader = "math"
    if answer is not None and answer == boxed and (boxes := read_boxes(solution or "")) is not None:
        if len(boxes.contents) > 1 and _ASKS_FOR_ONE.search(problem):
            meta["answers"], grader = (boxes.joined, *boxes.contents), "any_answer"
        answer = boxes.joined
    if row.has("level"):
        meta["level"] = _read_level(row)
    subject = next((row.text(key) for key in ("subject", "type") if row.has(key)), None)
    if subject is not None:
        meta["subject"] = subject
    place = f"{name}/{split}/{row.line}"
    message = Message("user", problem)
    return Example(place, (message,), answer=answer, solution=solution, meta=meta, grader=grader)


def _read_level(row: Row) -> int | None:
    """``Level 5`` or 5; ``Level ?`` stands in the original data."""
    level = row.data["level"]
    digits = level.removeprefix("Level").strip() if isinstance(level, str) else str(level)
    if digits == "?":
        return None
    if not (digits.isdecimal() and 1 <= int(digits[:9]) <= 5):
        raise row.fail(f"'level' must be 1 to 5 or 'Level 1' to 'Level 5'; got {level!r}")
    return int(digits)


# The mathematics suites that models are compared on. All are test sets, for evaluation only.
# Those in the common layout are rows of a table; MATH-500 and SVAMP have layouts of their own.

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
        return read_example(row, split, "math500")

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
