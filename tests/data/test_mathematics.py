"""The mathematics sets in their layouts: small files made here and, where there are some, real rows."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sample_rows import fake_datasets, needs_data, real_file, write_rows

from posttrain.data.base import Task, build_task
from posttrain.errors import DataError
from posttrain.graders.answers import last_boxed, parse_quantity, same_answer
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.recipes.sections import Component
from posttrain.types import Example, Message
from refusing import refuses

SUITES = ("math500", "aime24", "aime25", "amc", "minerva_math", "olympiad_bench")
GSM8K = {
    "question": "How many? ",
    "answer": "He has 48/2 = <<48/2=24>>24.\nThat is 1,024+24=<<1024+24=1048>>1,048.\n#### 1,048",
}
SOLUTION = "First $\\boxed{1}$, no: it is $\\boxed{\\left\\{\\frac{1}{2}, 3\\right\\}}$."


def read(name: str, folder: Path, *rows: dict[str, Any], **options: Any) -> Task:
    path = write_rows(folder / "x.jsonl", rows)
    return build_task(Component(name=name, path=path, **({"split": "test"} | options)))


def test_gsm8k_row_gives_solution_without_notes_and_result(tmp_path: Path) -> None:
    task = read("gsm8k", tmp_path, GSM8K)
    solution = "He has 48/2 = 24.\nThat is 1,024+24=1,048."
    request = (Message("user", "How many?"),)
    assert list(task.examples) == [Example("gsm8k/test/1", request, answer="1,048", solution=solution)]
    assert (task.name, task.split, task.dropped) == ("gsm8k", "test", {})
    rows = [{"question": "q", "answer": "2+2=<<2+2=4>>4", "final_answer": 4}, {"question": "q", "answer": "#### 5"}]
    first, second = read("gsm8k", tmp_path, *rows).examples
    assert (first.answer, first.solution, second.answer, second.solution) == ("4", "2+2=4", "5", None)


def test_math_answer_is_the_last_box_or_its_own(tmp_path: Path) -> None:
    rows = [
        {"problem": " Find it. ", "solution": SOLUTION, "level": "Level 5", "type": "Algebra"},
        {"problem": "p", "solution": SOLUTION, "answer": "7", "level": 2, "subject": "Number Theory"},
        {"problem": "p", "solution": None, "answer": "8", "level": "Level ?"},
        {"problem": "p", "answer": 9},
    ]
    examples = read("math", tmp_path, *rows).examples
    assert (examples[0].id, examples[0].grader) == ("math/test/1", "math")
    assert examples[0].messages == (Message("user", "Find it."),)
    assert [e.answer for e in examples] == ["\\left\\{\\frac{1}{2}, 3\\right\\}", "7", "8", "9"]
    assert [e.solution for e in examples] == [SOLUTION, SOLUTION, None, None]
    subjects = [{"level": 5, "subject": "Algebra"}, {"level": 2, "subject": "Number Theory"}, {"level": None}, {}]
    assert [e.meta for e in examples] == subjects


def test_math_several_boxes_are_the_answer_and_each_is_right_where_one_is_requested(tmp_path: Path) -> None:
    both = "so $x = \\boxed{-2}$ or $x = \\boxed{1}.$"
    rows = [
        {"problem": "Find all.", "solution": both, "answer": "1"},
        {"problem": "Find all.", "solution": both},
        {"problem": "Find all.", "solution": both, "answer": "-2"},
        {"problem": "Find only one of the two, not both.", "solution": both},
        {"problem": "Find it.", "solution": "It is $\\boxed{0.5}$ or $\\boxed{1/2}$."},
    ]
    examples = read("math", tmp_path, *rows).examples
    assert [example.answer for example in examples] == ["-2, 1", "-2, 1", "-2", "-2, 1", "1/2"]
    assert [example.grader for example in examples] == ["math", "math", "math", "any_answer", "math"]
    assert examples[3].meta == {"answers": ("-2, 1", "-2", "1")}


def test_math_rows_without_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "answer": "1"},
        {"problem": "b", "answer": None, "solution": None},
        {"problem": "c", "solution": "it has \\boxed{2 no end"},
        {"problem": "d", "answer": "4"},
    ]
    task = read("math", tmp_path, *rows)
    assert [e.id for e in task.examples] == ["math/test/1", "math/test/4"]
    assert task.dropped == {"neither an answer nor a \\boxed{} in the solution": 2}
    with refuses(DataError, "usable rows: 1 ×"):
        read("math", tmp_path, rows[1])


def test_aime_keeps_its_zeros_and_may_have_its_answer_in_the_solution(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": "025", "difficulty": 4.5},
        {"problem": "q", "solution": "thus \\boxed{73}", "year": "2024"},
    ]
    first, second = read("aime24", tmp_path, *rows).examples
    assert (first.answer, first.grader, first.meta, first.solution) == ("025", "numeric", {"difficulty": 4.5}, None)
    assert (second.id, second.answer, second.solution) == ("aime24/test/2", "73", "thus \\boxed{73}")
    assert read("aime25", tmp_path, *rows).examples[0].id == "aime25/test/1"


def test_suite_answers_are_numbers_texts_or_alternatives(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": value} for value in (142.0, -4, 4.25, "1,296")]
    assert [e.answer for e in read("amc", tmp_path, *rows).examples] == ["142", "-4", "4.25", "1,296"]
    rows = [
        {"problem": "p", "answer": ["9.6\n"]},
        {"question": "q", "answer": ["0.01", "0.02\n", "0.01\n"]},
        {"problem": "r", "answer": []},
    ]
    task = read("minerva_math", tmp_path, *rows)
    first, second = task.examples
    assert (first.answer, first.grader, first.meta) == ("9.6", "math", {})
    assert (second.answer, second.grader, second.meta) == ("0.01", "any_answer", {"answers": ("0.01", "0.02")})
    assert second.messages == (Message("user", "q"),)
    assert task.dropped == {"no answer": 1}


def test_olympiad_bench_is_read_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    row = {"question": "q", "final_answer": ["$69$,$84$"], "subfield": "Algebra", "answer_type": "N", "solution": ["s"]}
    (example,) = read("olympiad_bench", tmp_path, row).examples
    assert (example.answer, example.grader, example.solution) == ("$69$,$84$", "math", None)
    assert example.meta == {"subject": "Algebra", "answer_type": "N"}


def test_svamp_joins_body_and_question(tmp_path: Path) -> None:
    rows = [
        {"Body": "He has 2 boxes", "Question": " How many?", "Answer": 145.0, "Type": "Common-Divison"},
        {"Body": "He has 2 boxes. ", "Question": "How many?", "Answer": "3"},
    ]
    first, second = read("svamp", tmp_path, *rows).examples
    assert first.messages == second.messages == (Message("user", "He has 2 boxes. How many?"),)
    assert (first.answer, first.grader, first.meta) == ("145", "numeric", {"type": "Common-Divison"})
    assert second.meta == {}


P = {"problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("gsm8k", {"question": "q"}, "the key 'answer' is missing"),
        ("gsm8k", {"question": "", "answer": "#### 4"}, "'question' is empty"),
        ("gsm8k", {"question": "q", "answer": "just text"}, "no result: it must end with a line `#### 42`"),
        ("math", {"answer": "1"}, "the key 'problem' is missing"),
        ("math", P | {"level": "hard"}, "'level' must be 1 to 5 .*; got 'hard'"),
        ("amc", P | {"answer": True}, "'answer' must be text"),
        ("aime24", P | {"answer": ["1", "2"]}, "expected a single answer; got 2: 1, 2"),
    ],
)
def test_bad_rows_are_refused_with_line_and_key(tmp_path: Path, task: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:1: .*{message}"):
        read(task, tmp_path, row)


def test_hub_names_and_splits_are_those_of_each_set(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"problem": "p", "answer": "#### 1", "question": "q", "Body": "b", "Question": "q", "Answer": 1}
    request = fake_datasets(monkeypatch, lambda: [row, row | {"question": "other"}])
    sizes = [len(build_task(Component(name="gsm8k", split=s)).examples) for s in ("train", "validation", "test")]
    assert sizes == [1, 1, 2]
    for name in SUITES:
        assert len(build_task(Component(name=name)).examples) == 2
    assert build_task(Component(name="amc", path="hf:math-ai/amc23@test")).examples[0].answer == "#### 1"
    assert request == [
        *(("openai/gsm8k", "main", split) for split in ("train", "train", "test")),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("AI-MO/aimo-validation-amc", None, "train"),
        ("math-ai/minervamath", None, "test"),
        ("math-ai/olympiadbench", None, "test"),
        ("math-ai/amc23", None, "test"),
    ]


@needs_data
def test_gsm8k_real_rows_have_the_published_results() -> None:
    train, test = real_file("gsm8k/gsm8k_train"), real_file("gsm8k/gsm8k_test")
    words = [Component(name="gsm8k", path=train, split=split) for split in ("train", "validation")]
    tasks = [build_task(word) for word in (*words, Component(name="gsm8k", path=test, split="test"))]
    assert [len(task.examples) for task in tasks] == [7119, 354, 1019]
    assert len({e.messages for task in tasks for e in task.examples}) == 7473 + 1019
    with gzip.open(test, "rt", encoding="utf-8") as stream:
        finals = [json.loads(line)["final_answer"] for line in stream]
    for example, final in zip(tasks[2].examples, finals, strict=True):
        assert parse_quantity(example.answer or "") == parse_quantity(final)
        assert not re.search(r"<<|>>|####", example.solution or "####")


@needs_data
@pytest.mark.parametrize(("name", "size", "dropped"), [("math_train", 7466, 2), ("math_test", 4700, 0)])
def test_math_real_rows_have_their_boxes_as_answers(name: str, size: int, dropped: int) -> None:
    task = build_task(Component(name="math", split="test", path=real_file(f"math/{name}")))
    assert (len(task.examples), sum(task.dropped.values())) == (size, dropped)
    for example in task.examples[::10]:
        box = last_boxed(example.solution or f"\\boxed{{{example.answer}}}") or "no box"
        assert same_answer(example.answer or "", box) or (example.answer or "").endswith(f", {box}")


@needs_data
@pytest.mark.parametrize("step", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_math_official_solutions_are_right_against_their_own_gold(step: int) -> None:
    examples = build_task(Component(name="math", split="test", path=real_file("math/math_test"))).examples[::step]
    submissions = [Submission(e.solution or "", last_boxed(e.solution or ""), e.answer, e.meta) for e in examples]
    assert {verdict.outcome for verdict in grade_submissions("any_answer", submissions)} == {"right"}


@needs_data
def test_suites_real_rows_are_read_whole() -> None:
    files = {"math500": "math/math500", "minerva_math": "math_evals/minerva"}
    names = ("math500", "aime24", "amc", "minerva_math", "olympiad_bench")
    tasks = {
        name: build_task(Component(name=name, path=real_file(files.get(name, f"math_evals/{name}")))) for name in names
    }
    assert [len(task.examples) for task in tasks.values()] == [500, 30, 83, 272, 675]
    assert all(not task.dropped for task in tasks.values())
    graders = {name: dict(Counter(e.grader for e in task.examples)) for name, task in tasks.items()}
    assert graders["minerva_math"] == {"math": 232, "any_answer": 40}
    assert graders["olympiad_bench"] == {"math": 675}
    assert Counter(e.meta["level"] for e in tasks["math500"].examples) == {1: 43, 2: 90, 3: 105, 4: 128, 5: 134}
    for name in ("aime24", "amc"):
        assert all((e.answer or "").removeprefix("-").isdecimal() for e in tasks[name].examples)
