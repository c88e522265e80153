"""Tools in a conversation: OpenAI's messages as the ids of a rollout of several turns, and calls as OpenAI's."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.commands.serve import wire
from posttrain.commands.serve.speech import Speech
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

MOST_REMEMBERED = 4096  # answers with calls whose ids are kept

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Said:
    """An answer as a message: its text without its calls, and these as (id, tool, arguments as JSON)."""

    text: str
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def content(self) -> str | None:
        """The text of the message; None where there are calls alone."""
        return self.text or (None if self.calls else "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls as OpenAI writes them."""
        return [
            {"id": own, "type": "function", "function": {"name": tool, "arguments": arguments}}
            for own, tool, arguments in self.calls
        ]


class Conversations:
    """How one model's conversations are written: with tools, as rollouts of several turns are (``engines.episodes``).

    What the model wrote stays as it was sampled: the ids of the last answers with calls are kept, and stand there again
    where a client sends such an answer back as it was. Any other is written from its text, as a demonstration is.
    ``shows``: the prompt says which tools there are; a run that did not is not told here either.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self.tokenizer, self.template = opened.tokenizer, opened.grader.template
        self.form = call_form(self.tokenizer, self.template)
        recipe = opened.source.recipe
        rollout = recipe.rollout if recipe and plays(opened.source, Word(name=self.template.name)) else None
        self.shows = rollout is None or bool(rollout.show_tools)
        self._sampled: OrderedDict[str, tuple[Said, list[int]]] = OrderedDict()

    @property
    def call_tag(self) -> str:
        """What a call begins with."""
        return self.form.tag

    def encode(self, turns: Sequence[wire.Turn], tools: Schemas) -> list[int]:
        """The prompt that a conversation is, up to where the model speaks.

        Raises:
            BadRequest: calls without results, results without calls, or tools that cannot be shown.
            UsageError: as ``encode_prompt``, and a chat template that rewrites history.
        """
        template = self._showing(tools) if tools and self.shows else self.template
        at = next((i for i, turn in enumerate(turns) if turn.is_about_tools), len(turns))
        ids = encode_prompt(self.tokenizer, template, [turn.message() for turn in turns[:at]])
        while at < len(turns):
            said = turns[at]
            if said.role != "assistant":
                what = "a result of a tool that was not called"
                what = what if said.role == "tool" else "behind the results of its calls the assistant speaks"
                raise wire.BadRequest(f"messages.{at}: {what}; leave it out", "messages")
            ids += self._spoken(said, at, ids)
            if said.tool_calls:
                results = _results(turns, at)
                frame = reply_frame(self.tokenizer, template)
                ids += frame.encode(self.tokenizer, template, results, self.form.results, ids[-1])
                at += 1 + len(results)
            else:
                ids += self._asked(turns, at + 1, template, ids[-1])
                at += 2
        return ids

    def read(self, speech: Speech, tools: Schemas, ends: frozenset[int]) -> Said:
        """An answer that has ended, with the calls in it; what is no call stays text.

        Args:
            ends: ids that end a turn; of one that ended otherwise (at a stop text) no ids are kept.
        """
        opening = self.template.opening
        text = speech.text.removeprefix(opening)
        calls, outside, at = [], [opening], 0
        for request in read_calls(text, self.form) if speech.finish == "stop" else []:
            arguments = _arguments(request, tools)
            if arguments is not None:
                outside.append(text[at : request.place[0]])
                at = request.place[1]
                calls.append((f"call_{secrets.token_hex(12)}", request.tool, arguments))
        said = Said("".join([*outside, text[at:]]), tuple(calls))
        if calls and speech.ids[-1] in ends:
            self._sampled[calls[0][0]] = (said, list(speech.ids))
            if len(self._sampled) > MOST_REMEMBERED:
                self._sampled.popitem(last=False)
        return said

    def _showing(self, tools: Schemas) -> Template:
        try:
            written = json.dumps(tools, ensure_ascii=False)
            shown = show_tools(self.template, tools, self.form)
        except RecursionError:
            raise wire.BadRequest("tools: a schema is nested too deeply", "tools") from None
        if self.form.is_native:  # the chat template writes them, and what it writes is trusted
            start, end, _ = next(markers_of(self.tokenizer).find(written), (0, 0, 0))
            if end or mark(0)[0] in written:
                told = written[start:end] or mark(0)[0]
                raise wire.BadRequest(f"tools: they hold {told!r}, which is more than text to the model", "tools")
        return shown

    def _spoken(self, said: wire.Turn, at: int, prompt: Sequence[int]) -> list[int]:
        """The ids of a message of the assistant: those that were sampled, or else those of its text."""
        calls = tuple((call.id, call.function.name, call.function.arguments) for call in said.tool_calls or ())
        told, ids = self._sampled.get(calls[0][0] if calls else "", (None, []))
        if told == Said(said.text, calls):
            self._sampled.pop(calls[0][0], None)  # and behind the others again
            self._sampled[calls[0][0]] = (told, ids)
            return list(ids)
        for n, (_, _, arguments) in enumerate(calls):
            if not _is_object(arguments):
                place = f"messages.{at}.tool_calls.{n}.function.arguments"
                raise wire.BadRequest(f"{place}: they are the text of a JSON object", "messages")
        text = said.text.removeprefix(self.template.opening).strip()
        written = Turn(text, tuple(Call(tool, arguments, "", "ok") for _, tool, arguments in calls))
        return encode_turn(self.tokenizer, self.template, written, self.form, prompt)

    def _asked(self, turns: Sequence[wire.Turn], at: int, template: Template, last: int) -> list[int]:
        """The ids of the user's message ``at``, behind an answer that was given with tools."""
        if at >= len(turns):
            raise wire.BadRequest("the last message is the assistant's, so nothing is left to answer", "messages")
        if turns[at].role != "user" or not turns[at].text.strip():
            raise wire.BadRequest(f"messages.{at}: behind an answer comes a text of the user", "messages")
        try:
            frame = reply_frame(self.tokenizer, template, ("user",))
        except UsageError as error:
            about = f"messages.{at}: leave out the messages about tools of earlier questions: {error}"
            raise wire.BadRequest(about, "messages") from None
        return frame.encode(self.tokenizer, template, [turns[at].text], ("", ""), last)


def _results(turns: Sequence[wire.Turn], at: int) -> list[str]:
    """What came of the calls in message ``at``, in their order.

    Raises:
        BadRequest: not one result for each call.
    """
    wanted = [call.id for call in turns[at].tool_calls or ()]
    if len(set(wanted)) < len(wanted):
        raise wire.BadRequest(f"messages.{at}: two of its calls have one id", "messages")
    told: dict[str, str] = {}
    for i, turn in enumerate(turns[at + 1 :], start=at + 1):
        if turn.role != "tool" or len(told) == len(wanted):
            break
        if turn.tool_call_id is None or turn.tool_call_id not in wanted or turn.tool_call_id in told:
            problem = f"tool_call_id {turn.tool_call_id!r:.80} is no call of message {at} without a result"
            raise wire.BadRequest(f"messages.{i}: {problem}", "messages")
        told[turn.tool_call_id] = turn.text
    for name in wanted:
        if name not in told:
            problem = f"its call {name!r:.80} has no result; a message of the role tool follows for each call"
            raise wire.BadRequest(f"messages.{at}: {problem}", "messages")
    return [told[name] for name in wanted]


def _arguments(request: Request, tools: Schemas) -> str | None:
    """The arguments of a call as JSON; None where it is none, or they can be written as no object."""
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
