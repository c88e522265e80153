"""A conversation with a model: what was said, and the next reply token by token. Used by chat and studio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

from posttrain.engines.base import Sampling, num_tokens_of
from posttrain.engines.models import OpenedModel
from posttrain.engines.native.stream import StreamedToken, stream
from posttrain.errors import UsageError
from posttrain.interpret.features.steering import Steering
from posttrain.randomness import derive_key
from posttrain.render import encode_prompt, stop_ids
from posttrain.render.assistant import opening_of
from posttrain.render.encoding import TextStream
from posttrain.types import Finish, Message


@dataclass(frozen=True, slots=True)
class SpokenToken:
    """A token of a reply: the text that it adds (maybe none) and its log-probability.

    ``finish``: how the reply ends if this is its last one.
    """

    text: str
    logprob: float
    finish: Finish = "length"


@dataclass(frozen=True, slots=True)
class Controls:
    """How replies are drawn. ``max_tokens`` None: as long as the run's answers may be."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Conversation:
    """Messages with one model. A reply is a function of the messages, the controls and how many replies there were.

    ``steering``: what is done to the model's activations while it replies.
    """

    sampler: OpenedModel
    controls: Controls = field(default_factory=Controls)
    messages: list[Message] = field(default_factory=list)
    num_replies: int = 0
    num_before: int = 0  # messages that there were before the last question, which may not have been remembered
    steering: Steering | None = None
    opening: str = ""  # of the last reply: the block of thinking that its prompt opened

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message.role == "system"]
        self.num_replies = 0
        self.num_before = len(self.messages)

    def take_back(self) -> None:
        """Forget the last question and its reply, if they were remembered."""
        del self.messages[self.num_before :]

    def set_system(self, content: str) -> None:
        """Put a system message above everything, in the place of an earlier one; none if it is blank."""
        rest = [message for message in self.messages if message.role != "system"]
        self.messages = [Message("system", content), *rest] if content.strip() else rest
        self.num_before = len(self.messages)

    def reply(self, content: str) -> Iterator[SpokenToken]:
        """The reply to what the user says, token by token.

        The conversation remembers both once the reply is complete or the iterator is closed; a reply that fails
        leaves it as it was.

        Raises:
            UsageError: a blank message, or a conversation that has no room left in the model's context.
        """
        if not content.strip():
            raise UsageError("a message needs some text")
        sampler, template = self.sampler, self.sampler.grader.template
        self.num_before = len(self.messages)
        asked = [*self.messages, Message("user", content)]
        prompt = encode_prompt(sampler.tokenizer, template, asked)
        ends = stop_ids(sampler.tokenizer, template)
        text = TextStream(sampler.tokenizer)
        key = derive_key(self.controls.seed, "chat", self.num_replies)
        self.opening = opening_of(sampler.tokenizer, template, prompt)
        said: list[str] = [self.opening]
        tokens = stream(sampler.model, prompt, key, self._sampling(ends))
        try:
            for token in _steered(tokens, self.steering):
                added = "" if token.id in ends else text.push(token.id)
                if token.is_last:
                    added += text.flush()
                said.append(added)
                yield SpokenToken(added, token.logprob, token.finish)
        except (GeneratorExit, KeyboardInterrupt):  # enough heard; Ctrl-C mostly comes while the model computes
            self._remember(asked, "".join(said))
            raise
        self._remember(asked, "".join(said))

    def _sampling(self, ends: frozenset[int]) -> Sampling:
        chosen, longest = self.controls, self.controls.max_tokens or self.sampler.source.max_tokens
        return Sampling(
            longest,
            chosen.temperature,
            chosen.top_k,
            chosen.top_p,
            ends,
            num_tokens=num_tokens_of(self.sampler.tokenizer),
        )

    def _remember(self, asked: list[Message], text: str) -> None:
        """Later turns see the answer without the reasoning that led to it, as chat templates have it."""
        said = self.answer_of(text)
        self.num_replies += 1
        if said.strip():
            self.messages = [*asked, Message("assistant", said)]

    def answer_of(self, text: str) -> str:
        """What a reply says when its reasoning is left out: the tagged answer, or what follows the thinking."""
        template = self.sampler.grader.template
        if template.tags:
            return template.extract(text) or text.removeprefix(template.opening)
        return text.rpartition("</think>")[2].strip() or text


def _steered(tokens: Iterator[StreamedToken], steering: Steering | None) -> Iterator[StreamedToken]:
    """The same tokens, each of them computed by the steered model; in between, the model belongs to others."""
    while True:
        with nullcontext() if steering is None else steering.applied():
            token = next(tokens, None)
        if token is None:
            return
        yield token
