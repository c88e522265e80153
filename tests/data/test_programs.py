"""HumanEval and MBPP: rows become questions with tests, and their own solutions pass them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_rows import needs_data, write_rows

from posttrain.data.verifiable.suites import humaneval, mbpp
from posttrain.errors import DataError
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.graders.sandbox.sandbox import refusal
from posttrain.types import Example
from refusing import refuses

KIND = "process" if refusal("bubblewrap") else "bubblewrap"
HELPER = "from typing import List\n\n\ndef helper(n):\n    return n + 1\n\n\n"
HEAD = HELPER + 'def total(items: List[int]) -> int:\n    """Add."""\n'
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": HEAD,
    "entry_point": "total",
    "canonical_solution": "    return sum(items)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    import random\n    for n in range(3):\n"
    "        assert candidate([n, 1]) == helper(n)\n    assert abs(candidate([0.1, 0.2]) - 0.3) < 1e-6\n",
}
MBPP = {
    "task_id": 601,
    "prompt": "Write a function that finds the shared elements.",
    "code": "import sys\ndef shared(a, b):\n  return tuple(set(a) & set(b))",
    "test_imports": ["import math"],
    "test_list": ["assert set(shared((1, 2), (2, 3))) == {2}", "assert math.isclose(len(shared((), ())), 0) and sys"],
}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    return write_rows(folder / "rows.jsonl", rows)


def outcomes(examples: Sequence[Example], texts: Sequence[str | None]) -> list[str]:
    request = [Submission(t or "", None, None, e.meta) for e, t in zip(examples, texts, strict=True)]
    assert {example.grader for example in examples} == {"code_tests"}
    return [one.outcome for one in grade_submissions("code_tests", request, {"sandbox": KIND, "timeout_seconds": 60})]


def test_a_row_of_humaneval(tmp_path: Path) -> None:
    path = write(tmp_path, HUMANEVAL)
    (example,) = humaneval(path=path).examples
    assert (example.id, example.answer) == ("humaneval/test/1", None)
    assert example.messages[0].content == f"Complete this Python function.\n\n```python\n{HEAD.strip()}\n```"
    assert example.demonstration == f"```python\n{HEAD}    return sum(items)\n```"
    (went_on,) = humaneval(path=path, style="completion").examples
    assert (went_on.messages[0].content, went_on.demonstration) == (HEAD, "    return sum(items)\n")
    body = "```\ndef total(items):\n    return {}\n```"
    examples = [example, example, example, example, went_on, went_on]
    texts = [example.demonstration, body.format("sum(items)"), body.format("3"), "", went_on.demonstration, "    pass"]
    assert outcomes(examples, texts) == ["right", "right", "wrong", "no_answer", "right", "wrong"]


def test_a_row_of_mbpp(tmp_path: Path) -> None:
    path = write(tmp_path, MBPP, MBPP | {"task_id": 11}, MBPP | {"task_id": 602, "test_list": ["assert other(1)"]})
    task = mbpp(path=path)
    (example,) = task.examples
    other = "not in split train (task_id 601 to 974)"
    assert task.dropped == {other: 1, "tests call no solution function": 1}
    assert example.messages[0].content == (
        "Write a function that finds the shared elements.\nYour program should pass this test:\n\n"
        "```python\nassert set(shared((1, 2), (2, 3))) == {2}\n```"
    )
    only_the_first = "```\ndef shared(a, b): return [2]\n```"
    assert outcomes([example] * 3, [example.demonstration, only_the_first, "Yes."]) == ["right", "wrong", "no_answer"]
    assert [e.id for e in mbpp(path=path, split="test").examples] == ["mbpp/test/2"]
    with refuses(DataError, "task_id"):
        mbpp(path=path, split="validation")


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (humaneval, HUMANEVAL | {"entry_point": "a b"}, "'entry_point'"),
        (humaneval, {"prompt": "x"}, "'entry_point'"),
        (mbpp, MBPP | {"test_list": []}, "'test_list'"),
        (mbpp, MBPP | {"test_list": [1]}, "'test_list'"),
        (mbpp, MBPP | {"task_id": "601"}, "'task_id'"),
        (mbpp, MBPP | {"code": None}, "'code'"),
    ],
)
def test_rows_that_cannot_be_used(read: Any, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with refuses(DataError, "rows.jsonl:1") as error:
        read(path=write(tmp_path, row))
    assert message in str(error.value)


@pytest.mark.slow
@needs_data
def test_the_solutions_of_the_data_sets_pass_and_empty_ones_do_not() -> None:
    splits = [mbpp(split=split) for split in ("train", "validation", "test")]  # type: ignore[arg-type]
    for examples in (humaneval().examples, [example for task in splits for example in task.examples]):
        assert Counter(outcomes(examples, [e.demonstration for e in examples])) == {"right": len(examples)}
        empty = ["\n".join(f"def {name}(*a, **k): pass" for name in e.meta["tests"]["names"]) for e in examples]
        assert Counter(outcomes(examples, empty)) == {"wrong": len(examples)}
