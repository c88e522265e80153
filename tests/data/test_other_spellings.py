"""Rows as other tools and tables write them: each is read as what it says, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import array, int64, list_, map_, parquet, schema, string, struct, table

from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.errors import DataError
from posttrain.types import Example
from refusing import refuses

ASK, REPLY = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
WORSE = {"role": "assistant", "content": "3"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}
USE = [ASK, CALL, RESULT]


def read(folder: Path, *rows: Any, task: Any = jsonl, **options: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return task(path=str(path), split="all", **options)


def read_table(folder: Path, text: str, name: str = "rows.csv", task: Any = jsonl) -> list[Example]:
    (folder / name).write_text(text, encoding="utf-8")
    return list(task(path=str(folder / name), split="all").examples)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system_prompt": "Rhyme.", "prompt": "1+1?", "response": "2"}, [("system", "Rhyme."), ("user", "1+1?")]),
        ({"system_message": "Rhyme.", "messages": [ASK, REPLY]}, [("system", "Rhyme."), ("user", "1+1?")]),
        ({"system_prompt": " ", "prompt": "1+1?", "response": "2"}, [("user", "1+1?")]),
        ({"instruction": "When?", "context": "In 1900.", "response": "1900"}, [("user", "When?\n\nIn 1900.")]),
        ({"prompt": json.dumps([ASK]), "completion": json.dumps([REPLY])}, [("user", "1+1?")]),
        ({"prompt": '["a"]', "response": "2"}, [("user", '["a"]')]),
        ({"prompt": "1+1?", "response": "2", "input": " ", "images": []}, [("user", "1+1?")]),
        ({"prompt": "1+1?", "response": "2", "height": 3, "trait": "b"}, [("user", "1+1?")]),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "chatgpt", "value": "2"}]},
            [("user", "1+1?")],
        ),
        ({"prompt": "1+1?", "instruction": "1+1?", "input": "x", "response": "2"}, [("user", "1+1?")]),
    ],
)
def test_jsonl_other_layouts_give_the_same_prompt(
    tmp_path: Path, row: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    (example,) = read(tmp_path, row).examples
    assert [(one.role, one.content) for one in example.messages] == messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Say it", "input": "Haus", "response": "house"}, "'input'"),
        ({"prompt": "When?", "context": "In 1900.", "response": "1900"}, "'context'"),
        ({"messages": [ASK, REPLY], "train": False}, "'train'"),
        ({"messages": [ASK, REPLY], "sample_weight": 0.1}, "'sample_weight'"),
        ({"messages": [ASK, REPLY], "Tools ": [{"name": "f"}]}, "key 'Tools '"),
        ({"messages": [ASK, REPLY], "reasoning": "Two."}, "'reasoning'"),
        ({"system": "a", "system_prompt": "b", "messages": [ASK, REPLY]}, "'system_prompt'"),
        (
            {"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "2", "weight": 0}]}]},
            "'weight'",
        ),
    ],
)
def test_jsonl_key_that_changes_training_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with refuses(DataError, message):
        read(tmp_path, row)


def test_jsonl_gsm8k_answer_is_the_result(tmp_path: Path) -> None:
    worked, plain = read(
        tmp_path, {"prompt": "3+4?", "answer": "3+4=7\n#### 7"}, {"prompt": "Which mark?", "answer": "####"}
    ).examples
    assert (worked.answer, worked.solution) == ("7", "3+4=7")
    assert (plain.answer, plain.solution) == ("####", None)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": USE, "chosen": "2", "rejected": "3"},
        {"chosen": [*USE, REPLY], "rejected": [*USE, WORSE]},
        {"messages": [*USE, REPLY], "label": True},
    ],
)
def test_preferences_tool_use_before_the_answer_is_read(tmp_path: Path, row: dict[str, Any]) -> None:
    task = read(tmp_path, row, task=preferences)
    assert task.dropped == {}
    assert [one.role for one in task.examples[0].messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"prompt": "1+1?", "completion": "2", "score": 3},
            {"prompt": "1+1?", "completion": "2", "label": True},
            "2:",
        ),
        (
            {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
            {"prompt": "1+1?", "chosen": "2", "rejected": "3", "score_chosen": 1, "score_rejected": 5},
            "2:",
        ),
    ],
)
def test_preferences_rows_of_two_scales_are_refused(tmp_path: Path, first: Any, second: Any, message: str) -> None:
    with refuses(DataError, message):
        read(tmp_path, first, second, task=preferences)


def test_preferences_negative_margin_is_dropped(tmp_path: Path) -> None:
    pair = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    task = read(tmp_path, pair | {"margin": 0.5}, pair | {"margin": -2}, task=preferences)
    assert [example.margin for example in task.examples] == [0.5]
    assert task.dropped == {"negative 'margin', so rejected would be better": 1}


def test_csv_labels_as_pandas_writes_them_are_labels(tmp_path: Path) -> None:
    text = ",prompt,completion,label,\n0,1+1?,2,1.0,\n1,1+1?,3,0.0,\n,,,,\n"
    examples = read_table(tmp_path, text, "ROWS.CSV", preferences)
    assert [example.responses[0].score for example in examples] == [1.0, 0.0]
    assert examples[0].meta == {"column 1": "0"}


def test_parquet_column_twice_is_refused(tmp_path: Path) -> None:
    twice = table([array(["1+1?"]), array(["2+2?"]), array(["2"])], names=["prompt", "prompt", "answer"])
    parquet.write_table(twice, tmp_path / "rows.parquet")
    with refuses(DataError, "'prompt'"):
        jsonl(path=str(tmp_path / "rows.parquet"), split="all")


def test_parquet_arguments_in_a_map_are_an_object(tmp_path: Path) -> None:
    call = struct([("name", string()), ("arguments", map_(string(), int64()))])
    message = struct([("role", string()), ("content", string()), ("tool_calls", list_(struct([("function", call)])))])
    row = {"messages": [{**ASK, "tool_calls": None}, {**CALL}, {**RESULT, "tool_calls": None}, REPLY]}
    row["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": [("a", 1)]}}]
    columns = {"messages": array([row["messages"]], list_(message))}
    parquet.write_table(table(columns, schema=schema([("messages", list_(message))])), tmp_path / "rows.parquet")
    (example,) = jsonl(path=str(tmp_path / "rows.parquet"), split="all").examples
    assert example.conversation[1].calls[0].raw_arguments == '{"a": 1}'


@pytest.mark.parametrize("mark", [{"train": True}, {"weight": 1}, {"weight": 1.0}])
@pytest.mark.parametrize(
    ("place", "messages"),
    [
        (1, [{"role": "system", "content": "Rhyme."}, ASK, REPLY]),
        (1, [ASK, REPLY]),
        (3, [ASK, CALL, RESULT, REPLY]),
        (1, [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]),
        (1, [REPLY, ASK, REPLY]),
    ],
)
def test_message_that_is_never_trained_by_itself_cannot_be_marked_as_trained(
    tmp_path: Path, mark: dict[str, Any], place: int, messages: list[dict[str, Any]]
) -> None:
    marked = [dict(message) for message in messages]
    marked[place - 1] |= mark
    (key,) = mark
    with refuses(DataError, "rows.jsonl:1", f"'messages', message {place}", repr(key), "data.train_on"):
        read(tmp_path, {"messages": marked})
    kept = read(tmp_path, {"messages": marked}, ignore_keys=[key])
    assert kept.examples[0].demonstration == "2"


def test_marks_that_act_or_agree_with_what_is_trained_are_read(tmp_path: Path) -> None:
    (example,) = read(tmp_path, {"messages": [ASK | {"train": False}, REPLY | {"train": True}]}).examples
    assert [message.is_trained for message in example.conversation] == [False, True]
    alone = {"prompt": "1+1?", "chosen": [REPLY | {"weight": 1}], "rejected": [WORSE | {"weight": 1}]}
    assert len(read(tmp_path, alone, task=preferences).examples) == 1
