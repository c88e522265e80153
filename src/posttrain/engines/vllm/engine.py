"""The engine behind a running vLLM server: token ids go out over HTTP, token ids and log-probabilities come back.

The server is another process, often on another device or machine, with weights of its own; the
package ``vllm`` is not imported here. ``posttrain serve-command`` prints how to start it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from posttrain.addresses import LOOPBACK, ServerUrl, key_for, server_address
from posttrain.engines.base import UNLIMITED_CONTEXT, Engine, Sampling, check_prompts, check_sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.vllm.http import HttpServer, Refused, Unanswered
from posttrain.engines.vllm.protocol import (
    CompletionRequest,
    LogprobsMode,
    ServedModel,
    Unreadable,
    check_temperature,
    choose_model,
    exact_modes,
    mode_request,
    read_completion,
    read_mode,
    read_models,
    seed_of,
)
from posttrain.engines.weights import Reader
from posttrain.errors import EngineMismatch, RecipeError, RunFailure, UsageError
from posttrain.option_types import Few
from posttrain.registry import register
from posttrain.types import Completion

if TYPE_CHECKING:
    from posttrain.engines.vllm.probe import Scores

Item = TypeVar("Item")
Result = TypeVar("Result")
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "VLLM_API_KEY"
MOST_SERVERS = 1024
MAX_PORT = 65535
TRAINS = ("rollout.engine", "eval.engine")  # keys under which a run's own servers may be asked for
# Plain words, digits and a letter beyond ASCII: tokenizers that agree on it are hardly different ones.
TOKENIZER_TEXT = "Eva starts with 19 shells. 3 × (12 - 4) = 24\n"


# The options that say something beside ``colocate``; all others are about a server.
COLOCATED = frozenset({"logprobs", "tolerance", "gpu_memory", "dtype", "max_model_len", "eager"})


def check_vllm(options: dict[str, Any], key: str) -> dict[str, Any]:
    """The options as they are, if they are in range and none is about a server where there is none.

    Raises:
        RecipeError: naming ``key``, under which they stand, and the option.
    """
    for name, least in (("concurrency", 1), ("retries", 0), ("restarts", 0)):
        if options[name] < least:
            raise RecipeError(f"{key}.{name}: {options[name]}; give {least} or more")
    if not options["timeout_seconds"] > 0:
        raise RecipeError(f"{key}.timeout_seconds: {options['timeout_seconds']}; give a number above 0")
    _check_servers(options["url"], options["servers"], key)
    _check_own(options["servers"], options["gpus"] or [], options["port"], key)
    usual = inspect.signature(vllm).parameters
    for name, value in options.items() if options["colocate"] else ():
        if name not in (*COLOCATED, "colocate", "checkpoint") and value != usual[name].default:
            raise RecipeError(
                f"{key}.{name}: {value!r} is about a vLLM server, and with colocate: true there is none; "
                f"leave one of the two out (beside colocate stand {', '.join(sorted(COLOCATED))})"
            )
    return options


def _check_servers(url: str | list[str] | None, servers: int, key: str) -> None:
    """Refuse a fleet that cannot be one: no url or one twice, servers beside urls, or that nobody starts."""
    stated = [url] if isinstance(url, str) else url or []
    if url == []:
        raise RecipeError(f"{key}.url: an empty list; give the servers that run, or leave it out")
    if servers > 1 and (stated or key not in TRAINS):
        why = f"{key}.url names servers that run" if stated else "an evaluation starts none"
        raise RecipeError(f"{key}.servers: {servers} are started by a run, and {why}; give {key}.url alone")
    if max(servers, len(stated)) > MOST_SERVERS:
        what = "url" if stated else "servers"
        raise RecipeError(f"{key}.{what}: {max(servers, len(stated))}; {MOST_SERVERS} at most")
    seen: dict[tuple[Any, ...], str] = {}
    for one in stated:
        scheme, host, port, prefix = server_address(one, f"{key}.url")
        place = (LOOPBACK[0] if host in LOOPBACK else host, port or {"http": 80, "https": 443}[scheme], prefix)
        if place in seen:
            raise RecipeError(f"{key}.url: {seen[place]} and {one} are one server; name each of them once")
        seen[place] = one


def _check_own(servers: int, gpus: list[int], port: int, key: str) -> None:
    """Refuse GPUs that the run's own servers cannot share, and ports that there are not."""
    if len(gpus) % servers:
        raise RecipeError(
            f"{key}.gpus: {len(gpus)} GPUs cannot be shared out among {servers} servers; give {servers} or a "
            f"multiple ({key}.servers)"
        )
    if gpus and min(gpus) < 0:
        raise RecipeError(f"{key}.gpus: {min(gpus)} is no GPU's number; they count from 0")
    if len(set(gpus)) < len(gpus):
        raise RecipeError(f"{key}.gpus: {gpus} names one twice")
    if not 0 <= port <= MAX_PORT + 1 - servers:
        last = port if servers == 1 else port + servers - 1
        raise RecipeError(f"{key}.port: {last} is no port; give 1 to {MAX_PORT}, or 0 for any that is free")


@register("engine", needs_model=False, takes_weights=True, complete=check_vllm)
def vllm(
    model: Any,
    tokenizer: Any,
    where: str = "engine",
    *,
    url: ServerUrl | list[ServerUrl] | None = None,
    servers: Few = 1,
    checkpoint: str | None = None,
    served_name: str | None = None,
    timeout_seconds: float = 900.0,
    concurrency: int = 64,
    retries: int = 3,
    logprobs: bool = True,
    tolerance: float | None = None,
    port: int = 0,
    gpus: list[int] | None = None,
    gpu_memory: float | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_model_len: int | None = None,
    eager: bool = False,
    collectives: Literal["auto", "gloo", "nccl"] = "auto",
    restarts: int = 2,
    colocate: bool = False,
) -> Engine:
    """Ask a vLLM server: in an evaluation one of a model on disk, in training one whose weights follow.

    In an evaluation the server at ``url`` keeps the weights that it was started with, by the line that ``posttrain
    serve-command`` prints. ``checkpoint`` says which model it must have (an evaluation fills it in), and one of other
    weights is refused; ``served_name`` names a model of the server instead.

    In training the weights are handed over whenever they have changed (``collectives``: NCCL between GPUs, gloo through
    the CPU's memory); then both sides score a fixed batch, and a difference above ``tolerance`` nats (0.001 by default,
    0.2 in bf16) ends the run. Without ``url`` the run starts the server itself, with the Python that the environment
    variable POSTTRAIN_VLLM names: on ``port`` (0: a free one), ``gpus``, a share ``gpu_memory`` of these, in ``dtype``,
    for ``max_model_len`` tokens, ``eager`` to compile nothing. It is started again at most ``restarts`` times.

    Several servers divide a batch: those of a list of urls, or ``servers`` of the run's own, which share ``gpus`` out
    and listen on ``port`` and those behind it. Each has every version of the weights before it answers.

    ``colocate`` builds vLLM in the trainer's own process and on its device instead, with weights by reference; on a GPU
    it sleeps while the trainer computes, and ``gpu_memory`` is 0.3 by default.

    ``concurrency`` requests are under way at a time, at each server; one that fails is repeated up to ``retries``
    times, an attempt may take ``timeout_seconds``. ``logprobs: false`` asks for none (they become NaN), which allows an
    evaluation top-k and top-p at any temperature. A server's key comes from the environment variable VLLM_API_KEY.
    A completion's random numbers follow from its own key. They are vLLM's, so tokens differ from the native engine's,
    and a token may turn over with the rounding of what is computed beside it.
    """
    if colocate:
        return _colocated(dict(locals()))
    asking: dict[str, Any] = {"timeout_seconds": timeout_seconds, "concurrency": concurrency, "retries": retries}
    asking["where"] = where
    asking |= {"logprobs": logprobs, "tolerance": tolerance, "wanted": () if served_name is None else (served_name,)}
    urls: Sequence[str | None] = url if isinstance(url, list) else [url]
    if model is None:
        return _of_a_model_on_disk(urls, tokenizer, checkpoint, asking)
    own = {"port": port, "gpus": tuple(gpus or ()), "gpu_memory": gpu_memory, "eager": eager, "dtype": dtype}
    own |= {"max_model_len": max_model_len}
    places = urls if url is not None else [None] * servers
    return _following(model, tokenizer, places, own, restarts, asking | {"collectives": collectives})


def _following(*told: Any) -> Engine:
    from posttrain.engines.vllm.fleet import following_fleet  # needs transformers, which no list of words does

    return following_fleet(*told)


def _of_a_model_on_disk(
    urls: Sequence[str | None], tokenizer: Any, checkpoint: str | None, asking: dict[str, Any]
) -> Engine:
    """What asks servers that were started with their weights; ``asking``: as of ``VllmEngine``."""
    if checkpoint is not None and not asking["wanted"]:
        from posttrain.engines.vllm.command import served_names  # needs transformers, which a list of words does not

        asking = asking | {"wanted": served_names(checkpoint)}
    engines = [VllmEngine(url or DEFAULT_URL, tokenizer=tokenizer, **asking) for url in urls]
    if len(engines) == 1:
        return engines[0]
    from posttrain.engines.vllm.fleet import AskedFleet

    return AskedFleet(engines)


def _colocated(options: dict[str, Any]) -> Engine:
    from posttrain.engines.vllm.colocated import colocated  # needs transformers, which a list of words does not

    return colocated(**options)


class VllmEngine(Engine):
    """See ``vllm``. ``wanted``: names under which the server may have the model, best first; none: its only one.

    ``where``: the key under which the engine stands in the recipe, for messages; so in the other classes here.

    ``model`` and ``tokenizer`` may be None: then nothing is compared with them.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: Any = None,
        tokenizer: Any = None,
        wanted: Sequence[str] = (),
        timeout_seconds: float = 900.0,
        concurrency: int = 64,
        retries: int = 3,
        logprobs: bool = True,
        tolerance: float | None = None,
        where: str = "engine",
    ) -> None:
        self.where = where
        server_address(url, f"{where}.url")
        self.url = url.strip().rstrip("/")
        self.model, self.tokenizer, self.wanted, self.reader = model, tokenizer, tuple(wanted), Reader(model)
        self.timeout_seconds, self.concurrency, self.retries = timeout_seconds, concurrency, retries
        self.logprobs, self.tolerance = logprobs, tolerance
        self._served: ServedModel | None = None
        self._mode: LogprobsMode | None = None
        self._server: HttpServer | None = None
        self.is_hung_up = False

    def hang_up(self) -> None:
        """From another thread: what this one asks fails now, and until ``is_hung_up`` is taken back."""
        self.is_hung_up = True
        if self._server is not None:
            self._server.close()

    @property
    def context_tokens(self) -> int:
        """Prompt and completion together, as the server says.

        Raises:
            UsageError: no server answers there, or not with the model that is wanted.
        """
        with self._open() as server:
            return self._connect(server).context or UNLIMITED_CONTEXT

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Every completion is a request of its own.

        Raises:
            UsageError: no server, another model than wanted, prompts or sampling options that it
                cannot serve, or log-probabilities that its ``--logprobs-mode`` cannot give.
            EngineMismatch: the model in this process has other weights.
            RunFailure: a request failed for good; the server died, was replaced or answers nonsense.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        check_sampling(sampling)
        check_temperature(sampling.temperature)
        with self._open() as server:
            served = self._connect(server)
            context = sampling.within(served.context or UNLIMITED_CONTEXT)
            check_prompts(prompts, context, self._vocab_size())
            requests = [
                (i, self._request(served, prompt, sampling, seed_of(key)))
                for i, prompt in enumerate(prompts)
                for key in keys[i]
            ]
            if requests:
                self._check_mode(server, served, prompts[requests[0][0]], sampling)
                self._probe(server, served)
            completions = iter(self._all(server, partial(self._complete, server), requests))
        return [[next(completions) for _ in row] for row in keys]

    def _open(self) -> HttpServer:
        self._server = HttpServer(
            self.url,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
            token=key_for(self.url, f"{self.where}.url", KEY_VARIABLE),
        )
        if self.is_hung_up:
            self._server.close()
        return self._server

    def _connect(self, server: HttpServer) -> ServedModel:
        """The model that is asked; found at first, and found unchanged afterwards."""
        try:
            models = server.call("GET", "/v1/models", read=read_models, retries=self.retries if self._served else 0)
            served = choose_model(models, self.wanted, self.where)
        except Unanswered as error:
            if self._served is not None:
                raise RunFailure(f"{self.url}: the vLLM server is gone: {error}") from None
            raise UsageError(
                f"{self.url}: no vLLM server answers there ({error}). `posttrain serve-command MODEL_OR_RUN` prints "
                f"the line that starts one; wait until it says that startup is complete, or give its place as "
                f"{self.where}.url"
            ) from None
        except Refused as error:
            raise UsageError(f"{self.url}: {_explain_refusal(error)}") from None
        except (Unreadable, UsageError) as error:
            raise UsageError(f"{self.url}: {error}") from None
        if self._served is None:
            self._check_tokenizer(server, served)
            self._served = served
        elif served != self._served:
            raise RunFailure(
                f"{self.url}: the server was replaced: it had {self._served.name!r} from {self._served.root}, "
                f"now {served.name!r} from {served.root} with a context of {served.context}"
            )
        return served

    def _check_tokenizer(self, server: HttpServer, served: ServedModel) -> None:
        """Refuse a server that cuts plain text into other tokens than the tokenizer here."""
        if self.tokenizer is None:
            return
        own = self.tokenizer.encode(TOKENIZER_TEXT, add_special_tokens=False)
        body = {"model": served.name, "prompt": TOKENIZER_TEXT, "add_special_tokens": False}
        try:
            theirs = server.call("POST", "/tokenize", body, read=lambda answer: answer["tokens"])
        except Refused:
            return  # a gateway that passes only /v1 on; ids are checked in every answer
        except (Unanswered, Unreadable) as error:
            raise UsageError(f"{self.url}: /tokenize gives no tokens ({error})") from None
        if theirs != list(own):
            raise UsageError(
                f"{self.url}: the server has {served.name!r} from {served.root}, whose tokenizer is not the one here: "
                f"{TOKENIZER_TEXT!r} is {theirs} there and {list(own)} here. Start the server with the same model"
            )

    def _check_mode(self, server: HttpServer, served: ServedModel, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse sampling whose log-probabilities the server would give at another temperature or truncated."""
        exact = exact_modes(sampling)
        if not self.logprobs or len(exact) == 2:
            return
        if exact and self._mode is None:
            request = mode_request(served, prompt)
            self._mode = read_mode(self._complete(server, (0, request)))
        if self._mode not in exact:
            asked = f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}"
            mode = f" with --logprobs-mode {self._mode}_logprobs" if exact else ""
            other = f", or start the server with --logprobs-mode {next(iter(exact))}_logprobs" if exact else ""
            raise UsageError(
                f"{self.url}: at {asked} a vLLM server{mode} has no log-probabilities of the whole distribution. "
                f"An evaluation needs none: set {self.where}.logprobs to false{other}"
            )

    def _probe(self, server: HttpServer, served: ServedModel) -> None:
        """Refuse a server whose log-probabilities are not those of the model in this process."""
        if self.model is None:
            return
        from posttrain.engines.vllm.probe import default_tolerance

        difference = self.score(server, served)
        tolerance = default_tolerance(self.model) if self.tolerance is None else self.tolerance
        if difference > tolerance:
            raise EngineMismatch(
                f"{self.url}: the server's log-probabilities of a probe differ by {difference:.2g} nats from those of "
                f"the model here (at most {tolerance:g} is allowed). Either {served.name!r} from {served.root} has "
                "other weights, older ones perhaps: start the server anew with the line of `posttrain serve-command`. "
                f"Or it computes in another precision: start it with the same --dtype, or raise {self.where}.tolerance"
            )

    def score(self, server: HttpServer, served: ServedModel) -> float:
        """By how much the server's log-probabilities of a fixed batch differ from the model's own, in nats.

        Raises:
            RunFailure: the server does not answer, or with something else.
        """
        from posttrain.engines.vllm.probe import largest_difference, probe_bodies, probe_prompts, read_scores

        context = served.context or UNLIMITED_CONTEXT
        bodies = probe_bodies(served, probe_prompts(self._vocab_size() or 1, context), context)

        def ask(body: dict[str, Any]) -> Scores:
            read = partial(read_scores, prompt=body["prompt"], vocab_size=self._vocab_size() or 1)
            return self._call(server, "/v1/completions", body, read, "the probe")

        # vLLM 0.32 on a CPU ends where a prompt is scored by an adapter while another answer is being written
        alone = [body for body in bodies if served.is_adapter and "prompt_logprobs" in body]
        together = [body for body in bodies if body not in alone]
        scored = [*self._all(server, ask, together), *map(ask, alone)]
        return self.reader.compute(partial(largest_difference, scored=scored))

    def _vocab_size(self) -> int | None:
        return None if self.model is None else int(self.model.get_input_embeddings().weight.shape[0])

    def _request(self, served: ServedModel, prompt: Sequence[int], sampling: Sampling, seed: int) -> CompletionRequest:
        limit = min(sampling.max_tokens, sampling.within(served.context or UNLIMITED_CONTEXT) - len(prompt))
        return CompletionRequest(served.name, tuple(map(int, prompt)), limit, sampling, seed, self.logprobs)

    def _all(self, server: HttpServer, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """``work`` on every item, many at a time, in order; the first failure ends all the others."""
        if not items:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(items)), "vllm") as pool:
            futures: list[Future[Result]] = []
            try:
                futures += [pool.submit(work, item) for item in items]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [future for future in futures if future in done and future.exception() is not None]
                if failed:
                    failed[0].result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                server.close()  # whoever waits for an answer stops waiting
                raise
            return [future.result() for future in futures]

    def _complete(self, server: HttpServer, numbered: tuple[int, CompletionRequest]) -> Completion:
        index, request = numbered
        read = partial(read_completion, request=request, vocab_size=self._vocab_size())
        return self._call(server, "/v1/completions", request.body(), read, f"prompt {index}")

    def _call(
        self, server: HttpServer, path: str, body: dict[str, Any], read: Callable[[Any], Result], what: str
    ) -> Result:
        try:
            return server.call("POST", path, body, read=read)
        except Unanswered as error:
            raise RunFailure(f"{self.url}: no completion of {what}: {error}") from None
        except Unreadable as error:
            raise RunFailure(f"{self.url}: an answer that cannot be used, to {what}: {error}") from None
        except Refused as error:
            raise UsageError(f"{self.url}: {what} was refused: {_explain_refusal(error)}") from None


def _explain_refusal(error: Refused) -> str:
    if error.status in (401, 403):
        return f"the server wants a key (HTTP {error.status}); put it into the environment variable {KEY_VARIABLE}"
    return f"HTTP {error.status}: {error}"
