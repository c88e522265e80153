"""Conversations with tools as token ids: written as rollouts of several turns are, and calls read from answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.commands.serve.answering import ServedAnswer
from posttrain.commands.serve.requests import BadRequest
from posttrain.data.messages import read_messages
from posttrain.data.reading import Row
from posttrain.data.render import Template, encode_prompt
from posttrain.data.render.assistant import encode_turn, reply_frame
from posttrain.data.render.template_calls import call_form
from posttrain.errors import DataError, UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.calls import Request, read_calls, split_calls
from posttrain.sampling.episodes import find_marker, show_tools
from posttrain.sampling.models import OpenedModel, plays
from posttrain.types import Message, Turn

MAX_REMEMBERED = 4096  # recent answers with tool calls, whose ids are kept

Schemas = Sequence[Mapping[str, Any]]
Written = tuple[str, list[tuple[Any, Any]]]  # content and calls, used to recognize a returned answer


class Conversations:
    """Encodes conversations for a model.

    Sampled ids are cached for recent answers with tool calls, and reused if a client sends such an answer back
    unchanged. Other answers are encoded from text, like demonstrations. ``shows``: list tools in the prompt. False
    for runs trained with ``rollout.show_tools: false``.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self.tokenizer = opened.tokenizer
        self.template = opened.grader.template
        self.form = call_form(self.tokenizer, self.template)
        recipe = opened.source.recipe
        rollout = None
        if recipe and plays(opened.source, Component(name=self.template.name)):
            rollout = recipe.rollout
        self.shows = rollout is None or bool(rollout.show_tools)
        self._sampled: dict[str, tuple[Written, list[int]]] = {}  # by the first call's id

    def encode(self, messages: Sequence[Mapping[str, object]], tools: Schemas) -> list[int]:
        """Encode a conversation as a prompt for the next reply.

        Raises:
            BadRequest: an invalid message, calls and results that do not match, or tools that cannot be shown.
            UsageError: see ``encode_prompt``; also a chat template that rewrites history.
        """
        template = self.template
        if tools and self.shows:
            template = self._showing(tools)
        turns = _read_messages(messages)
        at = 0
        while at < len(turns) and not turns[at].calls:
            at += 1
        ids = encode_prompt(self.tokenizer, template, turns[:at])
        while at < len(turns):
            turn = turns[at]
            replies = turns[at + 1 : at + 1 + max(1, len(turns[at].calls))]
            if turn.role != "assistant" or not replies or (replies[0].role != "user" and not turn.calls):
                problem = "after an answer with tools, user messages and answers must alternate"
                raise BadRequest(
                    f"messages, from message {at + 1} on: {problem}, ending with a user message", "messages"
                )
            ids += self._answer_ids(turn, messages[at], ids)
            roles: tuple[str, ...] = ("user",)
            tags = ("", "")
            if turn.calls:
                roles = ("tool", "user")
                tags = self.form.results
            try:
                frame = reply_frame(self.tokenizer, template, roles)
            except UsageError as error:
                if turn.calls:
                    raise
                what = f"messages, message {at + 2}: remove tool messages from earlier questions: {error}"
                raise BadRequest(what, "messages") from None
            ids += frame.encode(self.tokenizer, template, [one.content for one in replies], tags, ids[-1])
            at += 1 + len(replies)
        return ids

    def read(self, answer: ServedAnswer) -> dict[str, Any]:
        """Convert a finished answer to OpenAI format with parsed calls; unparseable calls remain text."""
        opening = self.template.opening
        tools = answer.job.tools
        text = answer.text.removeprefix(opening)
        requested: Sequence[Request] = ()
        if answer.finish == "stop" and tools:
            requested = read_calls(text, self.form)
        around, named = split_calls(text, requested, tools)
        calls: list[dict[str, Any]] = []
        for name, arguments in named:
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls:
            content = opening + around
            message |= {"content": content or None, "tool_calls": calls}
            if answer.ids[-1] in answer.job.sampling.stop_ids:  # ended by a token, not by a stop text
                self._sampled[calls[0]["id"]] = (_as_written(message), answer.ids)
                if len(self._sampled) > MAX_REMEMBERED:
                    del self._sampled[next(iter(self._sampled))]
        return message

    def _showing(self, tools: Schemas) -> Template:
        marker = find_marker(tools, self.form, self.tokenizer)
        if marker:
            raise BadRequest(f"tools: contain {marker!r}, a special token for this model", "tools")
        return show_tools(self.template, tools, self.form)

    def _answer_ids(self, turn: Message, given: Mapping[str, Any], prompt: Sequence[int]) -> list[int]:
        if turn.calls and given.get("tool_calls"):
            first = str(given["tool_calls"][0].get("id"))
            known, ids = self._sampled.get(first, (None, []))
            if known == _as_written(given):
                return list(ids)
        written = Turn(turn.text.removeprefix(self.template.opening).strip(), turn.calls)
        return encode_turn(self.tokenizer, self.template, written, self.form, prompt)


def _read_messages(messages: Sequence[Mapping[str, object]]) -> tuple[Message, ...]:
    """Parse messages with the same rules as data rows.

    Raises:
        BadRequest: an invalid message, or tool results without matching calls.
    """
    _check_ids(messages)
    messages = [{key: value for key, value in one.items() if key != "name"} for one in messages]  # OpenAI's; not shown
    try:
        read = read_messages(Row("messages", 1, {"messages": messages}), "messages")
    except DataError as error:
        what = str(error).partition(": ")[2].replace(" from the row, or add it to task.ignore_keys", "")
        raise BadRequest(what, "messages") from None
    if not all(one.is_trained for one in read):
        raise BadRequest("messages: no training here; remove 'train' and 'weight'", "messages")
    return read


def _as_written(message: Mapping[str, Any]) -> Written:
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = "".join(part["text"] for part in text)
    functions = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        functions.append((function.get("name"), function.get("arguments")))
    return text, functions


def _check_ids(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check fields that rows may omit but conversations require: roles, and unique ids for tool calls."""
    for number, one in enumerate(messages, start=1):
        calls = one.get("tool_calls") or []
        where = f"messages, message {number}"
        is_listed = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
        if "role" not in one or not is_listed:
            raise BadRequest(f"{where}: needs a 'role', and 'tool_calls' must be a list of calls", "messages")
        ids = [call.get("id") for call in calls]
        if not all(isinstance(one_id, str) and one_id for one_id in ids) or len(set(ids)) < len(ids):
            raise BadRequest(f"{where}: every call needs a unique 'id', a string", "messages")
        if (one["role"] == "tool") != isinstance(one.get("tool_call_id"), str):
            raise BadRequest(
                f"{where}: 'tool_call_id' is required for role tool, and not allowed otherwise", "messages"
            )
