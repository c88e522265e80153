"""How answers are written down: the forms of OpenAI's two endpoints and of vLLM's ``/inference/v1/generate``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from posttrain.commands.serve.speech import Scored, Speech


@dataclass(frozen=True)
class Names:
    """How tokens are called in an answer: by their text, or ``token_id:5``."""

    tokenizer: Any
    as_ids: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else str(self.tokenizer.decode([token]))


@dataclass(frozen=True)
class Form(ABC):
    """One endpoint's form; ``names`` None: no log-probabilities were asked for. ``with_ids``: token ids were.

    ``kind`` and ``part_kind`` are what the whole answer and an event of a stream are called, ``prefix`` begins an id.
    """

    request_id: str
    created: int
    model: str
    names: Names | None = None
    with_ids: bool = False
    kind: ClassVar[str] = ""
    part_kind: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    @abstractmethod
    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """What a token adds to an answer; without a token, how it begins."""

    def around(self, choices: Sequence[Mapping[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        """What stands around choices."""
        kind = self.part_kind if is_part else self.kind
        head = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": list(choices)}

    def _chat_logprobs(self, scored: Sequence[Scored | None]) -> dict[str, Any] | None:
        if self.names is None:
            return None
        return {"content": [_entry(self.names, token) for token in scored if token is not None]}


class ChatForm(Form):
    """``/v1/chat/completions``."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": speech.text, "refusal": None}
        ids = {"token_ids": speech.ids, "prompt_token_ids": list(prompt)} if self.with_ids else {}
        return {"message": message, "logprobs": self._chat_logprobs(scored), **ids}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """A piece of a message; its role at first."""
        role = {"role": "assistant"} if token is None else {}
        ids = {"token_ids": [token.id]} if self.with_ids and token is not None else {}
        logprobs = None if token is None else self._chat_logprobs([token])
        return {"delta": {**role, "content": text}, "logprobs": logprobs, **ids}


class CompletionForm(Form):
    """``/v1/completions``."""

    kind, part_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """A text; ``scored`` holds the tokens of an echoed prompt too."""
        echoed = [*prompt, *speech.ids][-len(scored) :] if scored else []
        ids = {"token_ids": speech.ids, "prompt_token_ids": list(prompt)} if self.with_ids else {}
        return {"text": speech.text, "logprobs": self._logprobs(scored, echoed), **ids}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """A piece of a text."""
        ids = {"token_ids": [token.id]} if self.with_ids and token is not None else {}
        logprobs = None if token is None else self._logprobs([token], [token.id])
        return {"text": text, "logprobs": logprobs, **ids}

    def _logprobs(self, scored: Sequence[Scored | None], ids: Sequence[int]) -> dict[str, Any] | None:
        name = self.names
        if name is None:
            return None
        names = [name(token) for token in ids]
        offsets = list(accumulate(map(len, names), initial=0))[:-1]
        likely = [None if token is None else {name(i): number for i, number in token.likely} for token in scored]
        return {
            "tokens": names,
            "token_logprobs": [None if token is None else token.logprob for token in scored],
            "top_logprobs": likely if any(likely) else None,
            "text_offset": offsets,
        }


class GenerateForm(Form):
    """``/inference/v1/generate``: token ids, always with what is known of them."""

    prefix = "generate-"

    def choice(self, speech: Speech, scored: Sequence[Scored | None], prompt: Sequence[int]) -> dict[str, Any]:
        """Ids."""
        return {"token_ids": speech.ids, "logprobs": self._chat_logprobs(scored)}

    def event(self, text: str, token: Scored | None) -> dict[str, Any]:
        """An id."""
        if token is None:
            return {"token_ids": [], "logprobs": None}
        return {"token_ids": [token.id], "logprobs": self._chat_logprobs([token])}

    def around(self, choices: Sequence[Mapping[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        """What stands around choices."""
        return {"request_id": self.request_id, "choices": list(choices), "prompt_logprobs": None}


def _entry(name: Names, token: Scored) -> dict[str, Any]:
    def one(index: int, logprob: float) -> dict[str, Any]:
        return {"token": name(index), "logprob": logprob, "bytes": None}

    return one(token.id, token.logprob) | {"top_logprobs": [one(*pair) for pair in token.likely]}


def usage(prompts: Sequence[Sequence[int]], num_sampled: int) -> dict[str, int]:
    """How many tokens were read and written."""
    read = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": read, "completion_tokens": num_sampled, "total_tokens": read + num_sampled}
