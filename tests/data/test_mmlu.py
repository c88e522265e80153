"""MMLU: its rows become questions with choices, and the answer is a letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_rows import needs_data, real_file, write_rows

from posttrain.data.verifiable.suites import mmlu
from posttrain.errors import DataError
from posttrain.graders.choice import multiple_choice
from posttrain.graders.grading import Submission


def row(question: str = "1 + 1?", answer: Any = "B", subject: str = "abstract_algebra") -> dict[str, Any]:
    return {"subject": subject, "question": question, "choices": ["1", "2", " 3", "4"], "answer": answer}


def test_a_row(tmp_path: Path) -> None:
    (example,) = mmlu(path=write_rows(tmp_path / "x.jsonl", [row()])).examples
    assert example.messages[0].content == (
        "Answer the following multiple-choice question about abstract algebra with the letter of the right choice.\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4"
    )
    assert (example.id, example.answer, example.grader) == ("mmlu/test/1", "B", "multiple_choice")
    assert example.meta == {"subject": "abstract_algebra", "choices": ("1", "2", "3", "4")}
    assert multiple_choice(Submission("It is 2.\n2", None, example.answer, example.meta)).outcome == "right"


def test_answers_are_letters_or_indices(tmp_path: Path) -> None:
    rows = [row(answer=answer) for answer in ("A", " D ", 0, 3)]
    assert [e.answer for e in mmlu(path=write_rows(tmp_path / "x.jsonl", rows)).examples] == ["A", "D", "A", "D"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "E"}, "'answer' must be a letter from A to D or 0 to 3; got 'E'"),
        ({"answer": 4}, "got 4"),
        ({"answer": True}, "got True"),
        ({"choices": ["1"]}, "list of 2 to 10 texts"),
        ({"choices": ["1", " "]}, "'choice B' is empty"),
        ({"subject": 3}, "'subject' must be text"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        mmlu(path=write_rows(tmp_path / "x.jsonl", [row(), {**row(), **change}]))


@needs_data
def test_real_choices_are_read_as_what_they_are() -> None:
    """Labels with and without text, and the text alone where no other choice has the same."""
    task = mmlu(path=real_file("mmlu/val"))
    assert len(task.examples) == 1531
    assert len({e.meta["subject"] for e in task.examples}) == 57
    unread: list[str] = []
    for example in task.examples[::3]:
        choices = example.meta["choices"]
        for letter, choice in zip("ABCD", choices, strict=True):
            expected = "right" if letter == example.answer else "wrong"
            for text in (
                f"({letter})",
                f"{letter}. {choice}",
                f"<think>Maybe A or D.</think> <answer> {letter} </answer>",
                f"It is so.\n\n**Answer: {letter}) {choice}**",
                f"The correct answer is {letter}, because of that.",
            ):
                assert multiple_choice(Submission(text, None, example.answer, example.meta)).outcome == expected, text
            outcome = multiple_choice(Submission(choice, None, example.answer, example.meta)).outcome
            if outcome == "no_answer":
                unread.append(choice)
            else:
                assert outcome == expected, choice
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        for text in (listed, "A B C D", "A, B, C or D", "(A) (B) (C) (D)"):
            assert multiple_choice(Submission(text, None, example.answer, example.meta)).outcome == "no_answer"
    assert unread == ["c", "12", "12", "60,000,000", "60,000,000"]  # one letter, and two choices with the same text
