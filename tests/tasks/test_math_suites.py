"""The mathematics suites in their layouts: small files made here and, where there are some, real rows."""

from __future__ import annotations

import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, RecipeError
from posttrain.tasks.base import Task
from posttrain.tasks.verifiable.mathematics import aime24, aime25, amc, math500, minerva_math, olympiad_bench, svamp
from posttrain.types import Message

SUITES = ("math500", "aime24", "aime25", "amc", "minerva_math", "olympiad_bench", "svamp")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_math500_is_read_as_math(tmp_path: Path) -> None:
    row = {
        "problem": " p ",
        "solution": "so \\boxed{2}",
        "answer": "2",
        "subject": "Algebra",
        "level": 3,
        "unique_id": "x",
    }
    (example,) = math500(path=write(tmp_path / "x.jsonl", [row])).examples
    assert (example.id, example.messages, example.answer) == ("math500/test/1", (Message("user", "p"),), "2")
    assert (example.solution, example.meta, example.grader) == (
        "so \\boxed{2}",
        {"subject": "Algebra", "level": 3},
        "math",
    )


def test_aime_keeps_its_zeros_and_may_have_its_answer_in_the_solution(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": "025", "difficulty": 4.5},
        {"problem": "q", "solution": "thus \\boxed{73}", "year": "2024"},
    ]
    first, second = aime24(path=write(tmp_path / "x.jsonl", rows)).examples
    assert (first.answer, first.grader, first.meta, first.solution) == ("025", "numeric", {"difficulty": 4.5}, None)
    assert (second.id, second.answer, second.solution) == ("aime24/test/2", "73", "thus \\boxed{73}")
    assert aime25(path=write(tmp_path / "y.jsonl", rows)).examples[0].id == "aime25/test/1"


def test_whole_numbers_are_written_as_such(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": value} for value in (142.0, -4, 4.25, "1,296")]
    assert [e.answer for e in amc(path=write(tmp_path / "x.jsonl", rows)).examples] == ["142", "-4", "4.25", "1,296"]


def test_alternatives(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": ["9.6\n"]},
        {"question": "q", "answer": ["0.01", "0.02\n", "0.01\n"]},
        {"problem": "r", "answer": []},
    ]
    task = minerva_math(path=write(tmp_path / "x.jsonl", rows))
    first, second = task.examples
    assert (first.answer, first.grader, first.meta) == ("9.6", "math", {})
    assert (second.answer, second.grader, second.meta) == ("0.01", "any_answer", {"answers": ("0.01", "0.02")})
    assert second.messages == (Message("user", "q"),)
    assert task.dropped == {"no answer": 1}


def test_olympiad_bench_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "final_answer": ["$69$,$84$"],
        "subfield": "Algebra",
        "answer_type": "Numerical",
        "solution": ["s"],
    }
    (example,) = olympiad_bench(path=write(tmp_path / "x.jsonl", [row])).examples
    assert (example.answer, example.grader, example.solution) == ("$69$,$84$", "math", None)
    assert example.meta == {"subject": "Algebra", "answer_type": "Numerical"}


def test_svamp_joins_body_and_question(tmp_path: Path) -> None:
    rows = [
        {"Body": "He has 2 boxes", "Question": " How many?", "Answer": 145.0, "Type": "Common-Divison"},
        {"Body": "He has 2 boxes. ", "Question": "How many?", "Answer": "3"},
    ]
    first, second = svamp(path=write(tmp_path / "x.jsonl", rows)).examples
    assert first.messages == second.messages == (Message("user", "He has 2 boxes. How many?"),)
    assert (first.answer, first.grader, first.meta) == ("145", "numeric", {"type": "Common-Division"})
    assert second.meta == {}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (amc, {"problem": "p"}, "the key 'answer' is missing"),
        (amc, {"answer": 1}, "the key 'problem' is missing"),
        (amc, {"problem": "p", "answer": True}, "'answer' must be text"),
        (amc, {"problem": "p", "answer": [" "]}, "'answer' is empty"),
        (aime24, {"problem": "p", "answer": ["1", "2"]}, "one answer is expected; got 2: 1, 2"),
        (svamp, {"Body": "b", "Question": "q"}, "the key 'Answer' is missing"),
        (svamp, {"Question": "q", "Answer": 1}, "the key 'Body' is missing"),
    ],
)
def test_bad_rows(tmp_path: Path, task: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:1: .*{message}"):
        task(path=write(tmp_path / "x.jsonl", [row]))


@pytest.mark.parametrize("name", SUITES)
def test_they_are_for_evaluation_only(name: str, tmp_path: Path) -> None:
    entry = registry.find("task", name)
    assert entry.traits["held_out"] == "test"
    with pytest.raises(RecipeError, match=r"task.split: .*'test'; got 'train'"):
        entry.bind({"split": "train"}, "task")
    with pytest.raises(DataError, match="no usable examples"):
        entry.bind({"path": write(tmp_path / "x.jsonl", [])}, "task")()


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []
    row = {"problem": "p", "answer": "1", "Body": "b", "Question": "q", "Answer": 1}

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [row]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for name in SUITES:
        assert len(registry.find("task", name).bind({}, "task")().examples) == 1
    assert amc(hub="math-ai/amc23", hub_split="test").examples[0].answer == "1"
    assert asked == [
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("AI-MO/aimo-validation-amc", None, "train"),
        ("math-ai/minervamath", None, "test"),
        ("math-ai/olympiadbench", None, "test"),
        ("ChilleD/SVAMP", None, "train+test"),
        ("math-ai/amc23", None, "test"),
    ]


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_real_rows() -> None:
    folder = Path(os.environ["POSTTRAIN_DATA"])
    tasks: dict[str, Task] = {
        "math500": math500(path=str(folder / "math/math500.jsonl.gz")),
        "aime24": aime24(path=str(folder / "math_evals/aime24.jsonl.gz")),
        "amc": amc(path=str(folder / "math_evals/amc.jsonl.gz")),
        "minerva_math": minerva_math(path=str(folder / "math_evals/minerva.jsonl.gz")),
        "olympiad_bench": olympiad_bench(path=str(folder / "math_evals/olympiad_bench.jsonl.gz")),
        "svamp": svamp(path=str(folder / "math_evals/svamp.jsonl.gz")),
    }
    counts = {"math500": 500, "aime24": 30, "amc": 83, "minerva_math": 272, "olympiad_bench": 675, "svamp": 1000}
    assert {name: len(task.examples) for name, task in tasks.items()} == counts
    assert all(not task.dropped for task in tasks.values())
    graders = {name: dict(Counter(e.grader for e in task.examples)) for name, task in tasks.items()}
    assert graders["minerva_math"] == {"math": 232, "any_answer": 40}
    assert graders["olympiad_bench"] == {"math": 675}
    assert Counter(e.meta["level"] for e in tasks["math500"].examples) == {1: 43, 2: 90, 3: 105, 4: 128, 5: 134}
    assert Counter(e.meta["type"] for e in tasks["svamp"].examples) == {
        "Subtraction": 531,
        "Addition": 195,
        "Common-Division": 166,
        "Multiplication": 108,
    }
    for name in ("aime24", "amc", "svamp"):
        answers = [e.answer for e in tasks[name].examples]
        assert all(answer is not None and answer.removeprefix("-").isdecimal() for answer in answers)
