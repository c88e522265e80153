"""PRMBench: every step is labelled, errors count from 1 in the file and from 0 in an example."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError
from posttrain.tasks.steps.found_errors import prmbench
from posttrain.types import Message, Response

ROW = {
    "original_question": "How many?",
    "modified_question": "How many now? ",
    "original_process": ["a", "b"],
    "modified_process": ["a", "x", "b", "y"],
    "modified_steps": [2, 3, 4],
    "error_steps": [4, 2],
    "classification": "deception",
}


def test_a_row(tmp_path: Path) -> None:
    task = prmbench(path=write_rows(tmp_path / "x.jsonl", [ROW, ROW | {"error_steps": []}]))
    first, second = task.examples
    assert (first.id, first.messages) == ("prmbench/1", (Message("user", "How many now?"),))
    steps = ("a", "\nx", "\nb", "\ny")
    assert first.responses == (Response("a\nx\nb\ny", 0.0, steps, (1, 0, 1, 0)),)
    assert first.meta == {"first_error": 1, "classification": "deception"}
    assert second.responses == (Response("a\nx\nb\ny", 1.0, steps, (1, 1, 1, 1)),)
    assert second.meta["first_error"] is None
    assert (task.split, task.dropped) == ("test", {})


def test_the_originals_stand_in_once(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"classification": "circular"}, ROW | {"original_process": ["a", "c"]}]
    examples = prmbench(path=write_rows(tmp_path / "x.jsonl", rows), originals=True).examples
    assert [example.id for example in examples] == [
        "prmbench/1", "prmbench/1/original", "prmbench/2", "prmbench/3", "prmbench/3/original",
    ]  # fmt: skip
    original = examples[1]
    assert original.messages == (Message("user", "How many?"),)
    assert original.responses == (Response("a\nb", 1.0, ("a", "\nb"), (1, 1)),)
    assert original.meta == {"first_error": None, "classification": "original"}


def test_what_is_dropped_and_refused(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"error_steps": [5]},
        ROW | {"error_steps": [0]},
        ROW | {"modified_process": ["a", "", "b", "y"]},
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    assert prmbench(path=path).dropped == {"an error in a step that is not there": 2, "a blank step": 1}
    half = write_rows(tmp_path / "z.jsonl", [ROW, ROW | {"original_process": ["a", ""]}])
    assert prmbench(path=half, originals=True).dropped == {"a blank step": 1}
    for bad, message in (
        (ROW | {"error_steps": "2"}, "'error_steps' must be a list of step numbers"),
        (ROW | {"error_steps": [True]}, "'error_steps' must be a list of step numbers"),
        (ROW | {"modified_process": 1}, "'modified_process' must be a list"),
        (ROW | {"classification": None}, "'classification' must be text"),
    ):
        with pytest.raises(DataError, match=rf"y\.jsonl:2: {message}"):
            prmbench(path=write_rows(tmp_path / "y.jsonl", [ROW, bad]))


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        assert (name, config, split) == ("hitsmy/PRMBench_Preview", None, "train")
        return [ROW]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(prmbench().examples) == 1


@needs_data
def test_real_rows() -> None:
    task = prmbench(path=real_file("prmbench/prmbench"))
    assert (len(task.examples), task.dropped) == (5883, {"a blank step": 3})
    kinds = Counter(example.meta["classification"] for example in task.examples if example.meta["first_error"] is None)
    assert kinds == {"multi_solutions": 156}
    labels = Counter(label for example in task.examples for label in example.responses[0].step_labels)
    assert labels == {1: 65879, 0: 12464}
