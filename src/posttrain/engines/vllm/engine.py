"""Engines that ask running vLLM servers: token ids go out over HTTP, token ids and log-probabilities come back.

A server is another process, often on another device or machine, with weights of its own; the package ``vllm`` is not
imported here. ``posttrain serve-command`` prints how to start one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from posttrain.engines.base import UNLIMITED_CONTEXT, Engine, Sampling, check_prompts, check_sampling, num_tokens_of
from posttrain.engines.conversation import Groups
from posttrain.engines.http import HttpServer, Refused, Unanswered, Unreadable, all_of, run
from posttrain.engines.vllm.protocol import (
    CompletionRequest,
    ServedModel,
    check_temperature,
    choose_model,
    mode_request,
    read_completion,
    read_models,
    seed_of,
)
from posttrain.errors import RecipeError, RunFailure, UsageError
from posttrain.option_types import LOOPBACK, ServerUrl, key_for, server_address
from posttrain.registry import register
from posttrain.types import Completion

if TYPE_CHECKING:
    from posttrain.engines.vllm.training import Trained

Result = TypeVar("Result")
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "VLLM_API_KEY"
TRAINS = ("rollout.engine", "eval.engine")  # keys under which a run's own servers may be asked for
# Plain words, digits and a letter beyond ASCII: tokenizers that agree on it are hardly different ones.
TOKENIZER_TEXT = "Eva starts with 19 shells. 3 × (12 - 4) = 24\n"


def check_vllm(options: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the options as they are, if they are in range.

    Raises:
        RecipeError: naming ``key``, under which they stand, and the option.
    """
    for name, least in (("concurrency", 1), ("retries", 0)):
        if options[name] < least:
            raise RecipeError(f"{key}.{name}: {options[name]}; give {least} or more")
    if not options["timeout_seconds"] > 0:
        raise RecipeError(f"{key}.timeout_seconds: {options['timeout_seconds']}; give a number above 0")
    url, servers, gpus = options["url"], options["servers"], options["gpus"] or []
    stated = [url] if isinstance(url, str) else url or []
    if url == []:
        raise RecipeError(f"{key}.url: an empty list; give the servers that run, or leave it out")
    if servers > 1 and (stated or key not in TRAINS):
        why = f"{key}.url names servers that run" if stated else "an evaluation starts none"
        raise RecipeError(f"{key}.servers: {servers} are started by a run, and {why}; give {key}.url alone")
    seen: dict[tuple[Any, ...], str] = {}
    for one in stated:
        scheme, host, port, prefix = server_address(one, f"{key}.url")
        place = (LOOPBACK[0] if host in LOOPBACK else host, port or {"http": 80, "https": 443}[scheme], prefix)
        if place in seen:
            raise RecipeError(f"{key}.url: {seen[place]} and {one} are one server; name each of them once")
        seen[place] = one
    if len(gpus) % servers:
        raise RecipeError(
            f"{key}.gpus: {len(gpus)} GPUs cannot be shared out among {servers} servers; give {servers} or a "
            f"multiple ({key}.servers)"
        )
    if gpus and (min(gpus) < 0 or len(set(gpus)) < len(gpus)):
        raise RecipeError(f"{key}.gpus: {gpus}; give the number of each GPU once, counted from 0")
    return options


@register("engine", needs_model=False, takes_weights=True, complete=check_vllm)
def vllm(
    model: Any,
    tokenizer: Any,
    where: str = "engine",
    *,
    url: ServerUrl | list[ServerUrl] | None = None,
    servers: Annotated[int, Field(ge=1, le=1024)] = 1,
    checkpoint: str | None = None,
    served_name: str | None = None,
    timeout_seconds: float = 900.0,
    concurrency: int = 64,
    retries: int = 3,
    logprobs: bool = True,
    tolerance: float | None = None,
    gpus: list[int] | None = None,
    gpu_memory_utilization: float | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_model_len: int | None = None,
    enforce_eager: bool = False,
    transfer: Literal["auto", "nccl", "files", "gloo"] = "auto",
) -> Engine:
    """Ask a vLLM server: in an evaluation one of a model on disk, in training one whose weights follow.

    In an evaluation the server at ``url`` keeps the weights that it was started with, by the line that ``posttrain
    serve-command`` prints. ``checkpoint`` says which model it must have (an evaluation fills it in), and one of other
    weights is refused; ``served_name`` names a model of the server instead.

    In training the weights are handed over whenever they have changed; then both sides score a fixed batch, and a
    difference above ``tolerance`` nats (0.001 by default, 0.2 in bf16) ends the run. ``transfer``: ``nccl`` from GPU to
    GPU, ``files`` by a folder in the memory of this machine (the default without a GPU of the server's own), ``gloo``
    with the plug-in of ``contrib/``. Without ``url`` the run starts the server itself, with the Python that the
    environment variable POSTTRAIN_VLLM names: on ``gpus``, a share ``gpu_memory_utilization`` of these, in ``dtype``,
    for ``max_model_len`` tokens, ``enforce_eager`` to compile nothing. On the trainer's own GPU it sleeps while the
    trainer computes, and the share is 0.3 by default.

    Several servers divide a batch: those of a list of urls, or ``servers`` of the run's own, which share ``gpus`` out.

    ``concurrency`` requests are under way at a time, at each server; one that fails is repeated up to ``retries``
    times, an attempt may take ``timeout_seconds``. ``logprobs: false`` asks for none (they become NaN), which allows an
    evaluation top-k and top-p at any temperature. A server's key comes from the environment variable VLLM_API_KEY.
    A completion's random numbers follow from its own key. They are vLLM's, so tokens differ from the native engine's,
    and a token may turn over with the rounding of what is computed beside it.
    """
    asking: dict[str, Any] = {"timeout_seconds": timeout_seconds, "concurrency": concurrency, "retries": retries}
    asking |= {"where": where, "logprobs": logprobs, "wanted": () if served_name is None else (served_name,)}
    urls = url if isinstance(url, list) else [] if url is None else [url]
    if model is None:
        vocab_size = None
        if checkpoint is not None:  # needs transformers, which a list of components does not
            from posttrain.engines.served_names import absolute_source, served_names
            from posttrain.engines.vllm.command import config_of

            asking["wanted"] = asking["wanted"] or served_names(checkpoint)
            vocab_size = getattr(config_of(absolute_source(checkpoint)), "vocab_size", None)
        return VllmEngine(urls or [DEFAULT_URL], tokenizer=tokenizer, vocab_size=vocab_size, **asking)
    own = {"gpus": tuple(gpus or ()), "gpu_memory_utilization": gpu_memory_utilization, "dtype": dtype}
    own |= {"max_model_len": max_model_len, "enforce_eager": enforce_eager}
    return _trained()(model, tokenizer, urls, servers, own, transfer=transfer, tolerance=tolerance, **asking)


def _trained() -> type[Trained]:
    from posttrain.engines.vllm.training import Trained  # needs transformers

    return Trained


class VllmEngine(Engine):
    """See ``vllm``. Each of the servers answers a part of a batch.

    Args:
        tokenizer: may be None; then none is compared with the servers'.
        vocab_size: ids of the model; None: not known.
        wanted: names under which a server may have the model, best first; none: its only one.
        where: the key under which the engine stands in the recipe, for messages.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        wanted: Sequence[str] = (),
        timeout_seconds: float = 900.0,
        concurrency: int = 64,
        retries: int = 3,
        logprobs: bool = True,
        where: str = "engine",
    ) -> None:
        self.where, self.tokenizer, self.vocab_size, self.wanted = where, tokenizer, vocab_size, tuple(wanted)
        self.timeout_seconds, self.concurrency, self.retries = timeout_seconds, concurrency, retries
        self.logprobs = logprobs
        self.num_tokens = None if tokenizer is None else num_tokens_of(tokenizer)
        self._say_unused = True
        self._reach(urls)

    def _reach(self, urls: Sequence[str]) -> None:
        """Ask these servers from now on."""
        self.servers = [
            HttpServer(
                url,
                timeout_seconds=self.timeout_seconds,
                retries=self.retries,
                concurrency=self.concurrency,
                token=key_for(url, f"{self.where}.url", KEY_VARIABLE),
            )
            for url in urls
        ]
        self._served: dict[str, ServedModel] = {}
        self._processed: set[str] = set()  # those whose log-probabilities are at the sampling temperature

    @property
    def context_tokens(self) -> int:
        """Prompt and completion together, as the server with the least room says.

        Raises:
            UsageError: no server answers there, or not with the model that is wanted.
        """
        return run(self._with_servers(self._connect))

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Every completion is a request of its own.

        The division among servers is by place in the batch alone, in pieces of a row, so that most answers to one
        prompt come from one server and its cache of prompts.

        Raises:
            UsageError: no server, another model than wanted, prompts or sampling options that it
                cannot serve, or log-probabilities that its ``--logprobs-mode`` cannot give.
            RunFailure: a request failed for good; the server died, was replaced or answers nonsense.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        check_sampling(sampling)
        check_temperature(sampling.temperature)
        return run(self._with_servers(partial(self._generate, prompts, keys, sampling)))

    async def _with_servers(self, work: Callable[[], Any]) -> Any:
        async with AsyncExitStack() as stack:
            for server in self.servers:
                await stack.enter_async_context(server)
            return await work()

    async def _generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> Groups:
        context = sampling.within(await self._connect())
        check_prompts(prompts, context, self.vocab_size)
        places = [(i, key) for i, row in enumerate(keys) for key in row]
        work = []
        for n, (i, key) in enumerate(places):
            server = self.servers[(n * len(self.servers) // len(places) + self.world.rank) % len(self.servers)]
            limit = min(sampling.max_tokens, context - len(prompts[i]))
            name, prompt = self._served[server.base].name, tuple(map(int, prompts[i]))
            request = CompletionRequest(name, prompt, limit, sampling, seed_of(key), self.logprobs, self._unused())
            work.append((server, i, request))
        for server, i, _ in {server.base: one for one in work for server in [one[0]]}.values():
            await self._check_mode(server, prompts[i], sampling)
        completions = iter(await all_of(self._complete, work))
        return [[next(completions) for _ in row] for row in keys]

    def _unused(self) -> range:
        """Ids of the model that the tokenizer has no text for: embeddings are often padded."""
        if self.num_tokens is None or self.vocab_size is None or self.num_tokens >= self.vocab_size:
            return range(0)
        if self._say_unused:
            self._say_unused = False
            self._notices += (
                f"the model has {self.vocab_size:,} ids and its tokenizer text for {self.num_tokens:,}; vLLM never "
                "samples the others, and its log-probabilities are those among the ids with a text",
            )
        return range(self.num_tokens, self.vocab_size)

    async def _connect(self) -> int:
        """Find the model at every server, at first, or find it unchanged; returns the least context."""
        models = await all_of(self._find, self.servers)
        return min((model.context or UNLIMITED_CONTEXT for model in models), default=UNLIMITED_CONTEXT)

    async def _find(self, server: HttpServer) -> ServedModel:
        known, url = self._served.get(server.base), server.base
        try:
            models = await server.ask("GET", "/v1/models", read=read_models, retries=self.retries if known else 0)
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
            await self._check_tokenizer(server, served)
            self._served[url] = served
        elif served != known:
            raise RunFailure(
                f"{url}: the server was replaced: it had {known.name!r} from {known.root}, now {served.name!r} from "
                f"{served.root} with a context of {served.context}"
            )
        return served

    async def _check_tokenizer(self, server: HttpServer, served: ServedModel) -> None:
        """Refuse a server that cuts plain text into other tokens than the tokenizer here."""
        if self.tokenizer is None:
            return
        own = self.tokenizer.encode(TOKENIZER_TEXT, add_special_tokens=False)
        body = {"model": served.name, "prompt": TOKENIZER_TEXT, "add_special_tokens": False}
        try:
            theirs = await server.ask("POST", "/tokenize", body, read=lambda answer: answer["tokens"])
        except Refused:
            return  # a gateway that passes only /v1 on; ids are checked in every answer
        except (Unanswered, Unreadable) as error:
            raise UsageError(f"{server.base}: /tokenize gives no tokens ({error})") from None
        if theirs != list(own):
            raise UsageError(
                f"{server.base}: the server has {served.name!r} from {served.root}, whose tokenizer is not the one "
                f"here: {TOKENIZER_TEXT!r} is {theirs} there and {list(own)} here. Start the server with the same model"
            )

    async def _check_mode(self, server: HttpServer, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse sampling whose log-probabilities the server would give truncated or at another temperature."""
        if not self.logprobs or sampling.temperature == 0:
            return
        asked = f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}"
        none = (
            f"{server.base}: at {asked} this server has no log-probabilities of the whole distribution. "
            f"An evaluation needs none: set {self.where}.logprobs to false"
        )
        if sampling.top_k is not None or sampling.top_p < 1:
            raise UsageError(none)
        if sampling.temperature != 1 and server.base not in self._processed:
            completion = await self._complete((server, 0, mode_request(self._served[server.base], prompt)))
            if any(value != 0 for value in completion.logprobs):
                raise UsageError(f"{none}, or start the server with --logprobs-mode processed_logprobs")
            self._processed.add(server.base)

    async def _complete(self, numbered: tuple[HttpServer, int, CompletionRequest]) -> Completion:
        server, index, request = numbered
        read = partial(read_completion, request=request, vocab_size=self.vocab_size)
        return await self._ask(server, request.body(), read, f"prompt {index}")

    async def _ask(self, server: HttpServer, body: dict[str, Any], read: Callable[[Any], Result], what: str) -> Result:
        try:
            return await server.ask("POST", "/v1/completions", body, read=read)
        except Unanswered as error:
            raise RunFailure(f"{server.base}: no completion of {what}: {error}") from None
        except Unreadable as error:
            raise RunFailure(f"{server.base}: an answer that cannot be used, to {what}: {error}") from None
        except Refused as error:
            raise UsageError(f"{server.base}: {what} was refused: {_explain_refusal(error)}") from None


def _explain_refusal(error: Refused) -> str:
    if error.status in (401, 403):
        return f"the server wants a key (HTTP {error.status}); put it into the environment variable {KEY_VARIABLE}"
    return f"HTTP {error.status}: {error}"
