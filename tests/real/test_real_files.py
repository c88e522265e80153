"""Rows of every kind of file: json, csv and tables, with what each of them can and cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.data.reading import read_file
from posttrain.errors import DataError
from posttrain.types import Message, Response
from refusing import refuses

ALPACA = [
    {"instruction": "Add.", "input": "12 and 30", "output": "42"},
    {"instruction": "Greet.", "input": "", "output": "Hello!", "system": "Be kind.", "history": [["Hi", "Hi!"]]},
]


def write(path: Path, name: str, text: str) -> str:
    (path / name).write_text(text, encoding="utf-8")
    return str(path / name)


def request(example: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in example.messages]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_list_of_alpaca_rows_is_read(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path, "alpaca.json", json.dumps(ALPACA, indent=indent))
    first, second = jsonl(path=path, split="all").examples
    assert (first.id, request(first), first.demonstration) == ("jsonl/all/1", [("user", "Add.\n\n12 and 30")], "42")
    assert second.id == "jsonl/all/2"
    assert request(second) == [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hi!"), ("user", "Greet.")]
    assert second.demonstration == "Hello!"


def test_json_with_one_object_to_a_line_is_read_by_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "lines.json", "".join(json.dumps(row) + "\n" for row in ALPACA))
    assert [row.line for row in read_file(path)] == [1, 2]
    assert list(read_file(write(tmp_path, "empty.json", " [ ]\n"))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [1]}', "x.json"),
        ('[{"a": 1}, 7]', "x.json:2"),
        ('[{"a": 1} {"a": 2}]', "','"),
        ('[{"a": 1}, {"a": ', "usable JSON: Expecting"),
        ('[{"a": 1, "a": 2}]', "'a'"),
        ('[{"a": 1}] x', "usable JSON: Extra"),
        ('[{"a": 1}', "','"),
        ("[" * 100_000, "not usable JSON"),
    ],
)
def test_json_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with refuses(DataError, message):
        list(read_file(write(tmp_path, "x.json", text)))


def test_csv_is_read_as_texts_without_empty_values(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,solution,source\r\n"1, 2 or\n3?",007,,web\r\n\r\nYes?,yes,"He said ""yes"".",\r\n'
    rows = list(read_file(write(tmp_path, "x.csv", text)))
    assert [row.data for row in rows] == [
        {"prompt": "1, 2 or\n3?", "answer": "007", "source": "web"},
        {"prompt": "Yes?", "answer": "yes", "solution": 'He said "yes".'},
    ]
    assert [row.line for row in rows] == [2, 5]
    first, second = jsonl(path=str(tmp_path / "x.csv"), split="all").examples
    assert (first.answer, first.solution, first.meta) == ("007", None, {"source": "web"})
    assert second.solution == 'He said "yes".'
    tabbed = list(read_file(write(tmp_path, "x.tsv", "prompt\tanswer\nq, r\t7\n")))
    assert [row.data for row in tabbed] == [{"prompt": "q, r", "answer": "7"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2,3\n", "x.csv:2"),
        ("a,b\n1\n", "x.csv:2: 1 cells"),
        ("a,a\n1,2\n", "x.csv:1"),
        ('a,b\n1,"2\n', "x.csv:2"),
    ],
)
def test_csv_of_another_form_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with refuses(DataError, message):
        list(read_file(write(tmp_path, "x.csv", text)))


def test_csv_of_pairs_labels_and_conversations_is_read(tmp_path: Path) -> None:
    pairs = write(tmp_path, "p.csv", "prompt,chosen,rejected,score_chosen,score_rejected\nq,[1],b,8.5,2\n")
    assert preferences(path=pairs, split="all").examples[0].responses == (Response("[1]", 8.5), Response("b", 2.0))
    labels = write(tmp_path, "l.csv", "prompt,completion,label\nq,a,True\nq,b,0\n")
    scores = [example.responses[0].score for example in preferences(path=labels, split="all").examples]
    assert scores == [1.0, 0.0]
    messages = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    chats = write(tmp_path, "c.csv", 'messages\n"' + messages.replace('"', '""') + '"\n')
    (example,) = jsonl(path=chats, split="all").examples
    assert example.conversation == (Message("user", "Hi"), Message("assistant", "Ho"))


def test_sharegpt_conversations_are_read(tmp_path: Path) -> None:
    text = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi", "weight": 0},
        {"from": "gpt", "value": "Bad", "weight": 0},
        {"from": "human", "value": "12 + 30?"},
        {"from": "gpt", "value": "42", "weight": 1},
    ]
    (example,) = jsonl(path=write(tmp_path, "s.json", json.dumps([{"conversations": text}])), split="all").examples
    assert [message.role for message in example.conversation] == ["system", "user", "assistant", "user", "assistant"]
    assert [message.is_trained for message in example.conversation if message.role == "assistant"] == [False, True]
    assert example.demonstration == "42"


def arrow(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path / "x.parquet")
    return str(path / "x.parquet")


def call(**arguments: Any) -> list[dict[str, Any]]:
    function = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "s"},
    ]


def test_nulls_of_a_table_are_no_arguments_and_nulls_of_a_json_file_are(tmp_path: Path) -> None:
    rows = [{"messages": call(a=1, deep={"x": "y"})}, {"messages": call(b="two", deep={"z": [1]})}]
    examples = jsonl(path=arrow(tmp_path, rows), split="all").examples
    given_arguments = [json.loads(example.conversation[1].calls[0].raw_arguments) for example in examples]
    assert given_arguments == [{"a": 1, "deep": {"x": "y"}}, {"b": "two", "deep": {"z": [1]}}]
    (example,) = jsonl(path=write(tmp_path, "n.json", json.dumps([{"messages": call(a=None)}])), split="all").examples
    assert json.loads(example.conversation[1].calls[0].raw_arguments) == {"a": None}


def test_nulls_of_a_table_are_no_keys_of_tools_meta_and_variables(tmp_path: Path) -> None:
    schemas = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"type": "integer"}}}}},
    ]
    rows = [
        {"prompt": "q", "response": "r", "tools": schemas[:1], "meta": {"a": 1}, "chat_template_kwargs": {"x": True}},
        {"prompt": "q", "response": "r", "tools": schemas[1:], "meta": {"b": 2}, "chat_template_kwargs": {"y": 1}},
    ]
    first, second = jsonl(path=arrow(tmp_path, rows), split="all").examples
    assert (first.variables, first.meta) == ({"tools": schemas[:1], "x": True}, {"a": 1})
    assert (second.variables, second.meta) == ({"tools": schemas[1:], "y": 1}, {"b": 2})
