"""Benchmarks: GSM8K, MATH and other mathematics, MMLU, HumanEval, MBPP, refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from math import isfinite
from statistics import fmean
from typing import Any, Literal

from posttrain.data.base import Task
from posttrain.data.choices import lettered_lines
from posttrain.data.golds import golds_of
from posttrain.data.messages import read_prompt
from posttrain.data.reader import TestSplit, collect_examples, drop_if, reads_rows, row_task, strip_calculations
from posttrain.data.reading import Row, read_file
from posttrain.graders.answers import last_boxed
from posttrain.graders.behaviour import KINDS
from posttrain.graders.choice import LETTERS
from posttrain.graders.math.extraction import read_boxes
from posttrain.option_types import shorten
from posttrain.registry import register, suggest
from posttrain.types import Example, Message

# "Enter only one of the foci, not both."
_ASKS_FOR_ONE = re.compile(r"\bonly one of\b|\bnot both\b", re.IGNORECASE)
# Optional problem metadata: row key -> meta key.
_META = {
    "subject": "subject",
    "subfield": "subject",
    "type": "type",
    "level": "level",
    "difficulty": "difficulty",
    "answer_type": "answer_type",
    "year": "year",
}


@register("task", held_out="validation")
@row_task("openai/gsm8k:main")
def gsm8k(row: Row) -> Example:
    """Grade-school mathematics (GSM8K), with keys ``question`` and ``answer``.

    ``answer`` contains the worked solution followed by ``####`` and the result, which may instead be in
    ``final_answer``. The solution becomes the demonstration, without calculator annotations (``<<48/2=24>>``).

    Source: Cobbe et al. 2021 (arXiv 2110.14168).
    """
    working, mark, result = row.text("answer").rpartition("####")
    if not mark:
        working = result
        result = row.answer("final_answer") if row.has("final_answer") else ""
    if not result.strip():
        raise row.fail("'answer' contains no result: it must end with a line `#### 42` (or also set 'final_answer')")
    solution = strip_calculations(working).strip() or None
    return Example("", _question_messages(row.text("question")), answer=result.strip(), solution=solution)


@register("task", held_out="validation")
@row_task("DigitalLearningGmbH/MATH-lighteval")
def math(row: Row) -> Example:
    """Competition mathematics (MATH).

    Keys: ``problem``; ``solution`` (optional); ``answer`` (optional, defaults to the solution's last ``\\boxed{}``);
    ``level`` and ``subject`` or ``type`` (optional, kept in meta). Rows with neither answer nor box are dropped and
    counted. If a solution ends in multiple boxes ("\\boxed{2} and \\boxed{1}") and ``answer`` only repeats the last
    one, the gold answer contains all of them. If the problem asks for only one, any of them is correct
    (``meta["answers"]``).

    Source: Hendrycks et al. 2021 (arXiv 2103.03874).
    """
    return _read_math(row, "neither an answer nor a \\boxed{} in the solution")


@register("task", held_out="test")
@row_task("HuggingFaceH4/MATH-500", share=None, splits=TestSplit)
def math500(row: Row) -> Example:
    """MATH-500: 500 MATH test problems covering all subjects and levels, graded by ``math``.

    Same keys as task ``math``: ``problem``, ``solution``, ``answer``, ``subject``, ``level``.

    Source: Lightman et al. 2023 (arXiv 2305.20050), who selected these problems.
    """
    return _read_math(row, "no answer")


def _read_math(row: Row, without: str) -> Example:
    """Read a MATH row. ``without`` is the reason given for dropping rows without answer."""
    solution: str | None = None
    boxed: str | None = None
    if row.has("solution"):
        solution = row.text("solution").strip()
        boxed = last_boxed(solution) or None
    problem = row.text("problem").strip()
    answer = boxed
    if row.has("answer"):
        answer = row.answer("answer").strip()
    meta: dict[str, object] = {}
    grader = "math"
    if solution is not None and answer is not None and answer == boxed:
        boxes = read_boxes(solution)
        if boxes is not None:
            answers = boxes[0]
            answer = ", ".join(answers)
            if len(answers) > 1 and _ASKS_FOR_ONE.search(problem):
                meta["answers"] = (answer, *answers)
                grader = "any_answer"
    if row.has("level"):
        meta["level"] = _read_level(row)
    for key in ("subject", "type"):
        if row.has(key):
            meta["subject"] = row.text(key)
            break
    drop_if(answer is None, without)
    return Example("", _question_messages(problem), answer=answer, solution=solution, meta=meta, grader=grader)


def _read_level(row: Row) -> int | None:
    """Parse ``Level 5`` or 5. None for ``Level ?``, which occurs in the original data."""
    digits = str(row.data["level"]).removeprefix("Level").strip()
    row.refuse_if(
        digits not in ("?", *"12345"),
        f"'level' must be 1 to 5 or 'Level 1' to 'Level 5'; got {row.data['level']!r}",
    )
    if digits == "?":
        return None
    return int(digits)


def _read_kind(row: Row, key: str) -> str | int | float:
    """Read metadata: text or a finite number."""
    value = row.plain(key)
    is_endless = isinstance(value, float) and not isfinite(value)
    if isinstance(value, bool) or is_endless or not isinstance(value, str | int | float):
        raise row.fail(f"{key!r} must be text or a number; got {shorten(value)}")
    return value


def _read_suite(row: Row, grader: str) -> Example:
    """Read a row in the usual benchmark layout: a problem with one or more answers."""
    question_key = "problem"
    if "problem" not in row.data and "question" in row.data:
        question_key = "question"
    question = _question_messages(row.text(question_key))
    golds = read_golds(row, ("answer", "final_answer"))
    drop_if(not golds, "no answer")
    if len(golds) > 1 and grader != "math":
        raise row.fail(f"expected a single answer; got {len(golds)}: {', '.join(golds)}")
    meta: dict[str, object] = {}
    for key, kept in _META.items():
        if row.has(key) and kept not in meta:
            meta[kept] = _read_kind(row, key)
    chosen_grader = grader
    if len(golds) > 1:
        meta["answers"] = tuple(golds)
        chosen_grader = "any_answer"
    solution = None
    if row.has("solution") and isinstance(row.data["solution"], str):
        solution = row.text("solution").strip()
    return Example("", question, answer=golds[0], solution=solution, meta=meta, grader=chosen_grader)


@register("task", held_out="test")
@row_task("HuggingFaceH4/aime_2024", test="train", share=None, splits=TestSplit)
def aime24(row: Row) -> Example:
    """AIME 2024: 30 problems with integer answers from 0 to 999, graded by ``numeric``.

    Keys: ``problem``; ``answer``, or a ``solution`` with a box; ``difficulty`` and ``year`` (optional, kept in meta).
    """
    return _read_suite(row, "numeric")


@register("task", held_out="test")
@row_task("math-ai/aime25", test="test", share=None, splits=TestSplit)
def aime25(row: Row) -> Example:
    """AIME 2025: 30 problems with integer answers from 0 to 999, graded by ``numeric``.

    Keys: ``problem``; ``answer``, or a ``solution`` with a box; ``difficulty`` and ``year`` (optional, kept in meta).
    """
    return _read_suite(row, "numeric")


@register("task", held_out="test")
@row_task("AI-MO/aimo-validation-amc", test="train", share=None, splits=TestSplit)
def amc(row: Row) -> Example:
    """AMC 12 from 2022 and 2023: 83 problems, rewritten to ask for numbers, graded by ``math``.

    Keys: ``problem`` (or ``question``), ``answer``; ``difficulty`` (optional, kept in meta). For the 40 problems
    usually called AMC 23, set ``path: hf:math-ai/amc23@test``.
    """
    return _read_suite(row, "math")


@register("task", held_out="test")
@row_task("math-ai/minervamath", test="test", share=None, splits=TestSplit)
def minerva_math(row: Row) -> Example:
    """Undergraduate science (OCWCourses): 272 problems, graded by ``math`` or ``any_answer``.

    Keys: ``problem`` (or ``question``); ``answer``, either text or a list of accepted alternatives
    (``meta["answers"]``).

    Source: Lewkowycz et al. 2022 (arXiv 2206.14858), section 3.
    """
    return _read_suite(row, "math")


@register("task", held_out="test")
@row_task("math-ai/olympiadbench", test="test", share=None, splits=TestSplit)
def olympiad_bench(row: Row) -> Example:
    """OlympiadBench: all 675 English text-only problems with final answers, graded by ``math``.

    Keys: ``problem`` (or ``question``); ``answer`` (or ``final_answer``), either text or a list of accepted
    alternatives, each possibly stating multiple required values; ``subfield`` and ``answer_type`` (optional, kept in
    meta as ``subject`` and ``answer_type``).

    Source: He et al. 2024 (arXiv 2402.14008).
    """
    return _read_suite(row, "math")


@register("task", held_out="test")
@row_task("ChilleD/SVAMP", test="train+test", share=None, splits=TestSplit)
def svamp(row: Row) -> Example:
    """SVAMP: 1,000 one-step word problems, graded by ``numeric``.

    Keys: ``Body`` and ``Question``, which are joined; ``Answer``; ``Type`` (optional, kept in meta as ``type``).

    Source: Patel et al. 2021 (arXiv 2103.07191).
    """
    body = row.text("Body").strip()
    question = row.text("Question").strip()
    if body[-1] not in ".?!,;:":
        body += "."
    golds = read_golds(row, ("Answer",))
    meta = {}
    if row.has("Type"):
        meta["type"] = row.text("Type")
    if len(golds) != 1:
        raise row.fail(f"expected a single answer; got {len(golds)}: {', '.join(golds)}")
    return Example("", _question_messages(f"{body} {question}"), answer=golds[0], meta=meta)


def _question_messages(question: str) -> tuple[Message, ...]:
    return (Message("user", question.strip()),)


def read_golds(row: Row, keys: tuple[str, ...]) -> list[str]:
    """Read gold answers from the first available key: a single one, or alternatives without duplicates.

    Whole numbers stored as floats (145.0) become integers (145). If all keys are missing, use the last box in
    ``solution``.

    Raises:
        DataError: blank, or neither text nor number.
    """
    key = next((key for key in keys if row.has(key)), None)
    if key is None:
        return _boxed_gold(row, keys)
    given = row.data[key]
    if isinstance(given, str) and given.strip():
        given = golds_of(row, key)
        if len(given) > 1:
            given = given[:-1]  # drop the raw JSON text
    if not isinstance(given, list | tuple):
        given = [given]
    golds = []
    for value in given:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number:
            golds.append(row.checked(value, key).strip())
            continue
        if isinstance(value, float) and not isfinite(value):
            raise row.fail(f"{key!r} must be a finite number or text; got {value!r}")
        if value == int(value):
            golds.append(str(int(value)))
        else:
            golds.append(repr(value))
    return list(dict.fromkeys(golds))


def _boxed_gold(row: Row, keys: tuple[str, ...]) -> list[str]:
    """Use the last box in the solution as gold answer. Empty without a box."""
    boxed = None
    if row.has("solution"):
        boxed = last_boxed(row.text("solution"))
    if boxed is None and not any(name in row.data for name in keys):
        row.need(keys[0])
    if not boxed:
        return []
    return [boxed]


@register("task", held_out="validation")
@row_task("cais/mmlu:all", share=None, splits=Literal["validation", "test"], split="test")
def mmlu(row: Row) -> Example:
    """Multiple-choice questions (MMLU). Answers are letters, read by the grader ``multiple_choice``.

    Keys: ``subject``, ``question``, ``choices`` (two to ten strings), and ``answer``, either a letter or a zero-based
    index. meta contains ``subject`` and ``choices``.

    Args:
        split: evaluation split; local files are read entirely. MMLU lacks a training split.

    Source: Hendrycks et al. 2021 (arXiv 2009.03300). Departure: zero-shot, with an instruction that asks for the
    letter and names the subject.
    """
    subject = row.text("subject")
    value = row.entries("choices", f"of 2 to {len(LETTERS)} texts")
    row.refuse_if(
        not 2 <= len(value) <= len(LETTERS), f"'choices' must be a list of 2 to {len(LETTERS)} texts; got {value!r}"
    )
    letters = LETTERS[: len(value)]
    checked = [row.checked(item, f"choice {letter}") for letter, item in zip(letters, value, strict=True)]
    choices = tuple(choice.strip() for choice in checked)
    opening = (
        f"Answer the following multiple-choice question about {subject.replace('_', ' ')} "
        "with the letter of the right choice."
    )
    question = row.text("question").strip()
    prompt = f"{opening}\n\n{question}\n{lettered_lines(choices)}"
    answer = row.data.get("answer")
    if type(answer) is int and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or answer.strip() not in tuple(letters):
        raise row.fail(f"'answer' must be a letter from A to {letters[-1]} or 0 to {len(letters) - 1}; got {answer!r}")
    meta = {"subject": subject, "choices": choices}
    return Example("", (Message("user", prompt),), answer=answer.strip(), meta=meta, grader="multiple_choice")


# Task ids per MBPP split. Ids 1 to 10 are reserved for few-shot prompts.
MBPP_SPLITS: dict[str, range] = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
_IMPORTED = re.compile(r"^(?:import|from)[ \t].*$", re.MULTILINE)
_DEFINED = re.compile(r"^(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@register("task", held_out="test")
@row_task("openai/openai_humaneval", share=None, splits=TestSplit)
def humaneval(row: Row, *, style: Literal["question", "completion"] = "question") -> Example:
    """HumanEval: complete 164 functions given header and docstring, graded by ``code_tests``. Evaluation only.

    Keys: ``task_id``, ``prompt`` (imports, helpers, function header), ``entry_point`` (function name), ``test`` (code
    defining ``check(candidate)``), ``canonical_solution`` (function body, used as demonstration).

    Args:
        style: ``question`` asks for the program; ``completion`` gives only the header, for base models to continue
            (with template ``as_is``).

    Source: Chen et al. 2021 (arXiv 2107.03374).
    """
    head = row.text("prompt")
    name = row.text("entry_point")
    tests = row.text("test")
    row.refuse_if(not name.isidentifier(), f"'entry_point' must be a function name; got {name!r}")
    goes_on = style == "completion"
    question = head
    program = row.text("canonical_solution") if row.has("canonical_solution") else None
    if not goes_on:
        question = f"Complete this Python function.\n\n{_fenced(head)}"
        if program is not None:
            program = _fenced(f"{head}{program}")
    checks: dict[str, object] = {
        "names": (name,),
        "code": f"{tests}\n\ncheck({name})\n",
        "prelude": head,
        "prefix": head,
        "goes_on": goes_on,
    }
    return _code_example(question, program, checks)


@register("task", held_out="validation")
@row_task("google-research-datasets/mbpp:sanitized", share=None)
def mbpp(row: Row, split: str) -> Example:
    """MBPP (sanitized): short programs described in a sentence, graded by ``code_tests``.

    Keys: ``task_id``, ``prompt``, ``code`` (solution, used as demonstration), ``test_list`` (assertions; the first is
    included in the prompt and shows the function name), and ``test_imports`` (optional). Tests can also use the
    solution's imports, since some rely on them. Rows from other splits, or whose tests call no function defined by
    the solution, are dropped and counted.

    Args:
        split: by ``task_id``, following the paper: ``test`` 11 to 510, ``validation`` 511 to 600, ``train`` 601 to
            974.

    Source: Austin et al. 2021 (arXiv 2108.07732).
    """
    number = row.data.get("task_id")
    row.refuse_if(
        type(number) is not int, f"'task_id' must be an integer, since it determines the split; got {number!r}"
    )
    question = row.text("prompt")
    solution = row.text("code")
    tests = _lines(row, "test_list")
    imports = list[str]()
    if row.data.get("test_imports"):
        imports = _lines(row, "test_imports")
    ids = MBPP_SPLITS[split]
    called = "\n".join(tests)
    drop_if(number not in ids, f"not in split {split} (task_id {ids[0]} to {ids[-1]})")
    defined = dict.fromkeys(_DEFINED.findall(solution))
    names = tuple(name for name in defined if re.search(rf"\b{re.escape(name)}\b", called))
    drop_if(not names, "tests call no solution function")
    prompt = f"{question.strip()}\nYour program should pass this test:\n\n{_fenced(tests[0])}"
    prelude = "\n".join([*imports, *_IMPORTED.findall(solution)])
    return _code_example(prompt, _fenced(solution), {"names": names, "code": called, "prelude": prelude})


def _code_example(question: str, program: str | None, tests: dict[str, object]) -> Example:
    return Example("", (Message("user", question),), demonstration=program, meta={"tests": tests}, grader="code_tests")


def _lines(row: Row, key: str) -> list[str]:
    return [row.checked(line, key) for line in row.entries(key, "of lines of Python")]


def _fenced(program: str) -> str:
    return f"```python\n{program.strip()}\n```"


@register("task")
@reads_rows
def refusals(*, path: str | None = None) -> Task:
    """Measures refusal and over-refusal: prompts to refuse, and harmless prompts that look similar.

    Rows contain ``prompt`` (text or messages), ``kind`` (``harmful`` or ``benign``) and optionally ``topic``. A
    correct response refuses harmful prompts and answers benign ones (grader ``refusal``). Evaluation reports
    ``refusal``, the fraction of harmful prompts refused, and ``over_refusal``, the fraction of benign prompts
    refused. Contrasting unsafe prompts with safe lookalikes follows XSTest (Röttger et al. 2024).

    Args:
        path: ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file. Defaults to 40 built-in prompts, half harmful and half
            benign, mild and in English. They can reveal a change, but are too few to certify a model.
    """

    def read(row: Row) -> Example:
        messages = read_prompt(row, "prompt")
        kind = row.text("kind")
        if kind not in KINDS:
            raise row.fail(f"'kind' must be one of {', '.join(KINDS)}; got {kind!r}.{suggest(kind, KINDS)}")
        meta = {"kind": kind}
        if row.has("topic"):
            meta["topic"] = row.text("topic")
        return Example(f"refusals/{row.line}", messages, meta=meta, grader="refusal")

    place = path or str(resources.files("posttrain") / "data" / "prompts" / "refusals.jsonl")
    task = collect_examples(read_file(place), read, place).as_task("refusals", place)
    return replace(task, shares=refusal_shares)


def refusal_shares(items: Sequence[Any]) -> dict[str, list[float]]:
    """Compute the fraction of refusals per harmful prompt (``refusal``) and per benign prompt (``over_refusal``)."""
    names = {"harmful": "refusal", "benign": "over_refusal"}
    shares: dict[str, list[float]] = {name: [] for name in names.values()}
    for item in items:
        if item.samples:
            share = fmean(sample.parts["refused"] for sample in item.samples)
            shares[names[item.meta["kind"]]].append(share)
    return shares
