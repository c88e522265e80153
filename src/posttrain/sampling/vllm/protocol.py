"""Requests to a vLLM server and the reading of its answers, as plain data.

Three endpoints of its OpenAI-compatible HTTP interface are used: ``/v1/models``, ``/tokenize`` and ``/v1/completions``.
Prompts go out as token ids, and token ids come back (``return_token_ids``, vLLM 0.10.2 and later).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from posttrain.errors import UsageError
from posttrain.sampling.base import Sampling
from posttrain.sampling.http import Interrupted, Unreadable
from posttrain.types import Completion, Finish

# vLLM raises smaller temperatures to this one, and refuses larger ones than 2.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
LOWEST_BIAS = -100.0  # that vLLM takes
MAX_LOGPROB = 1e-3  # rounding included


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of ``/v1/models``: its name, the folder or hub name, and its context in tokens (None: not known)."""

    name: str
    root: str
    context: int | None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion of ``prompt`` with at most ``limit`` tokens. Ids of ``unused`` are never drawn."""

    model: str
    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling
    seed: int
    logprobs: bool = True
    unused: range = range(0)

    def body(self) -> dict[str, Any]:
        """Return the JSON of ``POST /v1/completions``.

        It has every option that a model's ``generation_config.json`` could set on the server, so that none comes from
        there. Only ``stop_ids`` end a completion, not the server's own end token.
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
            body["logit_bias"] = {str(token): LOWEST_BIAS for token in self.unused}
        return body


class _Card(BaseModel, strict=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: PositiveInt | None = None


class _Models(BaseModel):
    data: list[_Card]


class _Logprobs(BaseModel, strict=True):
    tokens: list[str]
    token_logprobs: list[Annotated[float, Field(ge=-sys.float_info.max, le=MAX_LOGPROB)]]


class _Choice(BaseModel, strict=True):
    finish_reason: str | None = None
    token_ids: list[NonNegativeInt]  # empty where the server gave a request up
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completions(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


def read_models(answer: object) -> list[ServedModel]:
    """Return the models of ``/v1/models``; an adapter has the context of the model under it.

    Raises:
        Unreadable: not such an answer.
    """
    try:
        cards = _Models.model_validate(answer).data
    except ValidationError as error:
        raise Unreadable(f"/v1/models lists no models ({first_fault(error)})") from None
    contexts = {card.id: card.max_model_len for card in cards}
    return [ServedModel(c.id, c.root or c.id, c.max_model_len or contexts.get(c.parent or "")) for c in cards]


def first_fault(error: ValidationError) -> str:
    """Return the place, reason and input of the first fault."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}; got {fault['input']!r:.80}"


def choose_model(models: Sequence[ServedModel], wanted: Sequence[str], where: str = "engine") -> ServedModel:
    """Return the first of ``wanted`` that is served; if none is named, the only one that there is.

    Raises:
        UsageError: none of them is served, or several are and none was named.
    """
    by_name = {model.name: model for model in models}
    there = ", ".join(map(repr, by_name)) or "nothing"
    for name in wanted:
        if name in by_name:
            return by_name[name]
    if wanted:
        raise UsageError(
            f"the server has {there}, not {wanted[0]!r}: it was started with another model, or before these weights "
            "were written. Start it anew with the line that `posttrain serve-command` prints, "
            f"or name what is to be asked with {where}.served_name"
        )
    if len(models) != 1:
        raise UsageError(f"the server has {there}; say with {where}.served_name which of them is meant")
    return models[0]


def read_completion(answer: object, request: CompletionRequest, vocab_size: int | None) -> Completion:
    """Return the completion of an answer of ``/v1/completions``, compared with the request.

    Without log-probabilities in the request they are NaN, one per id.

    Raises:
        Unreadable: ids or log-probabilities are missing, or do not fit the request.
        Interrupted: the server gave the request up.
    """
    try:
        (choice,) = _Completions.model_validate(answer).choices
    except ValidationError as error:
        raise Unreadable(first_fault(error)) from None
    if choice.finish_reason not in ("stop", "length"):
        raise Interrupted(f"the server ended a completion with {choice.finish_reason!r:.80}")
    ids, stops, read = tuple(choice.token_ids), request.sampling.stop_ids, choice.prompt_token_ids
    if not ids:
        raise Unreadable("no token ids; they come with vLLM 0.10.2 and later (return_token_ids)")
    check_vocabulary(ids, vocab_size)
    if read is not None and tuple(read) != request.prompt:
        raise Unreadable(f"it read a prompt of {len(read)} tokens that is not the one sent, of {len(request.prompt)}")
    ended: Finish = "stop" if ids[-1] in stops else "length"
    if ended == "length" and (choice.finish_reason == "stop" or len(ids) != request.limit):
        raise Unreadable(
            f"a completion of {len(ids)} tokens that ends with id {ids[-1]} ({choice.finish_reason}), where "
            f"{request.limit} tokens or one of the stop ids {sorted(stops)} end it; start the server with "
            "--generation-config vllm, so that it stops at nothing else"
        )
    if stops & set(ids[:-1]):
        raise Unreadable("a completion that goes on after a stop id")
    if not request.logprobs:
        return Completion(ids, (math.nan,) * len(ids), ended)
    if choice.logprobs is None or choice.logprobs.tokens != [f"token_id:{token}" for token in ids]:
        raise Unreadable("log-probabilities of other tokens than those of the completion, or none")
    if len(choice.logprobs.token_logprobs) != len(ids):
        raise Unreadable(f"{len(choice.logprobs.token_logprobs)} log-probabilities for {len(ids)} tokens")
    return Completion(ids, tuple(min(value, 0.0) for value in choice.logprobs.token_logprobs), ended)


def check_vocabulary(ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse ids that the model does not have.

    Raises:
        Unreadable: naming the first.
    """
    outside = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if outside:
        raise Unreadable(f"token id {outside[0]}, but the model's vocabulary has {vocab_size} entries")
