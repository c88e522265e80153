"""Sampled solutions of a problem become the responses of one example."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError
from posttrain.graders.answers import same_answer
from posttrain.tasks.steps.judged_solutions import gsm8k_solutions, judged_solutions, split_answer
from posttrain.types import Example, Message, Response

ROW = {"question": "1+1?", "response": "It is 2.", "is_correct": True, "level": 3, "gold": "2"}


def test_solutions_are_grouped_by_problem(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"question": "2+2?", "response": "4", "is_correct": 1, "level": 1},
        ROW | {"response": "It is 3.", "is_correct": False},
        ROW | {"question": " 1+1?\n", "is_correct": 1},  # an equal draw stays
    ]
    task = judged_solutions(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    first, second = task.examples
    assert (first.id, first.messages) == ("judged_solutions/test/1", (Message("user", "1+1?"),))
    assert first.responses == (Response("It is 2.", 1.0), Response("It is 3.", 0.0), Response("It is 2.", 1.0))
    assert (first.meta, second.meta) == ({"level": 3}, {"level": 1})
    assert (second.id, second.responses) == ("judged_solutions/test/2", (Response("4", 1.0),))
    assert task.dropped == {}


def test_other_keys_and_what_is_dropped(tmp_path: Path) -> None:
    row = {"prompt": "q", "text": "a", "ok": 1}
    rows = [
        row,
        row | {"text": ""},
        row | {"ok": None},
        row | {"prompt": None},
        row | {"text": "<think>b</think>a"},
        row | {"text": "<think>b"},
    ]
    keys = {"problem_key": "prompt", "solution_key": "text", "verdict_key": "ok"}
    path = write_rows(tmp_path / "x.jsonl", rows)
    task = judged_solutions(path=path, split="test", strip_thinking=True, **keys)  # type: ignore[arg-type]
    assert task.examples[0].responses == (Response("a", 1.0), Response("a", 1.0))
    expected = {"'text' is blank": 1, "'ok' is missing": 1, "'prompt' is missing": 1, "a <think> that never closes": 1}
    assert task.dropped == expected
    with pytest.raises(DataError, match=r"x\.jsonl: no row can be used: 6 × 'question' is missing"):
        judged_solutions(path=path)


def test_a_problem_is_never_in_two_splits(tmp_path: Path) -> None:
    rows = [ROW | {"question": f"{i % 30}?"} for i in range(90)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    train, validation = (judged_solutions(path=path, split=s, validation_share=0.3) for s in ("train", "validation"))
    assert len(train.examples) + len(validation.examples) == 30
    assert {len(e.responses) for e in [*train.examples, *validation.examples]} == {3}


@needs_data
def test_real_rows() -> None:
    task = judged_solutions(path=real_file("orm_math/qwen_math_cot_samples"), split="test")
    assert (len(task.examples), task.dropped) == (100, {})
    assert {len(example.responses) for example in task.examples} == {8}
    assert Counter(r.score for e in task.examples for r in e.responses) == {1.0: 728, 0.0: 72}
    assert {example.meta["level"] for example in task.examples} == {f"Level {n}" for n in range(1, 6)}


# --- GSM8K's model solutions ---

TRUTH = "6/2=<<6/2=3>>3 of them\n3+1=<<3+1=4>>4\nA: 4"
ASKED = {"question": "How many? ", "ground_truth": TRUTH}
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
        [ASKED | {"6B_finetuning": RIGHT, "175B_verification": WRONG}],
        [ASKED | {"model": "6b_finetuning"} | RIGHT, ASKED | {"model": "175b_verification"} | WRONG],
    ],
)
def test_gsm8k_solutions_both_layouts(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
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


def test_gsm8k_solutions_dropped_and_refused(tmp_path: Path) -> None:
    rows = [
        ASKED | RIGHT,
        ASKED | RIGHT | {"solution": " "},
        ASKED | RIGHT | {"is_correct": None},
        {"question": "q"} | WRONG,
    ]
    task = gsm8k_solutions(path=write_rows(tmp_path / "x.jsonl", rows), split="test")
    assert task.dropped == {"'solution' is blank": 1, "'is_correct' is missing": 1}
    assert [(e.answer, e.solution, len(e.responses)) for e in task.examples] == [
        ("4", EXPECTED.solution, 1),
        (None, None, 1),
    ]
    with pytest.raises(DataError, match=r"y\.jsonl:2: no 'solution', neither in the row nor under a model's name"):
        gsm8k_solutions(path=write_rows(tmp_path / "y.jsonl", [ASKED | RIGHT, ASKED]))


@needs_data
def test_gsm8k_solutions_real_rows() -> None:
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
