"""Gold answers that are lists, objects, or the JSON text of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_rows import write_rows

from posttrain.data.jsonl import jsonl
from posttrain.errors import DataError, UsageError
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.types import Example
from refusing import refuses


def read(folder: Path, gold: Any, **options: Any) -> Example:
    rows = [{"question": "q?", "answer": gold}]
    return jsonl(path=write_rows(folder / "x.jsonl", rows), split="all", **options).examples[0]


def outcome(example: Example, answer: str) -> str:
    return grade_submissions(example.grader, [Submission(answer, answer, example.answer, example.meta)])[0].outcome


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ('["12"]', ["12", "12.0"], ["13"]),
        ('["12", "a dozen"]', ["12", "a dozen", '["12", "a dozen"]'], ["13", "a"]),
        (["12", "a dozen"], ["12", "A dozen"], ["13"]),
        ([12], ["12"], ["13"]),
        ("[34]", ["34"], ["35"]),
        ("[1, 2]", ["[1,2]"], ["1", "(1,2)"]),  # an interval
        ('"yes"', ["yes", "Yes"], ["no"]),
        ("true", ["true", "True"], ["false"]),
        ({"value": "Paris", "aliases": ["City of Light"]}, ["Paris", "city of light"], ["Rome"]),
        ({"text": ["in 1900"], "answer_start": [4]}, ["in 1900"], ["in 1901"]),
        ('{"answer": 12}', ["12", '{"answer": 12}'], ["13"]),
        ('{"a": 1, "b": "x"}', ['{"b":"x","a":1}'], ['{"b":"x","a":2}', "1"]),
        ("[not JSON", ["[not JSON"], ["not"]),
    ],
)
def test_gold_that_is_json_is_read_as_what_it_says(
    tmp_path: Path, gold: Any, right: list[str], wrong: list[str]
) -> None:
    example = read(tmp_path, gold)
    assert {answer: outcome(example, answer) for answer in right} == dict.fromkeys(right, "right")
    assert {answer: outcome(example, answer) for answer in wrong} == dict.fromkeys(wrong, "wrong")


@pytest.mark.parametrize("gold", [[], [True], [None], {"a": 1, "b": 2}, [["x"]], float("inf")])
def test_gold_of_another_shape_is_refused(tmp_path: Path, gold: Any) -> None:
    with refuses(DataError, "'answer'"):
        read(tmp_path, gold)


def test_several_golds_and_a_grader_of_one_are_refused(tmp_path: Path) -> None:
    with refuses(UsageError, "any_answer"):
        read(tmp_path, '["12", "a dozen"]', grader="exact")
    assert read(tmp_path, '["12", "a dozen"]', grader="any_answer").grader == "any_answer"
    assert read(tmp_path, '["12"]', grader="exact").grader == "exact"


def test_column_called_answers_changes_no_grader(tmp_path: Path) -> None:
    rows = [{"question": "q?", "answer": "1", "answers": ["2", "3"]}]
    (example,) = jsonl(path=write_rows(tmp_path / "x.jsonl", rows), split="all", choices_key="").examples
    assert (example.answer, example.grader) == ("1", "numeric")
