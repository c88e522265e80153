"""LLMBar and PandaLM: which of two answers is the better one, by a label or by a majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from given_rows import needs_data, real_file, write_rows

from posttrain.errors import DataError
from posttrain.tasks.preferences.compared_answers import llmbar, pandalm
from posttrain.types import Message, Response

BAR = {"input": "Say yes.", "output_1": "yes", "output_2": "no", "label": 1, "subset": "Natural"}
PANDA = {
    "instruction": "Say it again.",
    "input": "",
    "response1": "it",
    "response2": "again",
    "annotator1": 1,
    "annotator2": 1,
    "annotator3": 2,
    "motivation_app": "Chat",
}


def test_llmbar(tmp_path: Path) -> None:
    rows = [BAR, {k: v for k, v in BAR.items() if k != "subset"} | {"label": 2}, BAR | {"output_2": "yes"}]
    task = llmbar(path=write_rows(tmp_path / "x.jsonl", rows))
    first, second = task.examples
    assert (first.id, first.messages, first.meta) == ("llmbar/1", (Message("user", "Say yes."),), {"subset": "Natural"})
    assert first.responses == (Response("yes", 1.0), Response("no", 0.0))
    assert second.responses == (Response("no", 1.0), Response("yes", 0.0))
    assert second.meta == {}
    assert (task.split, task.dropped) == ("test", {"both answers are the same": 1})
    for label in (0, 3, "1", None, True):
        with pytest.raises(DataError, match=r"y\.jsonl:1: 'label' must be 1 or 2"):
            llmbar(path=write_rows(tmp_path / "y.jsonl", [BAR | {"label": label}]))


def votes(*numbers: Any) -> dict[str, Any]:
    return PANDA | {f"annotator{n}": vote for n, vote in enumerate(numbers, start=1)}


@pytest.mark.parametrize(
    ("numbers", "better"),
    [((1, 1, 2), "it"), ((2, 1, 2), "again"), ((0, 1, 1), "it"), ((2, 2, 2), "again"), ((2, 0, 2), "again")],
)
def test_the_majority_decides(tmp_path: Path, numbers: tuple[int, ...], better: str) -> None:
    (example,) = pandalm(path=write_rows(tmp_path / "x.jsonl", [votes(*numbers)])).examples
    assert example.messages == (Message("user", "Say it again."),)
    assert example.meta == {"source": "Chat"}
    assert {r.text: r.score for r in example.responses} == {"it": 0.0, "again": 0.0} | {better: 1.0}
    assert example.responses[0].text == better


def test_what_pandalm_drops_and_refuses(tmp_path: Path) -> None:
    rows = [
        votes(1, 1, 1) | {"input": "Louder!"},
        votes(0, 1, 2),
        votes(0, 0, 1),
        votes(0, 0, 0),
        votes(1, 1, 1) | {"response2": " "},
        votes(1, 1, 1) | {"instruction": ""},
        votes(2, 2, 1) | {"response1": True, "response2": 3},
    ]
    task = pandalm(path=write_rows(tmp_path / "x.jsonl", rows))
    assert task.examples[0].messages == (Message("user", "Say it again.\n\nLouder!"),)
    assert [r.text for r in task.examples[1].responses] == ["3", "True"]
    assert task.dropped == {
        "no two annotators agree": 1,
        "a tie": 2,
        "'response2' is blank": 1,
        "'instruction' is blank": 1,
    }
    for bad in (votes(1, 1, 3), votes(1, 1, None), votes(1, 1, True)):
        with pytest.raises(DataError, match=r"y\.jsonl:1: annotator1, annotator2, annotator3 must each be 0, 1 or 2"):
            pandalm(path=write_rows(tmp_path / "y.jsonl", [bad]))


@needs_data
def test_real_rows() -> None:
    task = llmbar(path=real_file("preference/llmbar"))
    assert (len(task.examples), task.dropped) == (418, {})
    assert len({example.meta["subset"] for example in task.examples}) == 5
    human = pandalm(path=real_file("preference/pandalm_human_test"))
    assert len(human.examples) == 828
    assert human.dropped == {
        "a tie": 102,
        "'response1' is blank": 29,
        "'response2' is blank": 23,
        "'instruction' is blank": 1,
    }
