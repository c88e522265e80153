"""UltraFeedback, binarized: both forms of its rows, margins, ties."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError
from posttrain.tasks.preferences.compared_answers import ultrafeedback
from posttrain.types import Message, Response

ROW = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "score_chosen": 8.5, "score_rejected": 4}


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_both_forms_of_a_row(tmp_path: Path) -> None:
    whole = ROW | {"chosen": turns("1+1?", "2"), "rejected": turns("1+1?", "3"), "messages": turns("1+1?", "2")}
    task = ultrafeedback(path=write_rows(tmp_path / "x.jsonl", [ROW, whole]), split="test")
    first, second = task.examples
    assert (first.id, second.id) == ("ultrafeedback/test/1", "ultrafeedback/test/2")
    for example in task.examples:
        assert example.messages == (Message("user", "1+1?"),)
        assert example.responses == (Response("2", 8.5), Response("3", 4.0))
        assert example.answer is None


def test_what_is_dropped(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"score_rejected": 8.5},
        ROW | {"score_rejected": 9},
        ROW | {"score_chosen": None},
        {key: value for key, value in ROW.items() if key != "score_rejected"},
        ROW | {"rejected": "2"},
        ROW | {"rejected": " "},
        ROW | {"chosen": turns("1+1?", ""), "rejected": turns("1+1?", "3")},
        ROW | {"chosen": "<think>x</think>3"},
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    expected = {
        "chosen and rejected have the same score": 1,
        "chosen has a lower score than rejected": 1,
        "'score_chosen' is missing": 1,
        "'score_rejected' is missing": 1,
        "'chosen' and 'rejected' are the same": 1,
        "'rejected' is blank": 1,
        "'chosen' has a blank message": 1,
    }
    assert ultrafeedback(path=path, split="test").dropped == expected
    stripped = ultrafeedback(path=path, split="test", strip_thinking=True)
    assert stripped.dropped == expected | {"'chosen' and 'rejected' are the same": 2}
    with pytest.raises(DataError, match=r"y\.jsonl:1: 'score_chosen' must be a finite number; got 'high'"):
        ultrafeedback(path=write_rows(tmp_path / "y.jsonl", [ROW | {"score_chosen": "high"}]))


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [ROW | {"prompt": f"{i}+1?"} for i in range(50)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    splits = ("train", "validation", "test")
    sizes = [len(ultrafeedback(split=s, validation_share=0.2).examples) for s in splits]  # type: ignore[arg-type]
    assert sizes[0] + sizes[1] == sizes[2] == 50
    assert 1 <= sizes[1] <= 20
    assert asked == [("HuggingFaceH4/ultrafeedback_binarized", None, f"{s}_prefs") for s in ("train", "train", "test")]


@needs_data
def test_real_rows() -> None:
    for split, kept, ties in (("train", 811, 99), ("test", 172, 24)):
        task = ultrafeedback(path=real_file(f"ultrafeedback/{split}"), split="test")
        assert (len(task.examples), task.dropped) == (kept, {"chosen and rejected have the same score": ties})
        margins = [example.responses[0].score - example.responses[1].score for example in task.examples]
        assert min(margins) == 0.5  # the scores are halves
