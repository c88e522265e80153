"""Programs to be written, with tests that grade them: HumanEval and MBPP."""

from __future__ import annotations

import re
from typing import Any, Literal

from posttrain.registry import register
from posttrain.tasks.reader import Dropped, TestSplit, row_task
from posttrain.tasks.reading import Row
from posttrain.types import Example, Message

# The task ids of each split of MBPP; 1 to 10 are for prompts with examples.
MBPP_SPLITS: dict[str, range] = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
_IMPORTED = re.compile(r"^(?:import|from)[ \t].*$", re.MULTILINE)
_DEFINED = re.compile(r"^(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@register("task", held_out="test")
@row_task("openai/openai_humaneval", share=None, splits=TestSplit)
def humaneval(row: Row, *, style: Literal["question", "completion"] = "question") -> Example:
    """HumanEval: 164 functions to be written from head and docstring, graded by ``code_tests``; for evaluation only.

    Keys: ``task_id``, ``prompt`` (imports, helpers, and the head of the function), ``entry_point`` (its name), ``test``
    (the code of ``check(candidate)``), ``canonical_solution`` (the body; becomes the demonstration).

    Args:
        style: ``question`` asks for the program; ``completion`` is the head itself, which a base model goes on from
            (with the template ``as_is``).

    Source: Chen et al. 2021 (arXiv 2107.03374).
    """
    head, name, tests = row.text("prompt"), row.text("entry_point"), row.text("test")
    if not name.isidentifier():
        raise row.fail(f"'entry_point' must be the name of a function; got {name!r}")
    goes_on = style == "completion"
    question = head if goes_on else f"Complete this Python function.\n\n{_fenced(head)}"
    body = row.text("canonical_solution") if row.has("canonical_solution") else None
    program = body if body is None or goes_on else _fenced(f"{head}{body}")
    checks: dict[str, Any] = {"names": (name,), "code": f"{tests}\n\ncheck({name})\n", "prelude": head, "prefix": head}
    return _asking(question, program, checks | {"goes_on": goes_on})


@register("task", held_out="validation")
@row_task("google-research-datasets/mbpp:sanitized", share=None)
def mbpp(row: Row, split: str) -> Example:
    """MBPP (sanitized): short programs asked for in a sentence, graded by ``code_tests``.

    Keys: ``task_id``, ``prompt``, ``code`` (a solution; becomes the demonstration), ``test_list`` (assertions; the
    first stands in the prompt and names the function), and ``test_imports`` (optional). The tests get the imports of
    the solution too, on which some of them rely. Rows of other splits are dropped and counted, and so are those whose
    tests call no function of the solution.

    Args:
        split: by ``task_id``, as the paper has it: ``test`` 11 to 510, ``validation`` 511 to 600, ``train`` 601 to 974.

    Source: Austin et al. 2021 (arXiv 2108.07732).
    """
    number = row.data.get("task_id")
    if type(number) is not int:
        raise row.fail(f"'task_id' must be an integer, which says the split; got {number!r}")
    question, solution, tests = row.text("prompt"), row.text("code"), _lines(row, "test_list")
    imports = _lines(row, "test_imports") if row.data.get("test_imports") else []
    ids, called = MBPP_SPLITS[split], "\n".join(tests)
    if number not in ids:
        raise Dropped(f"of another split than {split} (task_id {ids[0]} to {ids[-1]})")
    defined = dict.fromkeys(_DEFINED.findall(solution))
    names = tuple(name for name in defined if re.search(rf"\b{re.escape(name)}\b", called))
    if not names:
        raise Dropped("tests call no function of the solution")
    asked = f"{question.strip()}\nYour program should pass this test:\n\n{_fenced(tests[0])}"
    prelude = "\n".join([*imports, *_IMPORTED.findall(solution)])
    return _asking(asked, _fenced(solution), {"names": names, "code": called, "prelude": prelude})


def _asking(question: str, program: str | None, tests: dict[str, Any]) -> Example:
    asked = (Message("user", question),)
    return Example("", asked, demonstration=program, meta={"tests": tests}, grader="code_tests")


def _lines(row: Row, key: str) -> list[str]:
    return [row.checked(line, key) for line in row.entries(key, "of lines of Python")]


def _fenced(program: str) -> str:
    return f"```python\n{program.strip()}\n```"
