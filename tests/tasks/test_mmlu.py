"""MMLU in its layouts, with and without solved questions in front."""

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
from posttrain.errors import DataError, RecipeError, UsageError
from posttrain.graders.choice import multiple_choice
from posttrain.graders.grading import Submission
from posttrain.tasks.verifiable.mmlu import AREAS, mmlu


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def row(question: str = "1 + 1?", answer: Any = "B", subject: str = "abstract_algebra") -> dict[str, Any]:
    return {"subject": subject, "question": question, "choices": ["1", "2", " 3", "4"], "answer": answer}


def test_a_row(tmp_path: Path) -> None:
    (example,) = mmlu(path=write(tmp_path / "x.jsonl", [row()])).examples
    assert example.messages[0].content == (
        "Answer the following multiple-choice question about abstract algebra with the letter of the right choice.\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4"
    )
    assert (example.id, example.answer, example.grader) == ("mmlu/test/1", "B", "multiple_choice")
    assert example.meta == {"subject": "abstract_algebra", "area": "stem", "choices": ("1", "2", "3", "4")}
    assert multiple_choice(Submission("It is 2.\n2", None, example.answer, example.meta)).outcome == "right"


def test_answers_are_letters_or_indices(tmp_path: Path) -> None:
    rows = [row(answer=answer) for answer in ("A", " D ", 0, 3)]
    assert [e.answer for e in mmlu(path=write(tmp_path / "x.jsonl", rows)).examples] == ["A", "D", "A", "D"]


def test_ten_choices(tmp_path: Path) -> None:
    wide = {**row(answer="J"), "choices": [str(i) for i in range(10)]}
    (example,) = mmlu(path=write(tmp_path / "x.jsonl", [wide])).examples
    assert example.messages[0].content.endswith("\nI. 8\nJ. 9")
    assert example.answer == "J"


def test_solved_questions_are_of_the_same_subject(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [row("q?"), row("r?", subject="virology")])
    dev = [row("a?", "A"), row("v?", "C", "virology"), row("b?", 1), row("w?", 3, "virology"), row("c?", "C")]
    dev_path = write(tmp_path / "dev.jsonl", dev)
    first, second = mmlu(path=path, shots=2, dev_path=dev_path).examples
    choices = "\nA. 1\nB. 2\nC. 3\nD. 4"
    assert first.messages[0].content == (
        "Answer the following multiple-choice questions about abstract algebra with the letter of the right choice.\n\n"
        f"a?{choices}\nAnswer: A\n\nb?{choices}\nAnswer: B\n\nq?{choices}"
    )
    assert f"v?{choices}\nAnswer: C\n\nw?{choices}\nAnswer: D\n\nr?{choices}" in second.messages[0].content
    with pytest.raises(
        DataError, match=r"3 solved questions of 'virology' are needed, and there are 2; lower task.shots"
    ):
        mmlu(path=path, shots=3, dev_path=dev_path)
    with pytest.raises(UsageError, match=r"give them as task.dev_path"):
        mmlu(path=path, shots=1)


def test_subjects_and_areas(tmp_path: Path) -> None:
    rows = [row(subject=subject) for subject in ("virology", "astronomy", "management", "sociology", "law_of_ours")]
    path = write(tmp_path / "x.jsonl", rows)

    def chosen(*subjects: str) -> list[str]:
        return [e.meta["subject"] for e in mmlu(path=path, subjects=list(subjects)).examples]

    assert chosen() == ["virology", "astronomy", "management", "sociology", "law_of_ours"]
    assert chosen("other", "astronomy") == ["virology", "astronomy", "management"]
    assert chosen("law_of_ours") == ["law_of_ours"]
    assert mmlu(path=path).examples[-1].meta["area"] is None
    with pytest.raises(UsageError, match=r"no subject or area 'astronmy'. Did you mean 'astronomy'"):
        chosen("astronmy")
    with pytest.raises(UsageError, match="no subject or area 'humanities'"):
        chosen("humanities")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "E"}, "'answer' must be a letter from A to D or 0 to 3; got 'E'"),
        ({"answer": 4}, "got 4"),
        ({"answer": -1}, "got -1"),
        ({"answer": True}, "got True"),
        ({"answer": None}, "got None"),
        ({"answer": "AB"}, "got 'AB'"),
        ({"choices": ["1"]}, "list of 2 to 10 texts"),
        ({"choices": "1234"}, "list of 2 to 10 texts"),
        ({"choices": ["1", " "]}, "'choice B' is empty"),
        ({"question": ""}, "'question' is empty"),
        ({"subject": 3}, "'subject' must be text"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        mmlu(path=write(tmp_path / "x.jsonl", [row(), {**row(), **change}]))


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [row(answer=1)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(mmlu(shots=1).examples) == 1
    assert len(mmlu(split="validation").examples) == 1
    assert asked == [("cais/mmlu", "all", "test"), ("cais/mmlu", "all", "dev"), ("cais/mmlu", "all", "validation")]


@pytest.mark.parametrize(
    ("options", "message"), [({"shots": 6}, "less than or equal to 5"), ({"split": "train"}, "'validation' or 'test'")]
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry.find("task", "mmlu").bind(options, "task")


def test_every_subject_has_one_area() -> None:
    subjects = [subject for area in AREAS.values() for subject in area]
    assert len(subjects) == len(set(subjects)) == 57
    assert {area: len(own) for area, own in AREAS.items()} == {
        "stem": 19,
        "humanities": 13,
        "social_sciences": 12,
        "other": 13,
    }


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_real_rows() -> None:
    folder = Path(os.environ["POSTTRAIN_DATA"]) / "mmlu"
    task = mmlu(path=str(folder / "val.jsonl.gz"), shots=5, dev_path=str(folder / "dev.jsonl.gz"))
    assert len(task.examples) == 1531
    assert {e.meta["subject"] for e in task.examples} == {subject for area in AREAS.values() for subject in area}
    assert Counter(e.meta["area"] for e in task.examples).keys() == AREAS.keys()
    assert all(e.messages[0].content.count("\nAnswer: ") == 5 for e in task.examples)


@needs_data
def test_real_choices_are_read_as_what_they_are() -> None:
    """Labels with and without text, and the text alone where no other choice has the same."""
    task = mmlu(path=str(Path(os.environ["POSTTRAIN_DATA"]) / "mmlu" / "val.jsonl.gz"))
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
