"""Client for a running vLLM server, exchanging token ids and log-probabilities over HTTP.

The server is a separate process, often on another device or machine; ``vllm`` is not imported. It uses two
OpenAI-compatible endpoints: ``/v1/models`` and ``/v1/completions`` with ``return_token_ids`` (vLLM 0.10.2 and later).
Kept sets require ``/inference/v1/generate`` with ``sampling_mask`` (vLLM 0.32).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from posttrain.activity import phase
from posttrain.errors import RunFailure, UsageError
from posttrain.option_types import key_for
from posttrain.sampling.base import (
    MOST_KEPT,
    UNLIMITED_CONTEXT,
    Engine,
    Groups,
    Sampling,
    check_prompts,
    check_sampling,
    num_tokens_of,
)
from posttrain.sampling.http import (
    HttpServer,
    Interrupted,
    RequestRefused,
    ServerError,
    Unanswered,
    Unreadable,
    all_of,
)
from posttrain.types import Completion, Finish, KeptSets
from posttrain.untrusted import describe_fault

Result = TypeVar("Result")
KEY_VARIABLE = "VLLM_API_KEY"
MODE_TOKENS = 8
# vLLM raises smaller temperatures to this value, and refuses any above 2.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
LOWEST_BIAS = -100.0  # that vLLM takes
MAX_LOGPROB = 1e-3  # rounding included
GENERATE = "/inference/v1/generate"
MASKED = (
    "The sets that top_k, top_p and min_p keep come from vLLM 0.32 and later: start it with --return-sampling-mask "
    "--enable-scale-out --logprobs-mode processed_logprobs"
)


class VllmEngine(Engine):
    """See ``vllm``.

    Args:
        url: None for a server started later.
        tokenizer: its size limits sampled ids; None for the server's.
        vocab_size: model ids; None if unknown.
        wanted: acceptable served model names, best first; empty accepts the only one.
        where: recipe key for messages.
        sampling_mask: the server returns kept sets. It then refuses greedy requests, and requests without ``top_k``.
    """

    def __init__(
        self,
        url: str | None,
        *,
        tokenizer: object = None,
        vocab_size: int | None = None,
        wanted: Sequence[str] = (),
        timeout_seconds: float = 900.0,
        concurrency: int = 64,
        retries: int = 3,
        where: str = "engine",
        sampling_mask: bool = False,
    ) -> None:
        self.where = where
        self.sampling_mask = sampling_mask
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.wanted = tuple(wanted)
        self.num_tokens = None
        if tokenizer is not None:
            self.num_tokens = num_tokens_of(tokenizer)
        self.limits: dict[str, Any] = {
            "timeout_seconds": timeout_seconds,
            "concurrency": concurrency,
            "retries": retries,
        }
        self._reach(url)

    def _reach(self, url: str | None) -> None:
        """Use the server at this address from now on."""
        self.served: ServedModel | None = None
        self._is_processed = False  # log-probabilities use the sampling temperature
        self._server: HttpServer | None = None
        if url is not None:
            key = key_for(url, f"{self.where}.url", KEY_VARIABLE)
            self._server = HttpServer(url, token=key, **self.limits)

    @property
    def server(self) -> HttpServer:
        assert self._server is not None, "the first ``sync`` starts it"
        return self._server

    @property
    def context_tokens(self) -> int:
        """The server's limit for prompt plus completion tokens.

        Raises:
            UsageError: no response, or the wanted model is not served.
        """
        return self.server.session(self._connect).context or UNLIMITED_CONTEXT

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Each completion is a separate request.

        Raises:
            UsageError: server unavailable, wrong model, unsupported prompts or options, or log-probabilities
                unavailable in its ``--logprobs-mode``.
            RunFailure: a request failed permanently, or the server died, was replaced or sent unusable responses.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        check_sampling(sampling)
        temperature = sampling.temperature
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise UsageError(
                f"sampling.temperature is {temperature:g}; vLLM takes 0 (greedy), or {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        return self.server.session(partial(self._generate, prompts, keys, sampling))

    async def _generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> Groups:
        served = await self._connect()
        context = sampling.within(served.context or UNLIMITED_CONTEXT)
        check_prompts(prompts, context, self.vocab_size)
        logprobs = not prompts or await self._gives_logprobs(served, prompts[0], sampling)
        unused = self._unused()

        async def complete(place: tuple[int, int]) -> Completion:
            i, key = place
            prompt = tuple(map(int, prompts[i]))
            seed = key % (1 << 63)  # vLLM takes 63 bits
            limit = min(sampling.max_tokens, context - len(prompt))
            request = self._request(served.name, prompt, limit, sampling, seed, logprobs, unused)
            completion = await self._complete(request, f"prompt {i}")
            sampled.num_done += 1
            return completion

        with phase("sampling", sum(map(len, keys)), "answers") as sampled:
            places = [(i, key) for i, row in enumerate(keys) for key in row]
            completions = iter(await all_of(complete, places))
        return [[next(completions) for _ in row] for row in keys]

    def _request(
        self,
        model: str,
        prompt: tuple[int, ...],
        limit: int,
        sampling: Sampling,
        seed: int,
        logprobs: bool = True,
        unused: range = range(0),
    ) -> VllmRequest:
        most: int | None = None
        if self.sampling_mask:
            most = self.vocab_size or UNLIMITED_CONTEXT - 1
        return VllmRequest(model, prompt, limit, sampling, seed, logprobs, unused, most)

    def _unused(self) -> range:
        """List model ids without tokenizer text; embeddings are often padded."""
        if self.num_tokens is None or self.vocab_size is None or self.num_tokens >= self.vocab_size:
            return range(0)
        self._say(
            f"the model has {self.vocab_size:,} ids and its tokenizer text for {self.num_tokens:,}; vLLM never "
            "samples the others, and its log-probabilities are those among the ids with a text"
        )
        return range(self.num_tokens, self.vocab_size)

    async def _connect(self) -> ServedModel:
        """Find the model at the server, or find it unchanged."""
        known = self.served
        url = self.server.base
        try:
            retries = None
            if known is None:
                retries = 0
            models = await self.server.ask("GET", "/v1/models", read=read_models, retries=retries)
            served = choose_model(models, self.wanted, self.where)
        except Unanswered as error:
            if known is not None:
                raise RunFailure(f"{url}: the vLLM server is gone: {error}") from None
            raise UsageError(
                f"{url}: no vLLM server answers there ({error}). `posttrain serve-command MODEL_OR_RUN` prints "
                f"the line that starts one; wait until it says that startup is complete, or give its place as "
                f"{self.where}.url"
            ) from None
        except (ServerError, UsageError) as error:
            raise UsageError(f"{url}: {_explain(error)}") from None
        if known is not None and served != known:
            raise RunFailure(
                f"{url}: the server was replaced: it had {known.name!r} from {known.root}, now {served.name!r} from "
                f"{served.root} with a context of {served.context}"
            )
        self.served = served
        return served

    async def _gives_logprobs(self, served: ServedModel, prompt: Sequence[int], sampling: Sampling) -> bool:
        """Return False for truncated sampling. Refuses it in training, and servers that ignore temperature."""
        base = self.server.base
        if sampling.temperature == 0:  # with masks, it is sent as a draw from one token
            return not self.sampling_mask
        if sampling.is_truncated and not sampling.keeps_sets:
            if self.where != "rollout.engine":
                return False
            raise UsageError(
                f"{base}: at top_k {sampling.top_k}, top_p {sampling.top_p:g}, min_p {sampling.min_p:g} vLLM has no "
                "log-probabilities of the whole distribution; leave rollout.top_k, rollout.top_p and rollout.min_p "
                "out, or sample with the native engine"
            )
        is_changed = sampling.temperature != 1 or sampling.rules is not None or sampling.keeps_sets
        if is_changed and not self._is_processed:
            # With a single token to draw from, processed log-probabilities are 0. Models are hardly ever this certain
            # after one id.
            limit = min(MODE_TOKENS, (served.context or UNLIMITED_CONTEXT) - 1)
            only_one = Sampling(limit, temperature=1.0, top_k=1)
            request = self._request(served.name, (int(prompt[-1]),), limit, only_one, seed=0)
            completion = await self._complete(request, "the first prompt")
            if any(value != 0 for value in completion.logprobs):
                raise UsageError(
                    f"{base}: this server's log-probabilities are not those of the distribution that it draws from (at "
                    f"temperature {sampling.temperature:g}); start it with --logprobs-mode processed_logprobs"
                )
            self._is_processed = True
        return True

    async def _complete(self, request: VllmRequest, what: str) -> Completion:
        if request.sampling.keeps_sets:
            reader = partial(read_generated, request=request, vocab_size=self.vocab_size)
            return await self._ask(request.tokens_body(), reader, what, GENERATE)
        read = partial(read_completion, request=request, vocab_size=self.vocab_size)
        return await self._ask(request.body(), read, what)

    async def _ask(
        self, body: dict[str, Any], read: Callable[[Any], Result], what: str, path: str = "/v1/completions"
    ) -> Result:
        base = self.server.base
        try:
            return await self.server.ask("POST", path, body, read=read)
        except RequestRefused as error:
            if path == GENERATE and error.status == 404:
                raise UsageError(f"{base}: this server has no {GENERATE}. {MASKED}") from None
            raise UsageError(f"{base}: {what} was refused: {_explain(error)}") from None
        except Unanswered as error:
            raise RunFailure(f"{base}: no completion of {what}: {error}") from None
        except Unreadable as error:
            raise RunFailure(f"{base}: an answer that cannot be used, to {what}: {error}") from None


def _explain(error: Exception) -> str:
    if isinstance(error, RequestRefused) and error.status in (401, 403):
        return f"the server wants a key (HTTP {error.status}); put it into the environment variable {KEY_VARIABLE}"
    return str(error)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Entry in ``/v1/models``: name, folder or hub name, and context in tokens (None if unknown)."""

    name: str
    root: str
    context: int | None


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """Request body for one completion with at most ``limit`` tokens. Ids in ``unused`` are never drawn.

    ``most``: vocabulary size for servers with masks, where each request must set ``top_k``.
    """

    model: str
    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling
    seed: int
    logprobs: bool = True
    unused: range = range(0)
    most: int | None = None

    def tokens_body(self) -> dict[str, Any]:
        """Convert ``body`` for ``POST /inference/v1/generate``."""
        options = self.body()
        for key in ("model", "prompt", "return_token_ids", "return_tokens_as_token_ids"):
            options.pop(key, None)
        named = {"model": self.model, "token_ids": list(self.prompt), "return_token_ids": True}
        return named | {"sampling_params": options}

    def body(self) -> dict[str, Any]:
        """Build JSON for ``POST /v1/completions``.

        Sets every option that a model's ``generation_config.json`` could override on the server. Only ``stop_ids``
        end a completion; the server's end-of-sequence token is ignored.
        """
        temperature = self.sampling.temperature
        top_p = 1.0
        min_p = 0.0
        top_k = -1
        if temperature != 0:  # not greedy
            top_p = self.sampling.top_p
            min_p = self.sampling.min_p
            if self.sampling.top_k is not None:
                top_k = self.sampling.top_k
        if self.most is not None and temperature == 0:
            temperature = 1.0
            top_k = 1
        elif self.most is not None and top_k < 0:
            top_k = self.most
            if self.sampling.keeps_sets:
                top_k = min(MOST_KEPT, self.most)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.limit,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "min_tokens": self.sampling.min_tokens,
            "repetition_penalty": self.sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": self.seed,
            "stop_token_ids": sorted(self.sampling.stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if self.sampling.stop:
            body["stop"] = list(self.sampling.stop)
            body["include_stop_str_in_output"] = True
        if self.logprobs:
            body["logprobs"] = 0
            body["return_tokens_as_token_ids"] = True
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
    stop_reason: str | int | None = None
    token_ids: list[NonNegativeInt]  # empty after an abort
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _TokenLogprob(BaseModel, strict=True):
    token_id: int
    logprob: Annotated[float, Field(ge=-sys.float_info.max, le=MAX_LOGPROB)]


class _TokenLogprobs(BaseModel, strict=True):
    content: list[_TokenLogprob]


class _TokensChoice(BaseModel, strict=True):
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[NonNegativeInt]
    logprobs: _TokenLogprobs | None = None
    sampling_mask: list[list[NonNegativeInt]] | None = None


class _Generated(BaseModel):
    choices: Annotated[list[_TokensChoice], Field(min_length=1, max_length=1)]
    prompt_token_ids: list[int] | None = None


class _Completions(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


def read_models(answer: object) -> list[ServedModel]:
    """Parse ``/v1/models``. Adapters inherit their parent model's context.

    Raises:
        Unreadable: invalid response.
    """
    try:
        cards = _Models.model_validate(answer).data
    except ValidationError as error:
        raise Unreadable(f"/v1/models lists no models ({describe_fault(error)})") from None
    contexts = {card.id: card.max_model_len for card in cards}
    models = []
    for card in cards:
        context = card.max_model_len or contexts.get(card.parent or "")
        models.append(ServedModel(card.id, card.root or card.id, context))
    return models


def choose_model(models: Sequence[ServedModel], wanted: Sequence[str], where: str = "engine") -> ServedModel:
    """Select the first served model in ``wanted``, or the only served model if nothing is wanted.

    Raises:
        UsageError: no match, or several models without a choice.
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


def read_completion(answer: object, request: VllmRequest, vocab_size: int | None) -> Completion:
    """Parse a ``/v1/completions`` response and validate it against its request.

    If log-probabilities were not requested, they are NaN for each id.

    Raises:
        ValidationError: invalid response.
        Unreadable: missing or inconsistent ids or log-probabilities.
        Interrupted: aborted by the server.
    """
    (choice,) = _Completions.model_validate(answer).choices
    ids, ended = _read_ids(choice, choice.prompt_token_ids, request, vocab_size)
    if not request.logprobs:
        return Completion(ids, (math.nan,) * len(ids), ended)
    logprobs = choice.logprobs
    if logprobs is None or logprobs.tokens != [f"token_id:{token}" for token in ids]:
        raise Unreadable("log-probabilities of other tokens than those of the completion, or none")
    if len(logprobs.token_logprobs) != len(ids):
        raise Unreadable(f"{len(logprobs.token_logprobs)} log-probabilities for {len(ids)} tokens")
    return Completion(ids, tuple(min(value, 0.0) for value in logprobs.token_logprobs), ended)


def read_generated(answer: object, request: VllmRequest, vocab_size: int | None) -> Completion:
    """Parse a ``/inference/v1/generate`` response with kept sets, and validate it against its request.

    Raises:
        ValidationError: invalid response.
        UsageError: no sets returned.
        Unreadable: missing or inconsistent ids, log-probabilities or sets.
        Interrupted: aborted by the server.
    """
    read = _Generated.model_validate(answer)
    (choice,) = read.choices
    ids, ended = _read_ids(choice, read.prompt_token_ids, request, vocab_size)
    if choice.sampling_mask is None:
        raise UsageError(f"the vLLM server returned no sampling_mask. {MASKED}")
    if choice.logprobs is None or [one.token_id for one in choice.logprobs.content] != list(ids):
        raise Unreadable("log-probabilities of other tokens than those of the completion, or none")
    most = min(request.sampling.top_k or MOST_KEPT, MOST_KEPT)
    sets = [sorted(members) for members in choice.sampling_mask]
    if len(sets) != len(ids) or any(token not in members for token, members in zip(ids, sets, strict=False)):
        raise Unreadable(f"{len(sets)} sets of kept tokens for {len(ids)} tokens, or a token outside of its set")
    if any(len(set(members)) != len(members) or len(members) > most for members in sets):
        raise Unreadable(f"a set of kept tokens with one token twice, or with more than {most}")
    flat = [token for members in sets for token in members]
    check_vocabulary(flat, vocab_size)
    kept = KeptSets.of_counts(flat, map(len, sets))
    logprobs = tuple(min(one.logprob, 0.0) for one in choice.logprobs.content)
    return Completion(ids, logprobs, ended, kept=kept)


def _read_ids(
    choice: _Choice | _TokensChoice, read: Sequence[int] | None, request: VllmRequest, vocab_size: int | None
) -> tuple[tuple[int, ...], Finish]:
    """Validate ids and finish reason. ``read``: prompt ids echoed by the server."""
    if choice.finish_reason not in ("stop", "length"):
        raise Interrupted(f"the server ended a completion with {choice.finish_reason!r:.80}")
    ids = tuple(choice.token_ids)
    stops = request.sampling.stop_ids
    if not ids:
        raise Unreadable("no token ids; they come with vLLM 0.10.2 and later (return_token_ids)")
    check_vocabulary(ids, vocab_size)
    if read is not None and tuple(read) != request.prompt:
        raise Unreadable(f"it read a prompt of {len(read)} tokens that is not the one sent, of {len(request.prompt)}")
    ended: Finish = "length"
    if ids[-1] in stops or (choice.finish_reason == "stop" and choice.stop_reason in request.sampling.stop):
        ended = "stop"
    if ended == "length" and (choice.finish_reason == "stop" or len(ids) != request.limit):
        raise Unreadable(
            f"a completion of {len(ids)} tokens that ends with id {ids[-1]} ({choice.finish_reason}), where "
            f"{request.limit} tokens or one of the stop ids {sorted(stops)} end it; start the server with "
            "--generation-config vllm, so that it stops at nothing else"
        )
    if stops & set(ids[:-1]):
        raise Unreadable("a completion that goes on after a stop id")
    return ids, ended


def check_vocabulary(ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse unknown ids.

    Raises:
        Unreadable: names the first one.
    """
    outside = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if outside:
        raise Unreadable(f"token id {outside[0]}, but the model's vocabulary has {vocab_size} entries")
