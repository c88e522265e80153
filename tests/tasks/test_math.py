"""MATH in its layouts, from small files made here and, where there are some, from real rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import DataError
from posttrain.graders.answers import last_boxed, same_answer
from posttrain.graders.grading import Submission, grade
from posttrain.tasks.verifiable.mathematics import math

SOLUTION = "First $\\boxed{1}$, no: it is $\\boxed{\\left\\{\\frac{1}{2}, 3\\right\\}}$."


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_answer_is_the_last_box_of_the_solution(tmp_path: Path) -> None:
    row = {"problem": " Find it. ", "solution": SOLUTION, "level": "Level 5", "type": "Algebra"}
    (example,) = math(split="test", path=write(tmp_path / "x.jsonl", [row])).examples
    assert example.answer == "\\left\\{\\frac{1}{2}, 3\\right\\}"
    assert example.messages[0].content == "Find it."
    assert example.solution == SOLUTION
    assert example.meta == {"level": 5, "subject": "Algebra"}
    assert (example.id, example.grader) == ("math/test/1", "math")


def test_an_answer_of_its_own_comes_first(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "solution": SOLUTION, "answer": "7", "level": 2, "subject": "Number Theory"},
        {"problem": "p", "solution": None, "answer": "8", "level": "Level ?"},
        {"problem": "p", "answer": 9},
    ]
    task = math(split="test", path=write(tmp_path / "x.jsonl", rows))
    assert [e.answer for e in task.examples] == ["7", "8", "9"]
    assert [e.solution for e in task.examples] == [SOLUTION, None, None]
    assert [e.meta for e in task.examples] == [{"level": 2, "subject": "Number Theory"}, {"level": None}, {}]


def test_all_boxes_that_make_the_answer(tmp_path: Path) -> None:
    """Where the problem asks for only one of them, each is right."""
    both = "so $x = \\boxed{-2}$ or $x = \\boxed{1}.$"
    rows = [
        {"problem": "Find all.", "solution": both, "answer": "1"},
        {"problem": "Find all.", "solution": both},
        {"problem": "Find all.", "solution": both, "answer": "-2"},
        {"problem": "Find only one of the two, not both.", "solution": both},
        {"problem": "Find it.", "solution": "It is $\\boxed{0.5}$ or $\\boxed{1/2}$."},
    ]
    examples = math(split="test", path=write(tmp_path / "x.jsonl", rows)).examples
    assert [example.answer for example in examples] == ["-2, 1", "-2, 1", "-2", "-2, 1", "1/2"]
    assert [example.grader for example in examples] == ["math", "math", "math", "any_answer", "math"]
    assert examples[3].meta == {"answers": ("-2, 1", "-2", "1")}


def test_rows_without_any_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "answer": "1"},
        {"problem": "b", "answer": None, "solution": None},
        {"problem": "c", "solution": "it has \\boxed{2 no end"},
        {"problem": "d", "answer": "4"},
    ]
    task = math(split="test", path=write(tmp_path / "x.jsonl", rows))
    assert [e.id for e in task.examples] == ["math/test/1", "math/test/4"]
    assert task.dropped == {"no answer and no \\boxed{} in the solution": 2}
    with pytest.raises(DataError, match="no row can be used: 1 × no answer and no"):
        math(split="test", path=write(tmp_path / "y.jsonl", rows[1:2]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "the key 'problem' is missing"),
        ({"problem": "", "answer": "1"}, "'problem' is empty"),
        ({"problem": "p", "answer": " "}, "'answer' is empty"),
        ({"problem": "p", "answer": ["1"]}, "'answer' must be text"),
        ({"problem": "p", "answer": "1", "solution": 5}, "'solution' must be text"),
        ({"problem": "p", "answer": "1", "level": "hard"}, "'level' must be 1 to 5 .*; got 'hard'"),
        ({"problem": "p", "answer": "1", "level": 6}, "'level' must be 1 to 5"),
        ({"problem": "p", "answer": "1", "subject": 5}, "'subject' must be text"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        math(path=write(tmp_path / "x.jsonl", [{"problem": "p", "answer": "1"}, row]))


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
@pytest.mark.parametrize(
    ("name", "num_examples", "num_dropped"), [("math_train", 7466, 2), ("math_test", 4700, 0), ("math500", 500, 0)]
)
def test_real_rows(name: str, num_examples: int, num_dropped: int) -> None:
    path = str(Path(os.environ["POSTTRAIN_DATA"]) / "math" / f"{name}.jsonl.gz")
    task = math(split="test", path=path)
    assert len(task.examples) == num_examples
    assert sum(task.dropped.values()) == num_dropped
    for example in task.examples:
        assert example.answer is not None
        if example.solution is not None:
            box = last_boxed(example.solution)
            assert box is not None
            assert same_answer(example.answer, box) or example.answer.endswith(f", {box}")
    parts = [math(split=split, path=path).examples for split in ("train", "validation")]  # type: ignore[arg-type]
    assert sum(map(len, parts)) == num_examples


@needs_data
def test_official_solutions_are_right_against_their_own_gold() -> None:
    path = str(Path(os.environ["POSTTRAIN_DATA"]) / "math" / "math_test.jsonl.gz")
    examples = math(split="test", path=path).examples
    submissions = [Submission(e.solution or "", last_boxed(e.solution or ""), e.answer, e.meta) for e in examples]
    assert {verdict.outcome for verdict in grade("any_answer", submissions)} == {"right"}
