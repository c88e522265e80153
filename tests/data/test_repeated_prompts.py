"""Answers that repeat their prompt train on it twice: the copy is taken off if every row has one, and that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.base import Task
from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.errors import DataError
from posttrain.types import Message
from refusing import refuses

ASK = {"role": "user", "content": "1+1?"}
BRIEF = {"role": "system", "content": "Be brief."}
QUESTION = Message("user", "1+1?")


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(folder: Path, *rows: Any, task: Any = preferences, **options: Any) -> Task:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read_task: Task = task(path=str(path), split="all", **options)
    return read_task


def answers(task: Task) -> list[list[str]]:
    return [[response.text for response in example.responses] for example in task.examples]


def said(task: Task) -> list[str]:
    return [line for line in task.warnings if "repeat" in line]


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


WHOLE = [pair("1+1?", "1+1? 2", "1+1? 3"), pair("Say it.\n", "Say it.\nIt.", "Say it.\nNo.")]


def test_pairs_that_all_repeat_their_prompt_lose_the_copy(tmp_path: Path) -> None:
    task = read(tmp_path, *WHOLE)
    assert answers(task) == [[" 2", " 3"], ["It.", "No."]]
    assert [example.messages[-1].content for example in task.examples] == ["1+1?", "Say it.\n"]
    (line,) = said(task)
    assert "2 rows" in line
    for example, row in zip(task.examples, WHOLE, strict=True):
        assert [row["prompt"] + response.text for response in example.responses] == [row["chosen"], row["rejected"]]


@pytest.mark.parametrize(
    "other",
    [
        pair("1+2?", "3", "4"),
        pair("1+2?", "1+2? 3", "4"),
        pair("1+2?", "4", "1+2? 3"),
    ],
)
def test_one_row_without_the_copy_leaves_all_rows_as_they_are(tmp_path: Path, other: dict[str, str]) -> None:
    rows = [*WHOLE, other]
    task = read(tmp_path, *rows)
    assert answers(task) == [[row["chosen"], row["rejected"]] for row in rows]


def test_a_long_prompt_in_some_rows_only_is_reported(tmp_path: Path) -> None:
    long = "Explain why the sky is blue."
    task = read(tmp_path, pair(long, f"{long} Scattering.", f"{long} Paint."), pair("1+1?", "2", "3"))
    (line,) = said(task)
    assert "1 of 2 rows" in line
    assert answers(task)[0] == [f"{long} Scattering.", f"{long} Paint."]
    assert said(read(tmp_path, pair("It", "It is 2.", "It is 3."), pair("1+1?", "2", "3"))) == []


def test_a_prompt_format_changes_the_prompt_and_not_the_comparison(tmp_path: Path) -> None:
    task = read(tmp_path, *WHOLE, prompt_format="Answer: {prompt}")
    assert task.examples[0].messages == (Message("user", "Answer: 1+1?"),)
    assert answers(task) == [[" 2", " 3"], ["It.", "No."]]


def test_an_answer_that_is_only_the_prompt_is_dropped(tmp_path: Path) -> None:
    task = read(tmp_path, *WHOLE, pair("1+2?", "1+2? 3", "1+2?"))
    assert len(task.examples) == 2
    assert sum(task.dropped.values()) == 1
    echo = [pair("a b", "a b", "a b "), pair("c d", "c d", "c d ")]
    assert answers(read(tmp_path, *echo)) == [["a b", "a b "], ["c d", "c d "]], "a task of repeating stays"


def test_pairs_of_messages_that_repeat_the_prompt_read_it_once_and_say_so(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "chosen": [ASK, reply("2")], "rejected": [ASK, reply("3")]}
    task = read(tmp_path, row, row | {"prompt": [ASK]})
    assert {example.messages for example in task.examples} == {(QUESTION,)}
    assert answers(task) == [["2", "3"]] * 2
    (line,) = said(task)
    assert "2 rows" in line
    plain = {"prompt": "1+1?", "chosen": [reply("2")], "rejected": [reply("3")]}
    assert said(read(tmp_path, plain)) == []


@pytest.mark.parametrize(
    ("rows", "output"),
    [
        ([{"prompt": f"{n}+1?", "completion": f"{n}+1? {n}", "label": n > 1} for n in (1, 2)], [[" 1"], [" 2"]]),
        (
            [{"prompt": f"{n}?", "completions": [f"{n}? So", "2."], "labels": [True, False]} for n in (1, 2)],
            [[" So\n2."]] * 2,
        ),
    ],
)
def test_labeled_answers_and_steps_lose_the_copy(tmp_path: Path, rows: list[Any], output: list[list[str]]) -> None:
    task = read(tmp_path, *rows)
    assert answers(task) == output
    assert len(said(task)) == 1
    for example in task.examples:
        (response,) = example.responses
        assert "".join(response.steps) in ("", response.text)


@pytest.mark.parametrize("key", ["response", "completion"])
def test_demonstrations_lose_the_copy(tmp_path: Path, key: str) -> None:
    rows = [{"prompt": "1+1?", key: "1+1? Two."}, {"prompt": "1+2?", key: "1+2? Three."}]
    task = read(tmp_path, *rows, task=jsonl)
    assert [example.demonstration for example in task.examples] == [" Two.", " Three."]
    assert len(said(task)) == 1
    formatted = read(tmp_path, *rows, task=jsonl, prompt_format="Q: {prompt}")
    assert [example.demonstration for example in formatted.examples] == [" Two.", " Three."]
    some = read(tmp_path, *rows, {"prompt": "1+3?", key: "Four."}, task=jsonl)
    assert [example.demonstration for example in some.examples] == ["1+1? Two.", "1+2? Three.", "Four."]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "1+1?", "completion": [ASK, reply("2")]}, (QUESTION,)),
        ({"prompt": [ASK], "completion": [ASK, reply("2")]}, (QUESTION,)),
        ({"prompt": [BRIEF, ASK], "completion": [BRIEF, ASK, reply("2")]}, (Message("system", "Be brief."), QUESTION)),
        ({"prompt": [BRIEF, ASK], "completion": [ASK, reply("2")]}, (Message("system", "Be brief."), QUESTION)),
        ({"prompt": "1+1?", "completion": [BRIEF, ASK, reply("2")]}, (Message("system", "Be brief."), QUESTION)),
        (
            {"system": "Be brief.", "prompt": "1+1?", "completion": [ASK, reply("2")]},
            (Message("system", "Be brief."), QUESTION),
        ),
    ],
)
def test_a_completion_of_messages_that_repeats_the_prompt_reads_it_once(
    tmp_path: Path, row: dict[str, Any], messages: tuple[Message, ...]
) -> None:
    task = read(tmp_path, row, task=jsonl)
    (example,) = task.examples
    assert (example.messages, example.demonstration) == (messages, "2")
    assert example.conversation == (*messages, Message("assistant", "2"))
    assert len(said(task)) == 1


def test_a_completion_of_nothing_but_the_prompt_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, "'completion'", "rows.jsonl", "1"):
        read(tmp_path, {"prompt": "1+1?", "completion": [ASK]}, task=jsonl)
    with refuses(DataError, "system"):
        read(
            tmp_path,
            {"prompt": [BRIEF | {"content": "Rhyme."}, ASK], "completion": [BRIEF, ASK, reply("2")]},
            task=jsonl,
        )
