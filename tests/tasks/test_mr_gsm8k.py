"""MR-GSM8K: labels up to the first error, which counts from 1 in the file and from 0 in an example."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError, RecipeError
from posttrain.recipes.sections import Word
from posttrain.tasks.base import held_out_task
from posttrain.tasks.steps.found_errors import mr_gsm8k
from posttrain.types import Message, Response

ROW = {
    "question": "How many?",
    "model_output_steps": ["Step 1: a", "Step 2: b", "Step 3: c"],
    "model_output_solution_correctness": "wrong",
    "model_output_solution_first_error_step": 2,
    "question_type": "original",
}


def row(**more: Any) -> dict[str, Any]:
    return ROW | {f"model_output_{key}": value for key, value in more.items()}


def test_a_wrong_and_a_right_solution(tmp_path: Path) -> None:
    right = row(solution_correctness="Correct", solution_first_error_step="N/A")
    task = mr_gsm8k(path=write_rows(tmp_path / "x.jsonl", [ROW, right]))
    first, second = task.examples
    assert (first.id, first.messages) == ("mr_gsm8k/1", (Message("user", "How many?"),))
    steps = ("Step 1: a", "\nStep 2: b", "\nStep 3: c")
    assert first.responses == (Response("".join(steps), 0.0, steps, (1, 0, None)),)
    assert first.meta == {"first_error": 1, "question_type": "original"}
    assert second.responses == (Response("".join(steps), 1.0, steps, (1, 1, 1)),)
    assert second.meta["first_error"] is None
    assert (task.split, task.dropped) == ("test", {})


def test_other_ways_to_write_it(tmp_path: Path) -> None:
    rows = [
        row(solution_first_error_step="3"),
        row(steps="Step 1: a\nmore of it\nStep 2: b", solution_first_error_step=1),
    ]
    first, second = mr_gsm8k(path=write_rows(tmp_path / "x.jsonl", rows), step_separator=" ").examples
    assert first.responses[0].step_labels == (1, 1, 0)
    assert second.responses[0].steps == ("Step 1: a\nmore of it", " Step 2: b")
    assert second.responses[0].step_labels == (0, None)


def test_what_is_dropped_and_refused(tmp_path: Path) -> None:
    rows = [
        ROW,
        row(steps=[]),
        row(steps=["a", " "]),
        *(row(solution_first_error_step=n) for n in (0, 4, "N/A", None, True, 1.5, "-1")),
    ]
    assert mr_gsm8k(path=write_rows(tmp_path / "x.jsonl", rows)).dropped == {
        "'model_output_steps' is blank": 1,
        "a blank step": 1,
        "a wrong solution whose first wrong step is not among its steps": 7,
    }
    for bad, message in (
        (row(solution_correctness="so so"), "'model_output_solution_correctness' must be 'correct' or 'wrong'"),
        (row(steps=3), "'model_output_steps' must be a list"),
        (row(steps=["a", 3]), "'model_output_steps 2' must be text"),
    ):
        with pytest.raises(DataError, match=rf"y\.jsonl:2: {message}"):
            mr_gsm8k(path=write_rows(tmp_path / "y.jsonl", [ROW, bad]))


def test_from_the_hub_and_never_trained_on_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        assert (name, config, split) == ("Randolphzeng/Mr-GSM8K", None, "train")
        return [ROW]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(mr_gsm8k().examples) == 1
    with pytest.raises(RecipeError, match="names no held-out split"):
        held_out_task(Word(name="mr_gsm8k"))


@needs_data
def test_real_rows() -> None:
    task = mr_gsm8k(path=real_file("mr_gsm8k/mr_gsm8k_wrong"))
    assert (len(task.examples), task.dropped) == (473, {})
    for example in task.examples:
        labels = example.responses[0].step_labels
        error = example.meta["first_error"]
        assert labels == (1,) * error + (0,) + (None,) * (len(labels) - error - 1)
        assert example.responses[0].steps[error].lstrip().startswith(f"Step {error + 1}:")
