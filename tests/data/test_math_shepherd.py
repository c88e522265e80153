"""Math-Shepherd: tags and signs are matched text by text; steps, problem, score and first error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_rows import needs_data, real_file, write_rows

from posttrain.data.reader import Dropped
from posttrain.data.steps import align, math_shepherd
from posttrain.errors import DataError
from posttrain.types import Message, Response
from refusing import refuses


def tagged(problem: str, *steps: str, signs: str, task: str | None = None) -> dict[str, Any]:
    """A row; a sign per step."""
    texts = [f"Step {number}: {step} " for number, step in enumerate(steps, start=1)]
    written = f"{problem} " + "\n".join(f"{text}ки" for text in texts)
    judged = f"{problem} " + "\n".join(f"{text}{sign}" for text, sign in zip(texts, signs, strict=True))
    return {"input": written, "label": judged} | ({} if task is None else {"task": task})


ROW = tagged(
    "How much is 2 + 3 - 1?", "2 + 3 = <<2+3=5>>5.", "5 - 1 = <<5-1=3>>3. The answer is: 3", signs="+-", task="GSM8K"
)


def test_a_row(tmp_path: Path) -> None:
    task = math_shepherd(path=write_rows(tmp_path / "x.jsonl", [ROW]), split="test")
    (example,) = task.examples
    assert (example.id, example.messages) == ("math_shepherd/test/1", (Message("user", "How much is 2 + 3 - 1?"),))
    steps = ("Step 1: 2 + 3 = 5.", "\nStep 2: 5 - 1 = 3. The answer is: 3")
    assert example.responses == (Response("".join(steps), 0.0, steps, (1, 0)),)
    assert example.meta == {"first_error": 1, "task": "GSM8K"}
    assert (task.name, task.dropped) == ("math_shepherd", {})


@pytest.mark.parametrize(
    ("signs", "labels", "error", "score"),
    [("++", (1, 1), None, 1.0), ("--", (0, 0), 0, 0.0), ("-+", (0, 1), 0, 1.0), ("+-", (1, 0), 1, 0.0)],
)
def test_signs(tmp_path: Path, signs: str, labels: tuple[int, ...], error: int | None, score: float) -> None:
    rows = [tagged("q?", "a + b - c", "d", signs=signs)]
    (example,) = math_shepherd(path=write_rows(tmp_path / "x.jsonl", rows), split="test").examples
    (response,) = example.responses
    assert (response.text, response.step_labels) == ("Step 1: a + b - c\nStep 2: d", labels)
    assert (example.meta, response.score) == ({"first_error": error}, score)  # the score is that of the last step


@pytest.mark.parametrize(
    ("written", "judged", "pieces", "labels"),
    [
        ("a ки", "a +", ["a "], [1]),
        ("a +ки\nbки \n", "a +-\nb+", ["a +", "\nb"], [0, 1]),
        ("- ки", "- - ", ["- "], [0]),
    ],
)
def test_align(written: str, judged: str, pieces: list[str], labels: list[int]) -> None:
    assert align(written, judged) == (pieces, labels)


@pytest.mark.parametrize(
    ("written", "judged", "reason"),
    [
        ("a", "a", "'input'"),
        ("a ки b", "a + b", "after the last"),
        ("a ки b ки", "a +", "'input'"),
        ("a ки", "a + b +", "'input'"),
        ("a ки", "b +", "'input'"),
        ("a ки b ки", "a ++ b", "'input'"),  # as many signs, at other places
    ],
)
def test_texts_that_do_not_match_are_dropped(written: str, judged: str, reason: str) -> None:
    with refuses(Dropped, reason):
        align(written, judged)


def test_what_is_dropped(tmp_path: Path) -> None:
    rows = [
        ROW,
        {"input": "q? Step 1: a ки", "label": "q? Step 1: b +"},
        {"input": "q? a ки", "label": "q? a +"},
        tagged("", "a", signs="+"),
        tagged("q?", "a", " ", signs="++"),
        tagged("q?", "<<1=1>>", signs="+", task="GSM8K"),
    ]
    assert math_shepherd(path=write_rows(tmp_path / "x.jsonl", rows), split="test").dropped == {
        "'label' differs from 'input' in more than step tags": 1,
        "missing 'Step 1:' after the problem": 1,
        "blank problem": 1,
        "blank step": 2,
    }
    with refuses(DataError, "y.jsonl:1", "'label'"):
        math_shepherd(path=write_rows(tmp_path / "y.jsonl", [{"input": "q? Step 1: a ки"}]))


@needs_data
def test_real_rows() -> None:
    task = math_shepherd(path=real_file("prm_format_samples/math_shepherd"), split="test")
    assert (len(task.examples), task.dropped) == (7, {})
    labels = [example.responses[0].step_labels for example in task.examples]
    assert [len(steps) for steps in labels] == [5, 3, 2, 5, 5, 2, 3]
    assert labels[0] == (1, 1, 1, 1, 0)
    assert labels[4] == (1, 0, 0, 0, 0)
    assert [example.meta["first_error"] for example in task.examples] == [4, 0, 0, 0, 1, 0, 0]
    for example in task.examples:
        assert example.messages[0].content.endswith("?")
        assert "<<" not in example.responses[0].text
        assert "The answer is: " in example.responses[0].steps[-1]
