"""What is said to a vLLM server, and how its answers are read. No sockets here: plain data in and out.

Three endpoints of its OpenAI-compatible HTTP interface are used: ``/v1/models``, ``/tokenize`` and
``/v1/completions``. The prompt goes out as token ids, and token ids come back (``return_token_ids``,
vLLM 0.10.2 and later), so no text is tokenized a second time on the way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.engines.base import Sampling
from posttrain.engines.http import Interrupted, Unreadable
from posttrain.errors import UsageError
from posttrain.types import Completion, Finish

# vLLM puts smaller temperatures up to this one, and refuses larger ones than 2.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
MODE_TOKENS = 8
MASKED = -100.0  # the least that vLLM takes
# Above this a number is no log-probability, rounding included.
MAX_LOGPROB = 1e-3
LARGEST_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of ``/v1/models``: the name to ask for, the folder or hub name behind it, prompt and answer in tokens.

    ``context`` is None where the server does not tell.
    """

    name: str
    root: str
    context: int | None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion: of ``prompt``, at most ``limit`` tokens, drawn with ``seed``.

    ``logprobs``: log-probabilities are wanted too (they cost the server time). ``unused``: ids that are never drawn.
    """

    model: str
    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling
    seed: int
    logprobs: bool = True
    unused: range = range(0)

    def body(self) -> dict[str, Any]:
        """The JSON of ``POST /v1/completions``.

        Every option that a model's ``generation_config.json`` could set on the server is given, so
        that none comes from there; only ``stop_ids`` end a completion, not the server's idea of an
        end token.
        """
        greedy = self.sampling.temperature == 0
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.limit,
            "temperature": self.sampling.temperature,
            "top_p": 1.0 if greedy else self.sampling.top_p,
            "top_k": -1 if greedy or self.sampling.top_k is None else self.sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": self.seed,
            "stop_token_ids": sorted(self.sampling.stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if self.logprobs:
            body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
        if self.unused:
            body["logit_bias"] = {str(token): MASKED for token in self.unused}
        return body


def seed_of(key: int) -> int:
    """The seed that stands for a completion's 64-bit key: its lower 63 bits, the range vLLM takes."""
    return key % (1 << 63)


def read_models(answer: Any) -> list[ServedModel]:
    """The models of ``/v1/models``; an adapter has the context of the model under it.

    Raises:
        Unreadable: not such an answer.
    """
    try:
        cards = [dict(card) for card in answer["data"]]
        contexts = {str(card["id"]): card.get("max_model_len") for card in cards}
        for context in contexts.values():
            if context is not None and (type(context) is not int or context < 1):
                raise ValueError(f"max_model_len is {context!r:.80}")
        return [
            ServedModel(
                name=str(card["id"]),
                root=str(card.get("root") or card["id"]),
                context=contexts[str(card["id"])] or contexts.get(str(card.get("parent"))),
            )
            for card in cards
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"/v1/models lists no models ({type(error).__name__}: {error})") from None


def choose_model(models: Sequence[ServedModel], wanted: Sequence[str], where: str = "engine") -> ServedModel:
    """The first of ``wanted`` that is served; without a wish, the only one there is.

    Raises:
        UsageError: none of them is served, or several are and none was named.
    """
    there = ", ".join(repr(model.name) for model in models) or "nothing"
    for name in wanted:
        for model in models:
            if model.name == name:
                return model
    if wanted:
        raise UsageError(
            f"the server has {there}, not {wanted[0]!r}: it was started with another model, or before these weights "
            "were written. Start it anew with the line that `posttrain serve-command` prints, "
            f"or name what is to be asked with {where}.served_name"
        )
    if len(models) != 1:
        raise UsageError(f"the server has {there}; say with {where}.served_name which of them is meant")
    return models[0]


def read_completion(answer: Any, request: CompletionRequest, vocab_size: int | None) -> Completion:
    """The completion of an answer of ``/v1/completions``, checked against what was asked.

    Without log-probabilities in the request they are NaN, one per id.

    Raises:
        Unreadable: ids or log-probabilities are missing, or do not fit the request.
        Interrupted: the server gave the request up.
    """
    if not isinstance(answer, dict):
        raise Unreadable(f"not a completion but {type(answer).__name__}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = f"{len(choices)} choices" if isinstance(choices, list) else "no list of choices"
        raise Unreadable(f"{count} where one completion was asked for")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise Interrupted(f"the server ended a completion with {finish!r}")
    ids = _read_ids(choice, request, vocab_size)
    ended: Finish = "stop" if ids[-1] in request.sampling.stop_ids else "length"
    if ended == "length" and (finish == "stop" or len(ids) != request.limit):
        raise Unreadable(
            f"a completion of {len(ids)} tokens that ends with id {ids[-1]} ({finish}), where {request.limit} tokens "
            f"or one of the stop ids {sorted(request.sampling.stop_ids)} end it; start the server with "
            "--generation-config vllm, so that it stops at nothing else"
        )
    if any(token in request.sampling.stop_ids for token in ids[:-1]):
        raise Unreadable("a completion that goes on after a stop id")
    return Completion(ids, _read_logprobs(choice, request, ids), ended)


def _read_ids(choice: dict[str, Any], request: CompletionRequest, vocab_size: int | None) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise Unreadable("no token ids; they come with vLLM 0.10.2 and later (return_token_ids)")
    outside = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if outside:
        raise Unreadable(f"token id {outside[0]}, but the model's vocabulary has {vocab_size} entries")
    read = choice.get("prompt_token_ids")
    if read is not None and (not isinstance(read, list) or tuple(read) != request.prompt):
        size = f"of {len(read)} tokens" if isinstance(read, list) else f"{read!r:.80}"
        raise Unreadable(f"it read a prompt {size} that is not the one sent, of {len(request.prompt)}")
    return tuple(ids)


def _read_logprobs(choice: dict[str, Any], request: CompletionRequest, ids: tuple[int, ...]) -> tuple[float, ...]:
    if not request.logprobs:
        return (math.nan,) * len(ids)
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    values, tokens = logprobs.get("token_logprobs"), logprobs.get("tokens")
    if not isinstance(values, list) or not isinstance(tokens, list) or len(values) != len(ids):
        count = len(values) if isinstance(values, list) else "no"
        raise Unreadable(f"{count} log-probabilities for {len(ids)} tokens")
    if tokens != [f"token_id:{token}" for token in ids]:
        raise Unreadable("log-probabilities of other tokens than those of the completion")
    for value in values:
        if type(value) not in (int, float) or not -LARGEST_FLOAT <= value <= MAX_LOGPROB:
            raise Unreadable(f"{value!r:.80} where a log-probability should be; is the server's --logprobs-mode one?")
    return tuple(min(float(value), 0.0) for value in values)


def check_temperature(temperature: float) -> None:
    """Refuse temperatures that vLLM would change or refuse.

    Raises:
        UsageError: the message says which it takes.
    """
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise UsageError(
            f"sampling.temperature is {temperature:g}; vLLM takes 0 (greedy), or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )


def mode_request(model: ServedModel, prompt: Sequence[int]) -> CompletionRequest:
    """A request whose answer tells raw from processed log-probabilities: with one token to draw, these are 0.

    It continues the last id of ``prompt`` alone, after which hardly any model is certain of eight tokens.
    """
    limit = MODE_TOKENS if model.context is None else min(MODE_TOKENS, model.context - 1)
    last = (int(prompt[-1]),)
    return CompletionRequest(model.name, last, limit, Sampling(limit, temperature=1.0, top_k=1), seed=0)
