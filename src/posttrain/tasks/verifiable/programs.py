"""Programs to be written, with tests that say whether they are right: HumanEval and MBPP."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.errors import DataError
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example, Message

# The task ids of each split of MBPP; 1 to 10 are for prompts with examples.
MBPP_SPLITS: dict[str, range] = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
_IMPORTED = re.compile(r"^(?:import|from)[ \t].*$", re.MULTILINE)
_DEFINED = re.compile(r"^(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@register("task", held_out="test")
@reads_rows
def humaneval(
    *,
    split: Literal["test"] = "test",
    path: str | None = None,
    hub: str = "openai/openai_humaneval",
    style: Literal["question", "completion"] = "question",
) -> Task:
    """HumanEval: 164 functions to be written from head and docstring, graded by ``code_tests``; for evaluation only.

    Keys: ``task_id``, ``prompt`` (imports, helpers, and the head of the function), ``entry_point`` (its name), ``test``
    (the code of ``check(candidate)``), ``canonical_solution`` (the body; becomes the demonstration).

    Args:
        split: there is nothing but a test split.
        style: ``question`` asks for the program; ``completion`` is the head itself, which a base model goes on from
            (with the template ``as_is``).

    Source: Chen et al. 2021 (arXiv 2107.03374).
    """
    rows, place = read_source(path, hub, None, "test")
    return collect(rows, lambda row: _read_humaneval(row, style), place).as_task("humaneval", place, split)


def _read_humaneval(row: Row, style: str) -> Example:
    head, name, tests = row.text("prompt"), row.text("entry_point"), row.text("test")
    if not name.isidentifier():
        raise row.fail(f"'entry_point' must be the name of a function; got {name!r}")
    question = head if style == "completion" else f"Complete this Python function.\n\n```python\n{head.strip()}\n```"
    body = row.text("canonical_solution") if row.has("canonical_solution") else None
    program = None if body is None else (body if style == "completion" else _fenced(f"{head}{body}"))
    checks: dict[str, Any] = {"names": (name,), "code": f"{tests}\n\ncheck({name})\n", "prelude": head, "prefix": head}
    checks["goes_on"] = style == "completion"
    return Example(
        id=f"humaneval/test/{row.number}",
        messages=(Message("user", question),),
        demonstration=program,
        meta={"tests": checks},
        grader="code_tests",
    )


@register("task", held_out="validation")
@reads_rows
def mbpp(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "google-research-datasets/mbpp",
    shown_tests: Annotated[int, Field(ge=1)] = 1,
) -> Task:
    """MBPP (sanitized): short programs asked for in a sentence, graded by ``code_tests``.

    Keys: ``task_id``, ``prompt``, ``code`` (a solution; becomes the demonstration), ``test_list`` (assertions), and
    ``test_imports`` (optional; what the solution imports is there for its tests too, some of which rely on it). Rows of
    other splits are dropped and counted, and so are those whose tests call no function of the solution.

    Args:
        split: by ``task_id``, as the paper has it: ``test`` 11 to 510, ``validation`` 511 to 600, ``train`` 601 to 974.
        hub: name of the data set on the hub (its configuration ``sanitized``).
        shown_tests: how many of the tests stand in the prompt; from the first the model learns the function's name.

    Raises:
        DataError: a missing or malformed file or row, with its line, or no row of the split.

    Source: Austin et al. 2021 (arXiv 2108.07732).
    """
    rows, place = read_source(path, hub, "sanitized", split)
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        number = row.data.get("task_id")
        if not isinstance(number, int) or isinstance(number, bool):
            raise row.fail(f"'task_id' must be an integer, which says the split; got {number!r}")
        example = _read_mbpp(row, split, shown_tests)
        if number not in MBPP_SPLITS[split]:
            dropped["of another split"] += 1
        elif example is None:
            dropped["tests call no function of the solution"] += 1
        else:
            examples.append(example)
    if not examples:
        ids = MBPP_SPLITS[split]
        passed = "".join(f"; {count} {reason}" for reason, count in dropped.items())
        raise DataError(
            place,
            f"no row of the split {split} (task_id {ids[0]} to {ids[-1]}) in it{passed}; "
            f"set task.split to another of {', '.join(MBPP_SPLITS)}, or give a file of MBPP",
        )
    return Task("mbpp", split, examples, dict(dropped))


def _read_mbpp(row: Row, split: str, shown_tests: int) -> Example | None:
    question, solution, tests = row.text("prompt"), row.text("code"), _texts(row, "test_list")
    imports = _texts(row, "test_imports") if row.data.get("test_imports") else []
    called = "\n".join(tests)
    defined = dict.fromkeys(_DEFINED.findall(solution))
    names = tuple(name for name in defined if re.search(rf"\b{re.escape(name)}\b", called))
    if not names:
        return None
    shown = tests[:shown_tests]
    said = "this test" if len(shown) == 1 else "these tests"
    asked = f"{question.strip()}\nYour program should pass {said}:\n\n" + _fenced("\n".join(shown))
    return Example(
        id=f"mbpp/{split}/{row.number}",
        messages=(Message("user", asked),),
        demonstration=_fenced(solution),
        meta={
            "tests": {"names": names, "code": called, "prelude": "\n".join([*imports, *_IMPORTED.findall(solution)])}
        },
        grader="code_tests",
    )


def _texts(row: Row, key: str) -> list[str]:
    """A list of texts, with at least one.

    Raises:
        DataError: something else.
    """
    return [row.checked(line, key) for line in row.entries(key, "of lines of Python")]


def _fenced(program: str) -> str:
    return f"```python\n{program.strip()}\n```"
