"""Conversations with tools in a user's own rows: what is learnt, what is read, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.errors import DataError
from posttrain.models.sources import TINY
from posttrain.render.rows import rows_of
from posttrain.tasks.jsonl import jsonl
from posttrain.types import Call, Message, Turn

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 20 plus 22?"}]
ANSWER = {"role": "assistant", "content": "It is 42."}


def calling(*expressions: str, content: str | None = None, as_text: bool = True) -> dict[str, Any]:
    stated = [{"expression": one} for one in expressions]
    calls = [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "calculator", "arguments": json.dumps(a) if as_text else a},
        }
        for a in stated
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def told(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content}


def read(path: Path, *messages: dict[str, Any], **fields: Any) -> Any:
    path = path / "rows.jsonl"
    path.write_text(json.dumps({"messages": list(messages), **fields}) + "\n", encoding="utf-8")
    (example,) = jsonl(path=str(path), split="test").examples
    return example


@pytest.mark.parametrize("as_text", [True, False])
def test_calls_and_results_become_turns(tmp_path: Path, as_text: bool) -> None:
    example = read(
        tmp_path,
        *ASKED,
        calling("20 + 2", "2 + 20", content="Two ways.", as_text=as_text),
        told("22"),
        told("22"),
        calling("22 + 20", as_text=as_text),
        told("42"),
        ANSWER,
        answer="42",
    )
    assert example.messages == (Message("system", "Be brief."), Message("user", "What is 20 plus 22?"))
    assert (example.demonstration, example.answer) == ("It is 42.", "42")

    def call(expression: str, result: str) -> Call:
        return Call("calculator", json.dumps({"expression": expression}), result, "ok")

    first = Turn("Two ways.", (call("20 + 2", "22"), call("2 + 20", "22")))
    assert example.turns == (first, Turn("", (call("22 + 20", "42"),)))


def test_what_is_trained_of_it(tmp_path: Path) -> None:
    example = read(tmp_path, *ASKED, calling("20 + 22"), told("42"), ANSWER, answer="42")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    template = registry.find("template", "plain").bind({})()
    ((row,),) = rows_of(tokenizer, template, example, "demonstration")
    trained = [i for t, i in enumerate(row.ids) if t >= row.prompt_length and t not in row.heard]
    said = tokenizer.decode(trained)
    assert said.count("<tool>calculator: 20 + 22</tool>") == 1
    assert "It is 42." in said
    assert "<result>" not in said
    assert "<result>42</result>" in tokenizer.decode([row.ids[t] for t in sorted(row.heard)])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([*ASKED, calling("1"), ANSWER], "message 4: a call has no result; a message of the role tool follows"),
        ([*ASKED, calling("1", "2"), told("1"), ANSWER], "message 5: a call has no result"),
        ([*ASKED, told("1"), ANSWER], "message 3: a result of a tool that was not called"),
        ([*ASKED, calling("1"), told("1"), told("2"), ANSWER], "message 5: a result of a tool that was not called"),
        ([*ASKED, calling("1"), told("1")], "the key 'answer' is missing"),  # with one it is a prompt
        ([*ASKED, calling("1"), told("1"), ANSWER, ASKED[1]], "the key 'answer' is missing"),
        ([*ASKED, calling("1"), told("1"), ASKED[1], calling("1"), told("1"), ANSWER], "message 5: a message amid"),
        ([calling("1"), told("1"), ANSWER], "message 1: tools are used in answer to a message of the user"),
        (
            [*ASKED, {**calling("1"), "tool_calls": "calculator"}, told("1"), ANSWER],
            "message 3: 'tool_calls' is a list",
        ),
        ([*ASKED, calling("\ud800"), told("1"), ANSWER], "tool_calls 1 arguments' holds half of a surrogate pair"),
        ([*ASKED, calling("\ud800", as_text=False), told("1"), ANSWER], "arguments' holds half of a surrogate pair"),
        ([*ASKED, calling(float("nan")), told("1"), ANSWER], "a number that JSON has not"),  # type: ignore[arg-type]
        (
            [*ASKED, {**calling(), "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, told("1"), ANSWER],
            "messages 3 tool_calls 1': a call is",
        ),
        (
            [*ASKED, {**calling(), "tool_calls": [{"function": {}}]}, told("1"), ANSWER],
            "1 name' must be text",
        ),
        ([*ASKED, {**calling(), "tool_calls": [None]}, told("1"), ANSWER], "1 name' must be text"),
        ([*ASKED, calling("1", content=3), told("1"), ANSWER], "messages 3 content' must be text"),  # type: ignore[arg-type]
        ([*ASKED, None, calling("1"), told("1"), ANSWER], "message 3: needs the keys"),
    ],
)
def test_what_cannot_be_learnt_is_refused(tmp_path: Path, messages: list[Any], what: str) -> None:
    with pytest.raises(DataError) as refusal:
        read(tmp_path, *messages)
    assert what in str(refusal.value)
    assert "line 1" in str(refusal.value) or ":1" in str(refusal.value)


def test_a_null_instead_of_calls_is_none(tmp_path: Path) -> None:
    example = read(tmp_path, *ASKED, {**ANSWER, "tool_calls": None}, answer="42")
    assert (example.turns, example.demonstration) == ((), "It is 42.")
