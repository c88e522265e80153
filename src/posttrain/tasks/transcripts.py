"""Conversations in which tools are used, as OpenAI's API and most data sets write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.tasks.reading import Row
from posttrain.types import Call, Message, Turn


def uses_tools(row: Row, key: str) -> bool:
    """Whether a message under ``key`` is a tool's, or calls one."""
    items = row.data.get(key)
    return isinstance(items, Sequence) and any(isinstance(item, Mapping) and _is_about_tools(item) for item in items)


def read_transcript(row: Row, key: str) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
    """The messages without those about tools, and the turns in which these were used; the last message answers.

    An assistant's message with ``tool_calls`` (``{"function": {"name": ..., "arguments": ...}}``, the arguments as an
    object or as its text) is followed by one message of the role ``tool`` for each, in their order.

    Raises:
        DataError: calls without results or results without calls, tools before the last message of the user, or no
            answer after them.
    """
    items: Sequence[Any] = row.data[key]
    about = [i for i, item in enumerate(items) if isinstance(item, Mapping) and _is_about_tools(item)]
    first, last = about[0], about[-1]
    turns, at = [], first
    while at <= last:
        calls = _calls(row, key, at, items[at])
        results = [_result(row, key, at + 1 + n, items) for n in range(len(calls))]
        content = items[at].get("content")
        text = "" if content in (None, "") else row.checked(content, f"{key} {at + 1} content")
        told = (replace(call, result=result) for call, result in zip(calls, results, strict=True))
        turns.append(Turn(text, tuple(told)))
        at += 1 + len(calls)
    rest = row.data[key][last + 1 :]
    if len(rest) != 1 or not isinstance(rest[0], Mapping) or rest[0].get("role") != "assistant":
        raise row.fail(
            f"{key!r}: after its tools the assistant answers, in one last message; leave out what follows, or write a "
            "row for each answer"
        )
    messages = replace(row, data={**row.data, key: [*items[:first], rest[0]]}).messages(key)
    if len(messages) < 2 or messages[-2].role != "user":
        raise row.fail(f"{key!r}, message {first + 1}: tools are used in answer to a message of the user")
    return messages, tuple(turns)


def _is_about_tools(item: Mapping[str, Any]) -> bool:
    return item.get("role") == "tool" or bool(item.get("tool_calls"))


def _calls(row: Row, key: str, at: int, item: Any) -> list[Call]:
    if isinstance(item, Mapping) and item.get("tool_calls") and not isinstance(item["tool_calls"], list):
        raise row.fail(f"{key!r}, message {at + 1}: 'tool_calls' is a list of calls")
    if not isinstance(item, Mapping) or item.get("role") != "assistant" or not item.get("tool_calls"):
        what = "a result of a tool that was not called" if _role(item) == "tool" else "a message amid the use of tools"
        raise row.fail(
            f"{key!r}, message {at + 1}: {what}; an assistant's message with 'tool_calls' comes before results"
        )
    return [_call(row, f"{key} {at + 1} tool_calls {n}", one) for n, one in enumerate(item["tool_calls"], start=1)]


def _call(row: Row, place: str, stated: Any) -> Call:
    function = stated.get("function", stated) if isinstance(stated, Mapping) else {}
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise row.fail(f'{place!r}: a call is {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    name = row.checked(function.get("name"), f"{place} name")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise row.fail(f"{place!r}: its arguments hold a number that JSON has not (NaN, Infinity)") from None
    return Call(name, row.checked(written, f"{place} arguments"), "", "ok")


def _result(row: Row, key: str, at: int, items: Sequence[Any]) -> str:
    if at >= len(items) or _role(items[at]) != "tool":
        raise row.fail(
            f"{key!r}, message {at + 1}: a call has no result; a message of the role tool follows for each call"
        )
    content = items[at].get("content")
    return "" if content in (None, "") else row.checked(content, f"{key} {at + 1} content")


def _role(item: Any) -> Any:
    return item.get("role") if isinstance(item, Mapping) else None
