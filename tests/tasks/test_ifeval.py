"""IFEval in its layouts, and every real row checked on made-up responses."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, MissingExtra, RecipeError
from posttrain.graders.grading import Submission
from posttrain.graders.ifeval import INSTRUCTIONS, _load_factory
from posttrain.graders.ifeval import ifeval as grade
from posttrain.tasks.verifiable.ifeval import ifeval

ROW = {
    "key": 7,
    "prompt": "Say it without commas in three words or more.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3, "num_bullets": None}],
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_row(tmp_path: Path) -> None:
    (example,) = ifeval(path=write(tmp_path / "x.jsonl", [ROW])).examples
    assert (example.id, example.answer, example.grader) == ("ifeval/test/1", None, "ifeval")
    assert example.messages[0].content == ROW["prompt"]
    assert example.meta == {
        "key": 7,
        "num_instructions": 2,
        "instruction_id_list": ("punctuation:no_comma", "length_constraints:number_words"),
        "kwargs": ({}, {"relation": "at least", "num_words": 3}),
    }
    assert grade(Submission("One two three", None, None, example.meta)).outcome == "right"
    assert grade(Submission("One two", None, None, example.meta)).outcome == "wrong"


def test_rows_that_cannot_be_graded_are_dropped_and_counted(tmp_path: Path) -> None:
    def other(identifier: str, **kwargs: Any) -> dict[str, Any]:
        return {**ROW, "instruction_id_list": [identifier], "kwargs": [kwargs]}

    rows = [
        ROW,
        other("punctuation:no_coma"),
        other("punctuation:no_coma"),
        other("length_constraints:number_words", num_words=3, relation="at most"),
        other("language:response_language", language="tlh"),
        other("language:response_language", language="de"),
    ]
    task = ifeval(path=write(tmp_path / "x.jsonl", rows))
    assert [e.id for e in task.examples] == ["ifeval/test/1", "ifeval/test/6"]
    (unknown, count), (arguments, _), (tongue, _) = task.dropped.items()
    assert unknown == "there is no instruction 'punctuation:no_coma'. Did you mean 'punctuation:no_comma'?"
    assert count == 2
    assert "'length_constraints:number_words'.relation: Input should be 'at least' or 'less than'" in arguments
    assert tongue == "no detector for the language 'tlh'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "2 instructions need as many 'kwargs'; got 1"),
        ({"kwargs": [{}, 3]}, "'kwargs' mappings"),
        ({"instruction_id_list": []}, "must be a list with one entry for each instruction"),
        ({"instruction_id_list": "punctuation:no_comma"}, "must be a list"),
        ({"prompt": " "}, "'prompt' is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:1: .*{message}"):
        ifeval(path=write(tmp_path / "x.jsonl", [{**ROW, **change}]))
    with pytest.raises(DataError, match="no usable examples"):
        ifeval(path=write(tmp_path / "y.jsonl", []))


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the key 'instruction_id_list' is missing. There are: prompt"):
        ifeval(path=write(tmp_path / "x.jsonl", [{"prompt": "p"}]))


def test_the_detector_is_asked_for_before_anything_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load_factory.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    assert len(ifeval(path=write(tmp_path / "x.jsonl", [ROW])).examples) == 1
    row = {**ROW, "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}
    with pytest.raises(MissingExtra, match="langdetect"):
        ifeval(path=write(tmp_path / "y.jsonl", [row]))
    _load_factory.cache_clear()


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [ROW]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(ifeval().examples) == 1
    assert asked == [("google/IFEval", None, "train")]
    with pytest.raises(RecipeError, match=r"'test'; got 'train'"):
        registry.find("task", "ifeval").bind({"split": "train"}, "task")


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_real_rows() -> None:
    task = ifeval(path=str(Path(os.environ["POSTTRAIN_DATA"]) / "ifeval" / "ifeval.jsonl.gz"))
    assert (len(task.examples), task.dropped) == (480, {})
    assert {name for e in task.examples for name in e.meta["instruction_id_list"]} == set(INSTRUCTIONS)
    responses = ("Fine.", "* one\n* two\n\nP.S. [name] <<title>>", '{"a": [1]}', "<think>x")
    for example in task.examples:
        for response in responses:
            found = grade(Submission(response, None, None, example.meta))
            assert found.outcome in ("right", "wrong") if response != "<think>x" else found.outcome == "no_answer"
            assert 0.0 <= found.facts["instructions_strict"] <= found.facts["instructions_loose"] <= 1.0
