"""Requests to a vLLM server and the reading of its answers, as plain data.

Three endpoints of its OpenAI-compatible HTTP interface are used: ``/v1/models``, ``/tokenize`` and ``/v1/completions``.
Prompts go out as token ids, and token ids come back (``return_token_ids``, vLLM 0.10.2 and later).
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

# vLLM raises smaller temperatures to this one, and refuses larger ones than 2.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
LOWEST_BIAS = -100.0  # that vLLM takes
MAX_LOGPROB = 1e-3  # rounding included
LARGEST_FLOAT = sys.float_info.max


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


def read_models(answer: Any) -> list[ServedModel]:
    """Return the models of ``/v1/models``; an adapter has the context of the model under it.

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


def read_completion(answer: Any, request: CompletionRequest, vocab_size: int | None) -> Completion:
    """Return the completion of an answer of ``/v1/completions``, compared with the request.

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
    check_vocabulary(ids, vocab_size)
    read = choice.get("prompt_token_ids")
    if read is not None and (not isinstance(read, list) or tuple(read) != request.prompt):
        size = f"of {len(read)} tokens" if isinstance(read, list) else f"{read!r:.80}"
        raise Unreadable(f"it read a prompt {size} that is not the one sent, of {len(request.prompt)}")
    return tuple(ids)


def check_vocabulary(ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse ids that the model does not have.

    Raises:
        Unreadable: naming the first.
    """
    outside = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if outside:
        raise Unreadable(f"token id {outside[0]}, but the model's vocabulary has {vocab_size} entries")


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
