"""Conversations with tools as token ids: written as rollouts of several turns are, and calls read from answers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.commands.serve.answering import Answer
from posttrain.commands.serve.requests import BadRequest, ChatMessage
from posttrain.data.render import Template, encode_prompt
from posttrain.data.render.assistant import encode_turn, reply_frame
from posttrain.data.render.encoding import markers_of
from posttrain.data.render.template import mark
from posttrain.data.render.template_calls import call_form
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.calls import Request, read_calls
from posttrain.sampling.environments.tools import by_name, properties_of, read_text
from posttrain.sampling.episodes import show_tools
from posttrain.sampling.models import OpenedModel, plays
from posttrain.types import Call, Turn

MAX_REMEMBERED = 4096  # answers with calls whose ids are kept

Schemas = Sequence[Mapping[str, Any]]


class Conversations:
    """Encodes conversations with one model.

    The sampled ids of the last answers with calls are kept, and used again where a client sends such an answer back
    unchanged. Any other answer is encoded from its text, as a demonstration is. ``shows``: the prompt lists the tools;
    that of a run which was trained without them (``rollout.show_tools: false``) does not.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self.tokenizer, self.template = opened.tokenizer, opened.grader.template
        self.form = call_form(self.tokenizer, self.template)
        recipe = opened.source.recipe
        rollout = recipe.rollout if recipe and plays(opened.source, Component(name=self.template.name)) else None
        self.shows = rollout is None or bool(rollout.show_tools)
        self._sampled: dict[str, tuple[str, list[dict[str, str]], list[int]]] = {}  # text, functions, ids by first call

    def encode(self, messages: Sequence[ChatMessage], tools: Schemas) -> list[int]:
        """Encode a conversation as a prompt, up to where the model continues.

        Raises:
            BadRequest: calls without results, results without calls, or tools that cannot be shown.
            UsageError: as ``encode_prompt``, and a chat template that rewrites history.
        """
        template = self._showing(tools) if tools and self.shows else self.template
        at = next((i for i, one in enumerate(messages) if one.role == "tool" or one.tool_calls), len(messages))
        ids = encode_prompt(self.tokenizer, template, [one.message() for one in messages[:at]])
        while at < len(messages):
            message = messages[at]
            if message.role == "tool":
                raise BadRequest(f"messages.{at}: a result of a tool that was not called; leave it out", "messages")
            if message.role != "assistant":
                raise BadRequest(f"messages.{at}: after the results of its calls the assistant speaks", "messages")
            ids += self._answer_ids(message, at, ids)
            if message.tool_calls:
                results, frame = _results(messages, at), reply_frame(self.tokenizer, template)
                ids += frame.encode(self.tokenizer, template, results, self.form.results, ids[-1])
                at += 1 + len(results)
            else:
                ids += self._question_ids(messages, at + 1, template, ids[-1])
                at += 2
        return ids

    def read(self, answer: Answer) -> dict[str, Any]:
        """Return an answer that has ended as OpenAI's message, its calls apart; what is no call stays text."""
        opening, tools = self.template.opening, answer.job.tools
        text = answer.text.removeprefix(opening)
        calls: list[dict[str, Any]] = []
        outside, at = [opening], 0
        for request in read_calls(text, self.form) if answer.finish == "stop" and tools else []:
            if (arguments := _arguments(request, tools)) is not None:
                outside.append(text[at : request.place[0]])
                at = request.place[1]
                function = {"name": request.tool, "arguments": arguments}
                calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls:
            content = "".join([*outside, text[at:]])
            message |= {"content": content or None, "tool_calls": calls}
            if answer.ids[-1] in answer.job.sampling.stop_ids:  # and not at a stop text
                self._sampled[calls[0]["id"]] = (content, [call["function"] for call in calls], answer.ids)
                if len(self._sampled) > MAX_REMEMBERED:
                    del self._sampled[next(iter(self._sampled))]
        return message

    def _showing(self, tools: Schemas) -> Template:
        try:
            written = json.dumps(tools, ensure_ascii=False)
            shown = show_tools(self.template, tools, self.form)
        except RecursionError:
            raise BadRequest("tools: a schema is nested too deeply", "tools") from None
        if self.form.is_native:  # the chat template writes them, and what it writes is trusted
            start, end, _ = next(markers_of(self.tokenizer).find(written), (0, 0, 0))
            if end or mark(0)[0] in written:
                marker = written[start:end] or mark(0)[0]
                raise BadRequest(f"tools: they hold {marker!r}, which is more than text to the model", "tools")
        return shown

    def _answer_ids(self, message: ChatMessage, at: int, prompt: Sequence[int]) -> list[int]:
        calls = message.tool_calls or ()
        functions = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
        text, known, ids = self._sampled.get(calls[0].id if calls else "", ("", [], []))
        if ids and (text, known) == (message.text, functions):
            return list(ids)
        for n, function in enumerate(functions):
            try:
                is_object = isinstance(json.loads(function["arguments"]), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                place = f"messages.{at}.tool_calls.{n}.function.arguments"
                raise BadRequest(f"{place}: they are the text of a JSON object", "messages")
        text = message.text.removeprefix(self.template.opening).strip()
        written = Turn(text, tuple(Call(one["name"], one["arguments"], "", "ok") for one in functions))
        return encode_turn(self.tokenizer, self.template, written, self.form, prompt)

    def _question_ids(self, messages: Sequence[ChatMessage], at: int, template: Template, last: int) -> list[int]:
        """Return the ids of the user's message ``at``, which follows an answer that was given with tools."""
        if at >= len(messages):
            raise BadRequest("the last message is the assistant's, so nothing is left to answer", "messages")
        if messages[at].role != "user" or not messages[at].text.strip():
            raise BadRequest(f"messages.{at}: after an answer comes a text of the user", "messages")
        try:
            frame = reply_frame(self.tokenizer, template, ("user",))
        except UsageError as error:
            about = f"messages.{at}: leave out the messages about tools of earlier questions: {error}"
            raise BadRequest(about, "messages") from None
        return frame.encode(self.tokenizer, template, [messages[at].text], ("", ""), last)


def _results(messages: Sequence[ChatMessage], at: int) -> list[str]:
    """Return the results of the calls in message ``at``, in the order of the calls.

    Raises:
        BadRequest: not one result for each call.
    """
    wanted = [call.id for call in messages[at].tool_calls or ()]
    if len(set(wanted)) < len(wanted):
        raise BadRequest(f"messages.{at}: two of its calls have one id", "messages")
    results: dict[str | None, str] = {}
    for i, message in enumerate(messages[at + 1 : at + 1 + len(wanted)], start=at + 1):
        if message.role != "tool":
            break
        if message.tool_call_id not in wanted or message.tool_call_id in results:
            problem = f"tool_call_id {message.tool_call_id!r:.80} is no call of message {at} without a result"
            raise BadRequest(f"messages.{i}: {problem}", "messages")
        results[message.tool_call_id] = message.text
    for name in wanted:
        if name not in results:
            problem = f"its call {name!r:.80} has no result; a message of the role tool follows for each call"
            raise BadRequest(f"messages.{at}: {problem}", "messages")
    return [results[name] for name in wanted]


def _arguments(request: Request, tools: Schemas) -> str | None:
    """Return the arguments of a call as JSON; None if it is no call, or they are no object."""
    if request.wrong or not request.tool:
        return None
    nothing: Mapping[str, Any] = {"function": {}}
    schema = next((one for one in tools if one["function"]["name"] == request.tool), nothing)
    texts = {
        name: isinstance(one, Mapping) and one.get("type") == "string" for name, one in properties_of(schema).items()
    }
    try:
        raw_arguments = request.arguments
        by_key = by_name(request.tool, texts, raw_arguments) if isinstance(raw_arguments, str) else raw_arguments
        by_key = {key: read_text(value, texts.get(key, True)) for key, value in by_key.items()}
        written = json.dumps(by_key, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written
