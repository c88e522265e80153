"""Conversations with streamed replies, for ``posttrain chat`` in a terminal and for the studio."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean

from rich.console import Console

from posttrain.commands.chat.tools import ToolUse, offered, show_calls
from posttrain.commands.options import chosen_components
from posttrain.data.render import encode_prompt
from posttrain.data.render.assistant import opening_of
from posttrain.data.render.encoding import TextStream
from posttrain.data.render.template import end_lead
from posttrain.errors import PosttrainError, RecipeError, UsageError
from posttrain.interpret.features.steering import Steering
from posttrain.randomness import derive_key
from posttrain.recipes.sections import Component, as_list, read_component
from posttrain.runs.models import find_source
from posttrain.sampling.base import Sampling, num_tokens_of, turn_key
from posttrain.sampling.environments.contract import opened
from posttrain.sampling.models import OpenedModel, complete_template, open_model
from posttrain.sampling.native.stream import stream
from posttrain.strict_yaml import read_yaml
from posttrain.terminal.console import Text, open_console, say_template
from posttrain.types import Example, Finish, Message

HELP = "/reset clears the conversation; /quit or end of input exits; Ctrl-C stops a reply"


@dataclass(frozen=True, slots=True)
class Controls:
    """Sampling of replies. ``max_tokens`` None: as long as the run's answers may be."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int = 0


class ToolNotice(str):
    """Calls and results between the turns of a reply, or an environment's opening."""

    __slots__ = ()


@dataclass(slots=True)
class ChatSession:
    """A conversation with a model. Replies are determined by messages, controls and the number of earlier replies.

    ``steering``: activation change applied during replies. ``text``, ``logprobs``, ``finish``: the latest reply so
    far, including a thinking block opened by the prompt; ``text`` is its last turn. With ``tools``, all tokens of a
    conversation in a chat template are kept, as in rollouts of several turns.
    """

    sampler: OpenedModel
    controls: Controls = field(default_factory=Controls)
    messages: list[Message] = field(default_factory=list)
    num_replies: int = 0
    steering: Steering | None = None
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "length"
    tools: ToolUse | None = None
    _ids: list[int] = field(default_factory=list)  # conversation so far, only with tools

    @property
    def info(self) -> str:
        """``12 tokens, mean log-probability -0.52``, of the newest reply."""
        mean = ""
        if self.logprobs:
            mean = f", mean log-probability {fmean(self.logprobs):.2f}"
        return f"{len(self.logprobs)} tokens{mean}"

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message.role == "system"]
        self.num_replies = 0
        self._ids = []
        if self.tools is not None:
            self.tools.reset()

    def set_system(self, content: str) -> None:
        """Set or replace the system message; a blank text removes it."""
        rest = [message for message in self.messages if message.role != "system"]
        if content.strip():
            self.messages = [Message("system", content), *rest]
        else:
            self.messages = rest

    def reply(self, content: str) -> Iterator[str]:
        """Stream a reply: yields the text added by each token, possibly empty, and a ``ToolNotice`` after each turn.

        Message and reply are stored once the reply is complete or the iterator is closed. After a failed reply, the
        conversation is unchanged. Steering is removed between tokens, so the model can be shared.

        Raises:
            UsageError: a blank message, or no room left in the model's context.
        """
        self.text = ""
        self.logprobs = []
        if not content.strip():
            raise UsageError("a message needs some text")
        key = derive_key(self.controls.seed, "chat", self.num_replies)
        if self.tools is not None:
            yield from self._reply_with_tools(self.tools, content, key)
            return
        turns = [*self.messages, Message("user", content)]
        prompt = encode_prompt(self.sampler.tokenizer, self.sampler.grader.template, turns)
        try:
            yield from self._turn(prompt, key, self._sampling(self.sampler, self._limit), [])
        except (GeneratorExit, KeyboardInterrupt):  # Ctrl-C mostly comes while the model computes
            self._remember(turns)
            raise
        self._remember(turns)

    @property
    def _limit(self) -> int:
        return self.controls.max_tokens or self.sampler.source.max_tokens

    def _sampling(self, sampler: OpenedModel, limit: int) -> Sampling:
        chosen = self.controls
        sampling = sampler.sampling(limit, chosen.temperature, chosen.top_k, chosen.top_p)
        return replace(sampling, num_tokens=num_tokens_of(sampler.tokenizer))

    def _turn(self, prompt: Sequence[int], key: int, sampling: Sampling, ids: list[int]) -> Iterator[str]:
        """Stream one turn, appending its tokens to ``ids``.

        Raises:
            UsageError: the conversation fills the model's context.
        """
        if len(prompt) >= self.sampler.context_tokens:
            raise UsageError(
                f"the conversation has {len(prompt):,} tokens, and the model's context is "
                f"{self.sampler.context_tokens:,}: no room for an answer. Ask less, or start a new conversation (in a "
                "terminal with /reset)"
            )
        tokenizer = self.sampler.tokenizer
        template = self.sampler.grader.template
        decoded = TextStream(tokenizer, prompt, end_lead(tokenizer, template))
        tokens = stream(self.sampler.model, prompt, key, sampling)
        self.text = opening_of(tokenizer, template, prompt)
        while True:
            with self._steered():
                token = next(tokens, None)
            if token is None:
                break
            is_end = token.id in sampling.stop_ids
            if is_end:
                added = decoded.end()
            else:
                added = decoded.push(token.id)
            if token.is_last:
                added += decoded.flush()
            self.text = self.text + added
            self.finish = token.finish
            self.logprobs.append(token.logprob)
            ids.append(token.id)
            yield added

    def _reply_with_tools(self, tools: ToolUse, content: str, key: int) -> Iterator[str]:
        """Stream turns until the model answers without calls. ``max_tokens`` covers turns and results."""
        opening = tools.open(self.controls.seed)
        turns = [*self.messages, Message("user", content)]
        if opening:
            yield ToolNotice(f"-> {opening}\n")
            turns = opened(Example("chat", tuple(turns)), opening)
        prompt = self._prompt_with_tools(tools, turns)
        tools.begin(prompt)
        ids = list(prompt)
        limit = len(prompt) + self._limit
        longest = tools.stage.max_turn_tokens
        try:
            for number in range(tools.stage.max_turns):
                room = limit - len(ids)
                if longest is not None:
                    room = min(room, longest)
                sampling = self._sampling(tools.sampler, room)
                turn: list[int] = []
                begun = list(ids)
                for added in self._turn(begun, turn_key(key, number), sampling, turn):
                    ids = begun + turn
                    yield added
                reply = tools.pass_on(turn, self.finish)
                if tools.calls:
                    yield ToolNotice(f"\n{show_calls(tools.calls)}\n")
                if tools.failure:
                    yield ToolNotice(f"\n-> failed: {tools.failure}\n")
                if reply.finish is not None:
                    self.finish = reply.finish
                    break
                if len(ids) + len(reply.ids) >= limit:
                    self.finish = "length"
                    break
                ids += reply.ids
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(turns, ids)
            raise
        self._remember(turns, ids)

    def _prompt_with_tools(self, tools: ToolUse, turns: Sequence[Message]) -> list[int]:
        """Tokenize the next question: behind all earlier tokens in a chat, else with the answers so far."""
        if self._ids:
            following = tools.follow(turns[-1].content, self._ids[-1])
            if following is not None:
                return [*self._ids, *following]
        return encode_prompt(self.sampler.tokenizer, tools.stage.template, turns)

    def _steered(self) -> AbstractContextManager[None]:
        if self.steering is None:
            return nullcontext()
        return self.steering.applied()

    def _remember(self, turns: list[Message], ids: Sequence[int] = ()) -> None:
        """Store a reply without reasoning, as chat templates do, and all ``ids`` so far if tools are offered."""
        reply = self.answer_of(self.text)
        self.num_replies += 1
        if reply.strip():
            self._ids = list(ids)
            self.messages = [*turns, Message("assistant", reply)]

    def answer_of(self, text: str) -> str:
        """Strip reasoning from a reply: keep the tagged answer, or the text after the thinking block."""
        template = self.sampler.grader.template
        if template.tags:
            return template.extract(text) or text.removeprefix(template.opening)
        return text.rpartition("</think>")[2].strip() or text


def run_chat(arguments: argparse.Namespace) -> int:
    """Load models, then reply line by line until ``/quit`` or end of input."""
    if arguments.no_tools and arguments.tools is not None:
        raise UsageError("--no-tools: contradicts --tools; remove one of them")
    controls = Controls(arguments.temperature, arguments.top_p, arguments.top_k, arguments.max_tokens, arguments.seed)
    template = chosen_components(arguments).get("template")
    sources = [find_source(name, arguments.runs_dir) for name in arguments.models]
    conversations = []
    for source in sources:
        own = complete_template(template, source)
        say_template(source, own)
        conversations.append(ChatSession(open_model(source, own), controls))
    tools = _read_tools(arguments.tools)
    with ExitStack() as stack:
        if not arguments.no_tools:
            for conversation in conversations:
                conversation.tools = stack.enter_context(offered(conversation.sampler, template, tools))
        for conversation in conversations:
            conversation.set_system(arguments.system or "")
        _converse(conversations)
    return 0


def _read_tools(text: str | None) -> list[Component]:
    """Parse ``--tools``, written as in a recipe.

    Raises:
        RecipeError: not a list of tools.
    """
    if text is None:
        return []
    content, _ = read_yaml(text, "--tools")
    listed = as_list(content)
    if not isinstance(listed, list):
        raise RecipeError(f"--tools: {text!r:.80} is no list; write --tools '[module:function]'")
    if not listed:
        raise RecipeError("--tools: the list is empty; use --no-tools to offer none")
    return [read_component(one, f"tools.{index}") for index, one in enumerate(listed)]


def _converse(conversations: Sequence[ChatSession]) -> None:
    """Reply line by line until ``/quit`` or end of input."""
    console = open_console()
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        labels = ", ".join(conversation.sampler.label for conversation in conversations)
        console.print(Text(f"{labels}. {HELP}", style="dim"))
    for conversation in conversations:
        if conversation.tools is not None:
            names = [tool["function"]["name"] for tool in conversation.tools.stage.toolset.schemas]
            console.print(Text(f"{conversation.sampler.label} may call: {', '.join(names)}", style="dim"))
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/reset":
            for conversation in conversations:
                conversation.reset()
        elif line.startswith("/"):
            console.print(Text(HELP, style="dim"))
        elif line:
            speak(console, conversations, line)


def speak(console: Console, conversations: Sequence[ChatSession], content: str) -> None:
    """Print each model's reply in turn; if a model cannot reply, print the reason."""
    for conversation in conversations:
        label = conversation.sampler.label
        if len(conversations) > 1:
            console.print(Text(label, style="bold cyan"))
        texts = conversation.reply(content)
        try:
            for text in texts:
                style = ""
                if isinstance(text, ToolNotice):
                    style = "cyan"
                console.print(Text(text, style=style), end="", soft_wrap=True)
        except KeyboardInterrupt:  # keep the partial reply
            texts.close()  # type: ignore[attr-defined]
        except PosttrainError as error:
            console.print(Text(f"{label}: {error}", style="red"))
            continue
        console.print()
        console.print(Text(conversation.info, style="dim"))
