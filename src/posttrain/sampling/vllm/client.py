"""The client of a running vLLM server: token ids go out over HTTP, token ids and log-probabilities come back.

The server is another process, often on another device or machine; the package ``vllm`` is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from posttrain.errors import RunFailure, UsageError
from posttrain.option_types import key_for
from posttrain.sampling.base import (
    UNLIMITED_CONTEXT,
    Engine,
    Groups,
    Sampling,
    check_prompts,
    check_sampling,
    num_tokens_of,
)
from posttrain.sampling.http import HttpServer, Refused, Unanswered, Unreadable, all_of
from posttrain.sampling.vllm.protocol import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    CompletionRequest,
    ServedModel,
    choose_model,
    read_completion,
    read_models,
)
from posttrain.types import Completion

Result = TypeVar("Result")
KEY_VARIABLE = "VLLM_API_KEY"
MODE_TOKENS = 8


class VllmEngine(Engine):
    """See ``vllm``.

    Args:
        url: None for a server that is started later.
        tokenizer: its number of ids is the limit of those that may be drawn; None: the server's.
        vocab_size: ids of the model; None: not known.
        wanted: names under which the server may have the model, best first; none: its only one.
        where: the key of the engine in the recipe, for messages.
    """

    def __init__(
        self,
        url: str | None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        wanted: Sequence[str] = (),
        timeout_seconds: float = 900.0,
        concurrency: int = 64,
        retries: int = 3,
        where: str = "engine",
    ) -> None:
        self.where, self.tokenizer, self.vocab_size, self.wanted = where, tokenizer, vocab_size, tuple(wanted)
        self.num_tokens = None if tokenizer is None else num_tokens_of(tokenizer)
        self.retries, self.timeout_seconds, self.concurrency = retries, timeout_seconds, concurrency
        self._names_unused = True
        self._reach(url)

    def _reach(self, url: str | None) -> None:
        """Use the server at this address from now on."""
        self.served: ServedModel | None = None
        self._is_processed = False  # its log-probabilities are at the sampling temperature
        self._server: HttpServer | None = None
        if url is not None:
            token = key_for(url, f"{self.where}.url", KEY_VARIABLE)
            self._server = HttpServer(
                url,
                timeout_seconds=self.timeout_seconds,
                retries=self.retries,
                concurrency=self.concurrency,
                token=token,
            )

    @property
    def server(self) -> HttpServer:
        assert self._server is not None, "the first ``sync`` starts it"
        return self._server

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and completion together at the server.

        Raises:
            UsageError: no server answers there, or not with the model that is wanted.
        """
        return self.server.session(self._connect).context or UNLIMITED_CONTEXT

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Every completion is a request of its own.

        Raises:
            UsageError: no server, another model than wanted, prompts or sampling options that it cannot serve, or
                log-probabilities that its ``--logprobs-mode`` cannot give.
            RunFailure: a request failed for good; the server died, was replaced or gives unusable answers.
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
            prompt, seed = tuple(map(int, prompts[i])), key % (1 << 63)  # vLLM takes 63 bits
            limit = min(sampling.max_tokens, context - len(prompt))
            request = CompletionRequest(served.name, prompt, limit, sampling, seed, logprobs, unused)
            return await self._complete(request, f"prompt {i}")

        completions = iter(await all_of(complete, [(i, key) for i, row in enumerate(keys) for key in row]))
        return [[next(completions) for _ in row] for row in keys]

    def _unused(self) -> range:
        """Return the model's ids without a text in the tokenizer: embeddings are often padded."""
        if self.num_tokens is None or self.vocab_size is None or self.num_tokens >= self.vocab_size:
            return range(0)
        if self._names_unused:
            self._names_unused = False
            self._warnings += (
                f"the model has {self.vocab_size:,} ids and its tokenizer text for {self.num_tokens:,}; vLLM never "
                "samples the others, and its log-probabilities are those among the ids with a text",
            )
        return range(self.num_tokens, self.vocab_size)

    async def _connect(self) -> ServedModel:
        """Find the model at the server, or find it unchanged."""
        known, url = self.served, self.server.base
        try:
            retries = 0 if known is None else self.retries
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
        except Refused as error:
            raise UsageError(f"{url}: {_explain_refusal(error)}") from None
        except (Unreadable, UsageError) as error:
            raise UsageError(f"{url}: {error}") from None
        if known is None:
            self.served = served
        elif served != known:
            raise RunFailure(
                f"{url}: the server was replaced: it had {known.name!r} from {known.root}, now {served.name!r} from "
                f"{served.root} with a context of {served.context}"
            )
        return served

    async def _gives_logprobs(self, served: ServedModel, prompt: Sequence[int], sampling: Sampling) -> bool:
        """Return False for truncated sampling; refuse it in training, and a server that ignores the temperature."""
        base = self.server.base
        if sampling.temperature == 0:
            return True
        if sampling.top_k is not None or sampling.top_p < 1:
            if self.where != "rollout.engine":
                return False
            raise UsageError(
                f"{base}: at top_k {sampling.top_k}, top_p {sampling.top_p:g} vLLM has no log-probabilities of the "
                "whole distribution; leave rollout.top_k and rollout.top_p out, or sample with the native engine"
            )
        if sampling.temperature != 1 and not self._is_processed:
            # With one token to draw from, processed log-probabilities are 0. Hardly any model is certain of these
            # tokens after a single id.
            limit = min(MODE_TOKENS, (served.context or UNLIMITED_CONTEXT) - 1)
            only_one = Sampling(limit, temperature=1.0, top_k=1)
            request = CompletionRequest(served.name, (int(prompt[-1]),), limit, only_one, seed=0)
            if any(value != 0 for value in (await self._complete(request, "the first prompt")).logprobs):
                raise UsageError(
                    f"{base}: this server's log-probabilities are not those at temperature {sampling.temperature:g}; "
                    "start it with --logprobs-mode processed_logprobs"
                )
            self._is_processed = True
        return True

    async def _complete(self, request: CompletionRequest, what: str) -> Completion:
        read = partial(read_completion, request=request, vocab_size=self.vocab_size)
        return await self._ask(request.body(), read, what)

    async def _ask(self, body: dict[str, Any], read: Callable[[Any], Result], what: str) -> Result:
        base = self.server.base
        try:
            return await self.server.ask("POST", "/v1/completions", body, read=read)
        except Unanswered as error:
            raise RunFailure(f"{base}: no completion of {what}: {error}") from None
        except Unreadable as error:
            raise RunFailure(f"{base}: an answer that cannot be used, to {what}: {error}") from None
        except Refused as error:
            raise UsageError(f"{base}: {what} was refused: {_explain_refusal(error)}") from None


def _explain_refusal(error: Refused) -> str:
    if error.status in (401, 403):
        return f"the server wants a key (HTTP {error.status}); put it into the environment variable {KEY_VARIABLE}"
    return f"HTTP {error.status}: {error}"
