"""Conversations with tools as token ids: written as rollouts of several turns are, and calls read from answers."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.commands.serve.answering import Answer
from posttrain.commands.serve.requests import BadRequest, ChatMessage
from posttrain.engines.episodes import show_tools
from posttrain.engines.models import OpenedModel, plays
from posttrain.environments.calls import Request, read_calls
from posttrain.environments.tools import by_name, properties_of, read_text
from posttrain.errors import UsageError
from posttrain.recipes.sections import Word
from posttrain.render import Template, encode_prompt
from posttrain.render.encoding import markers_of
from posttrain.render.replies import encode_turn, reply_frame
from posttrain.render.template_calls import call_form
from posttrain.render.turns import mark
from posttrain.types import Call, Turn

MAX_REMEMBERED = 4096  # answers with calls whose ids are kept

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Reply:
    """An answer as a message: its text without its calls, and these as (id, tool, arguments as JSON)."""

    text: str
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def content(self) -> str | None:
        """The text of the message; None where there are only calls."""
        return self.text or (None if self.calls else "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form."""
        return [
            {"id": own, "type": "function", "function": {"name": tool, "arguments": arguments}}
            for own, tool, arguments in self.calls
        ]


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
        rollout = recipe.rollout if recipe and plays(opened.source, Word(name=self.template.name)) else None
        self.shows = rollout is None or bool(rollout.show_tools)
        self._sampled: OrderedDict[str, tuple[Reply, list[int]]] = OrderedDict()

    @property
    def call_tag(self) -> str:
        """The beginning of a call."""
        return self.form.tag

    def encode(self, messages: Sequence[ChatMessage], tools: Schemas) -> list[int]:
        """Encode a conversation as a prompt, up to where the model continues.

        Raises:
            BadRequest: calls without results, results without calls, or tools that cannot be shown.
            UsageError: as ``encode_prompt``, and a chat template that rewrites history.
        """
        template = self._showing(tools) if tools and self.shows else self.template
        with_tools = (i for i, one in enumerate(messages) if one.role == "tool" or one.tool_calls)
        at = next(with_tools, len(messages))
        ids = encode_prompt(self.tokenizer, template, [one.message() for one in messages[:at]])
        while at < len(messages):
            message = messages[at]
            if message.role != "assistant":
                what = "a result of a tool that was not called"
                what = what if message.role == "tool" else "behind the results of its calls the assistant speaks"
                raise BadRequest(f"messages.{at}: {what}; leave it out", "messages")
            ids += self._answer_ids(message, at, ids)
            if message.tool_calls:
                results = _results(messages, at)
                frame = reply_frame(self.tokenizer, template)
                ids += frame.encode(self.tokenizer, template, results, self.form.results, ids[-1])
                at += 1 + len(results)
            else:
                ids += self._question_ids(messages, at + 1, template, ids[-1])
                at += 2
        return ids

    def read(self, answer: Answer) -> Reply:
        """Read the calls in an answer that has ended; what is no call stays text."""
        text, opening = answer.text.removeprefix(self.template.opening), self.template.opening
        calls, outside, at = [], [opening], 0
        for request in read_calls(text, self.form) if answer.finish == "stop" and answer.job.tools else []:
            arguments = _arguments(request, answer.job.tools)
            if arguments is not None:
                outside.append(text[at : request.place[0]])
                at = request.place[1]
                calls.append((f"call_{secrets.token_hex(12)}", request.tool, arguments))
        reply = Reply("".join([*outside, text[at:]]), tuple(calls)) if calls else Reply(answer.text)
        if calls and answer.tokens[-1].id in answer.job.sampling.stop_ids:  # and not at a stop text
            self._remember(reply, [token.id for token in answer.tokens])
        return reply

    def _remember(self, reply: Reply, ids: list[int]) -> None:
        self._sampled[reply.calls[0][0]] = (reply, ids)
        self._sampled.move_to_end(reply.calls[0][0])
        if len(self._sampled) > MAX_REMEMBERED:
            self._sampled.popitem(last=False)

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
        """Return the ids of a message of the assistant: those that were sampled, or else those of its text."""
        calls = tuple((call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
        known, ids = self._sampled.get(calls[0][0] if calls else "", (None, []))
        if known is not None and known == Reply(message.text, calls):
            self._remember(known, ids)
            return list(ids)
        for n, (_, _, arguments) in enumerate(calls):
            if not _is_object(arguments):
                place = f"messages.{at}.tool_calls.{n}.function.arguments"
                raise BadRequest(f"{place}: they are the text of a JSON object", "messages")
        text = message.text.removeprefix(self.template.opening).strip()
        written = Turn(text, tuple(Call(tool, arguments, "", "ok") for _, tool, arguments in calls))
        return encode_turn(self.tokenizer, self.template, written, self.form, prompt)

    def _question_ids(self, messages: Sequence[ChatMessage], at: int, template: Template, last: int) -> list[int]:
        """Return the ids of the user's message ``at``, which follows an answer that was given with tools."""
        if at >= len(messages):
            raise BadRequest("the last message is the assistant's, so nothing is left to answer", "messages")
        if messages[at].role != "user" or not messages[at].text.strip():
            raise BadRequest(f"messages.{at}: behind an answer comes a text of the user", "messages")
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
    results: dict[str, str] = {}
    for i, message in enumerate(messages[at + 1 : at + 1 + len(wanted)], start=at + 1):
        if message.role != "tool":
            break
        if message.tool_call_id is None or message.tool_call_id not in wanted or message.tool_call_id in results:
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
    stated = request.arguments
    nothing: Mapping[str, Any] = {"function": {}}
    schema = next((one for one in tools if one["function"]["name"] == request.tool), nothing)
    texts = {
        name: isinstance(one, Mapping) and one.get("type") == "string" for name, one in properties_of(schema).items()
    }
    try:
        by_key = by_name(request.tool, texts, stated) if isinstance(stated, str) else stated
        by_key = {key: read_text(value, texts.get(key, True)) for key, value in by_key.items()}
        written = json.dumps(by_key, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
