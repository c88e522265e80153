"""Conversations with streamed replies, for ``posttrain chat`` in a terminal and for the studio."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean

from rich.console import Console

from posttrain.commands.options import chosen_components
from posttrain.data.render import encode_prompt
from posttrain.data.render.assistant import opening_of
from posttrain.data.render.encoding import TextStream
from posttrain.data.render.template import end_lead
from posttrain.errors import PosttrainError, UsageError
from posttrain.interpret.features.steering import Steering
from posttrain.randomness import derive_key
from posttrain.runs.models import find_source
from posttrain.sampling.base import num_tokens_of
from posttrain.sampling.models import OpenedModel, complete_template, open_model
from posttrain.sampling.native.stream import stream
from posttrain.terminal.console import Text, open_console, say_template
from posttrain.types import Finish, Message

HELP = "/reset clears the conversation; /quit or end of input exits; Ctrl-C stops a reply"


@dataclass(frozen=True, slots=True)
class Controls:
    """Sampling of replies. ``max_tokens`` None: as long as the run's answers may be."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int = 0


@dataclass(slots=True)
class ChatSession:
    """A conversation with a model. Replies are determined by messages, controls and the number of earlier replies.

    ``steering``: activation change applied during replies. ``text``, ``logprobs``, ``finish``: the latest reply so
    far, including a thinking block opened by the prompt.
    """

    sampler: OpenedModel
    controls: Controls = field(default_factory=Controls)
    messages: list[Message] = field(default_factory=list)
    num_replies: int = 0
    steering: Steering | None = None
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "length"

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

    def set_system(self, content: str) -> None:
        """Set or replace the system message; a blank text removes it."""
        rest = [message for message in self.messages if message.role != "system"]
        if content.strip():
            self.messages = [Message("system", content), *rest]
        else:
            self.messages = rest

    def reply(self, content: str) -> Iterator[str]:
        """Stream a reply: yields the text added by each token, possibly empty.

        Message and reply are stored once the reply is complete or the iterator is closed. After a failed reply, the
        conversation is unchanged. Steering is removed between tokens, so the model can be shared.

        Raises:
            UsageError: a blank message, or no room left in the model's context.
        """
        self.text = ""
        self.logprobs = []
        if not content.strip():
            raise UsageError("a message needs some text")
        tokenizer = self.sampler.tokenizer
        template = self.sampler.grader.template
        turns = [*self.messages, Message("user", content)]
        prompt = encode_prompt(tokenizer, template, turns)
        decoded = TextStream(tokenizer, prompt, end_lead(tokenizer, template))
        chosen = self.controls
        limit = chosen.max_tokens or self.sampler.source.max_tokens
        sampling = self.sampler.sampling(limit, chosen.temperature, chosen.top_k, chosen.top_p)
        sampling = replace(sampling, num_tokens=num_tokens_of(tokenizer))
        key = derive_key(self.controls.seed, "chat", self.num_replies)
        tokens = stream(self.sampler.model, prompt, key, sampling)
        self.text = opening_of(tokenizer, template, prompt)
        try:
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
                yield added
        except (GeneratorExit, KeyboardInterrupt):  # Ctrl-C mostly comes while the model computes
            self._remember(turns)
            raise
        self._remember(turns)

    def _steered(self) -> AbstractContextManager[None]:
        if self.steering is None:
            return nullcontext()
        return self.steering.applied()

    def _remember(self, turns: list[Message]) -> None:
        """Store a reply without reasoning, as chat templates do."""
        reply = self.answer_of(self.text)
        self.num_replies += 1
        if reply.strip():
            self.messages = [*turns, Message("assistant", reply)]

    def answer_of(self, text: str) -> str:
        """Strip reasoning from a reply: keep the tagged answer, or the text after the thinking block."""
        template = self.sampler.grader.template
        if template.tags:
            return template.extract(text) or text.removeprefix(template.opening)
        return text.rpartition("</think>")[2].strip() or text


def run_chat(arguments: argparse.Namespace) -> int:
    """Load models, then reply line by line until ``/quit`` or end of input."""
    controls = Controls(arguments.temperature, arguments.top_p, arguments.top_k, arguments.max_tokens, arguments.seed)
    template = chosen_components(arguments).get("template")
    sources = [find_source(name, arguments.runs_dir) for name in arguments.models]
    conversations = []
    for source in sources:
        own = complete_template(template, source)
        say_template(source, own)
        conversations.append(ChatSession(open_model(source, own), controls))
    console = open_console()
    for conversation in conversations:
        conversation.set_system(arguments.system or "")
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        labels = ", ".join(conversation.sampler.label for conversation in conversations)
        console.print(Text(f"{labels}. {HELP}", style="dim"))
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
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
                console.print(Text(text), end="", soft_wrap=True)
        except KeyboardInterrupt:  # keep the partial reply
            texts.close()  # type: ignore[attr-defined]
        except PosttrainError as error:
            console.print(Text(f"{label}: {error}", style="red"))
            continue
        console.print()
        console.print(Text(conversation.info, style="dim"))
