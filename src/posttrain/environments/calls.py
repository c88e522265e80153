"""Calls of tools as a model writes them, read from the text of one of its turns.

Two forms. ``hermes``: the models' own where the chat template shows it, JSON between ``<tool_call>`` and
``</tool_call>``. ``tagged``: ``<tool>name: arguments</tool>``, for models without one; the arguments are those of the
tool as a JSON object, or the bare text of its only one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.environments.tools import usage_of
from posttrain.render.replies import CALL_TAGS, Form

MAX_CALLS = 16  # of one turn


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it was written. ``wrong`` says what makes it no call; then there are no arguments.

    ``place``: where it begins and ends in the text, its tags included.
    """

    tool: str
    stated: str
    arguments: Mapping[str, Any] | str = ""
    wrong: str = ""
    place: tuple[int, int] = field(default=(0, 0), compare=False)


def read_calls(text: str, form: Form) -> list[Request]:
    """The calls in a turn, in order; the one beyond ``MAX_CALLS`` is refused and those behind it are not read.

    In the form ``hermes`` what was thought (up to the last ``</think>``) calls nothing.
    """
    requests: list[Request] = []
    opening, closing = CALL_TAGS[form]
    first = text.rfind("</think>") + len("</think>") if form == "hermes" and "</think>" in text else 0
    for start, end, closed in _between(text, first, opening, closing):
        content, place = text[start:end].strip(), (start - len(opening), end + len(closing) * closed)
        if len(requests) == MAX_CALLS:
            wrong = f"one turn calls at most {MAX_CALLS} tools; call again in the next"
            return [*requests, Request("", "", wrong=wrong, place=place)]
        if not closed:
            request = Request("", content, wrong=f"the call does not end with {closing}")
        else:
            request = _read_json(content) if form == "hermes" else _read_tagged(content)
        requests.append(replace(request, place=place))
    return requests


def describe_tools(schemas: Iterable[Mapping[str, Any]]) -> str:
    """What a model without tools of its own is told: how they are called, and which there are."""
    lines = [
        "You can use tools. To call one, write <tool>name: arguments</tool> and end your turn; its result follows "
        "between <result> and </result>. Arguments are a JSON object, or the plain value of the only one.",
    ]
    for schema in schemas:
        name, about = schema["function"]["name"], schema["function"].get("description") or ""
        lines.append(f"- {name}: {' '.join(about.split())} It takes: {usage_of(schema)}.")
    return "\n".join(lines)


def _between(text: str, first: int, opening: str, closing: str) -> Iterator[tuple[int, int, bool]]:
    """Where that begins and ends which stands between each pair of tags, and whether it was closed.

    An opening tag inside begins anew. Nothing before ``first`` is looked at.
    """
    at = text.find(opening, first)
    while at >= 0:
        start = at + len(opening)
        end, again = text.find(closing, start), text.find(opening, start)
        if end < 0 or 0 <= again < end:
            yield start, again if again >= 0 else len(text), False
            at = again
        else:
            yield start, end, True
            at = text.find(opening, end + len(closing))


def _read_json(content: str) -> Request:
    try:
        call = json.loads(content)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return Request("", content, wrong=f"the call is no JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return Request("", content, wrong='a call is {"name": "...", "arguments": {...}}')
    return Request(call["name"], json.dumps(arguments, ensure_ascii=False), arguments)


def _read_tagged(content: str) -> Request:
    name, _, arguments = content.partition(":")
    return Request(name.strip(), arguments.strip(), arguments.strip())
