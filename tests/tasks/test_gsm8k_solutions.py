"""GSM8K's model solutions: two layouts, several judged solutions per question, answers apart from reasoning."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError
from posttrain.graders.answers import same_answer
from posttrain.tasks.steps.judged_solutions import gsm8k_solutions, split_answer
from posttrain.types import Example, Message, Response

TRUTH = "6/2=<<6/2=3>>3 of them\n3+1=<<3+1=4>>4\nA: 4"
ROW = {"question": "How many? ", "ground_truth": TRUTH}
RIGHT = {"solution": "6/2 = <<6/2=3.0>>3\n3+1=4\nA: 4", "is_correct": True}
WRONG = {"solution": "6*2=<<6*2=12>>12\nA: 1,200", "is_correct": False}

EXPECTED = Example(
    id="gsm8k_solutions/test/1",
    messages=(Message("user", "How many?"),),
    answer="4",
    solution="6/2=3 of them\n3+1=4",
    responses=(Response("6/2 = 3\n3+1=4", 1.0, answer="4"), Response("6*2=12", 0.0, answer="1,200")),
)


@pytest.mark.parametrize(
    "rows",
    [
        [ROW | {"6B_finetuning": RIGHT, "175B_verification": WRONG}],
        [ROW | {"model": "6b_finetuning"} | RIGHT, ROW | {"model": "175b_verification"} | WRONG],
    ],
)
def test_both_layouts(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    task = gsm8k_solutions(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    assert list(task.examples) == [EXPECTED]
    assert task.dropped == {}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a\nA: 5", ("a", "5")),
        ("a\n#### 5 ", ("a", "5")),
        ("a\nb\nA:5\n", ("a\nb", "5")),
        ("a A: 5", ("a A: 5", None)),
        ("a\nA: 5\nb", ("a\nA: 5\nb", None)),
        ("a\nA: ", ("a\nA:", None)),
        ("A: 5", ("A: 5", None)),
        ("<<1=1>>\nA: 5", ("A: 5", None)),
        ("cut off <<3*", ("cut off <<3*", None)),
    ],
)
def test_split_answer(text: str, parts: tuple[str, str | None]) -> None:
    assert split_answer(text) == parts


def test_what_is_dropped_and_refused(tmp_path: Path) -> None:
    rows = [
        ROW | RIGHT,
        ROW | RIGHT | {"solution": " "},
        ROW | RIGHT | {"is_correct": None},
        {"question": "q"} | WRONG,
    ]
    task = gsm8k_solutions(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    assert task.dropped == {"'solution' is blank": 1, "'is_correct' is missing": 1}
    assert [(e.answer, e.solution, len(e.responses)) for e in task.examples] == [
        ("4", EXPECTED.solution, 1),
        (None, None, 1),
    ]
    with pytest.raises(DataError, match=r"y\.jsonl:2: no 'solution', neither in the row nor under a model's name"):
        gsm8k_solutions(path=write_rows(tmp_path / "y.jsonl", [ROW | RIGHT, ROW]))


@needs_data
def test_real_rows() -> None:
    task = gsm8k_solutions(path=real_file("gsm8k/gsm8k_model_solutions"), split="test")
    assert (len(task.examples), task.dropped) == (1019, {})
    responses = [(e, response) for e in task.examples for response in e.responses]
    assert {len(example.responses) for example in task.examples} == {4}
    assert Counter(response.score for _, response in responses) == {1.0: 1541, 0.0: 2535}
    unanswered = [response for _, response in responses if response.answer is None]
    assert len(unanswered) == 11
    assert {response.score for response in unanswered} == {0.0}  # samples that ran out of room
    agree = [
        same_answer(response.answer, example.answer or "") == (response.score == 1.0)
        for example, response in responses
        if response.answer is not None
    ]
    assert sum(agree) / len(agree) > 0.99  # the labels are what comparing the answers says
