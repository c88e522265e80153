"""GSM8K in its own layout, from small files made here and, where there are some, from real rows."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, RecipeError
from posttrain.graders.answers import parse_quantity, same_answer
from posttrain.tasks.base import Task
from posttrain.tasks.verifiable.mathematics import gsm8k
from posttrain.types import Message

ROW = {
    "question": "How many? ",
    "answer": "He has 48/2 = <<48/2=24>>24.\nThat is 1,024+24=<<1024+24=1048>>1,048.\n#### 1,048",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_row(tmp_path: Path) -> None:
    task = gsm8k(split="test", path=write(tmp_path / "x.jsonl", [ROW]))
    (example,) = task.examples
    assert example.id == "gsm8k/test/1"
    assert example.messages == (Message("user", "How many?"),)
    assert example.answer == "1,048"
    assert example.solution == "He has 48/2 = 24.\nThat is 1,024+24=1,048."
    assert example.answer is not None
    assert same_answer(example.answer, "1048")
    assert (task.name, task.split, task.dropped) == ("gsm8k", "test", {})


def test_final_answer_stands_in_for_a_missing_result(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "2+2=<<2+2=4>>4", "final_answer": 4}, {"question": "q", "answer": "#### 5"}]
    first, second = gsm8k(split="test", path=write(tmp_path / "x.jsonl", rows)).examples
    assert (first.answer, first.solution) == ("4", "2+2=4")
    assert (second.answer, second.solution) == ("5", None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "the key 'answer' is missing"),
        ({"answer": "#### 4"}, "the key 'question' is missing"),
        ({"question": "", "answer": "#### 4"}, "'question' is empty"),
        ({"question": "q", "answer": ""}, "'answer' is empty"),
        ({"question": "q", "answer": "just text"}, "no result: it must end with a line `#### 42`"),
        ({"question": "q", "answer": "text\n####  "}, "no result"),
        ({"question": "q", "answer": 4}, "'answer' must be text"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{message}"):
        gsm8k(path=write(tmp_path / "x.jsonl", [ROW, row]))


def test_splits_of_a_training_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)])
    train, validation = gsm8k(path=path), gsm8k(split="validation", path=path, validation_share=0.05)
    questions = [{e.messages[0].content for e in task.examples} for task in (train, validation)]
    assert questions[0] | questions[1] == {f"q{i}" for i in range(40)}
    assert not questions[0] & questions[1]
    assert registry.find("task", "gsm8k").traits["held_out"] == "validation"
    assert all(e.id.startswith("gsm8k/validation/") for e in validation.examples)


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [ROW, {**ROW, "question": "other"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    sizes = [len(gsm8k(split=split).examples) for split in ("train", "validation", "test")]  # type: ignore[arg-type]
    assert sizes == [1, 1, 2]
    assert asked == [("openai/gsm8k", "main", s) for s in ("train", "train", "test")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "dev"}, "task.split: .*'train', 'validation' or 'test'; got 'dev'"),
        ({"pth": "x"}, "Did you mean 'path'"),
        ({"validation_share": 1}, "less than 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry.find("task", "gsm8k").bind(options, "task")


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_real_rows() -> None:
    folder = Path(os.environ["POSTTRAIN_DATA"]) / "gsm8k"
    train_path, test_path = str(folder / "gsm8k_train.jsonl.gz"), str(folder / "gsm8k_test.jsonl.gz")
    tasks: dict[str, Task] = {
        "train": gsm8k(path=train_path),
        "validation": gsm8k(split="validation", path=train_path),
        "test": gsm8k(split="test", path=test_path),
    }
    assert {split: len(task.examples) for split, task in tasks.items()} == {
        "train": 7119,
        "validation": 354,
        "test": 1019,
    }
    questions = [{e.messages for e in task.examples} for task in tasks.values()]
    assert len(questions[0] | questions[1] | questions[2]) == 7473 + 1019
    with gzip.open(test_path, "rt", encoding="utf-8") as stream:
        finals = [json.loads(line)["final_answer"] for line in stream]
    for example, final in zip(tasks["test"].examples, finals, strict=True):
        assert example.answer is not None
        assert parse_quantity(example.answer) == parse_quantity(final)
        assert example.solution is not None
        assert not re.search(r"<<|>>|####", example.solution)
