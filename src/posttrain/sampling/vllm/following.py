"""vLLM servers whose weights follow training, provided by users or started by a run.

Each transfer labels the server's weights. The label is checked before and after every batch, which detects restarted
servers and weights from other sources. After each transfer both sides score a fixed batch, which detects missing
tensors, stale packed heads and stale prompt caches.
"""

from __future__ import annotations

import base64
import copy
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.cuda import nccl
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import EngineMismatch, RunFailure, UsageError, first_line
from posttrain.models.forward.forward import causal_lm
from posttrain.models.forward.precision import DTYPES
from posttrain.models.load import quantized_bits
from posttrain.models.lora import has_adapter, merged_weights
from posttrain.option_types import LOOPBACK
from posttrain.process_group import ProcessGroup, Within, whole
from posttrain.randomness import generator
from posttrain.sampling.base import UNLIMITED_CONTEXT, Engine, Groups, Sampling
from posttrain.sampling.http import HttpServer, RequestRefused, ServerError, Unreadable, all_of
from posttrain.sampling.native.engine import sampling_mode
from posttrain.sampling.vllm.client import ServedModel, VllmEngine, VllmRequest, check_vocabulary
from posttrain.sampling.vllm.server import OwnServer, find_interpreter, free_port, server_command

SERVED = "policy"  # served model name
SHARED_GPU = 0.3  # fraction of the trainer's GPU used by an awake server
MEMORY = Path("/dev/shm")
PREFIX = "posttrain-vllm-"


class TrainingVllmEngine(VllmEngine):
    """See ``vllm``. If ``url`` is None, the first ``sync`` starts a server.

    ``own``: ``server_command`` options for it. With several training processes, the first controls the server and all
    of them send requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        url: str | None,
        own: dict[str, Any],
        *,
        tolerance: float | None = None,
        **asking: Any,
    ) -> None:
        size = int(model.get_input_embeddings().weight.shape[0])
        super().__init__(url, tokenizer=tokenizer, vocab_size=size, **asking)
        self.model = model
        self.own = own
        self.starts = url is None
        self.device = next(model.parameters()).device
        self.sleeps = self.starts and self.device.type == "cuda" and self._shares_gpu()
        self.by_files = self.sleeps or self.device.type != "cuda"
        if self.by_files and self._server is not None and self.server.host not in LOOPBACK:
            raise UsageError(
                f"{self.where}.url: without a GPU here weights go by files of this machine, and {self.server.base} is "
                "another; name a server of this machine, or train on a GPU"
            )
        dtype = own.get("dtype", "fp32")
        self.dtype: torch.dtype = DTYPES[dtype]
        is_half = dtype == "bf16" or next(model.parameters()).dtype == torch.bfloat16
        if tolerance is not None:
            self.tolerance = tolerance
        elif is_half:
            self.tolerance = HALF_TOLERANCE
        else:
            self.tolerance = TOLERANCE
        self.version = -1  # no weights sent yet
        self.label = ""
        self.is_asleep = False
        self._within: Within = lambda compute: compute()
        self._process: OwnServer | None = None
        self._group: NcclGroup | None = None
        self._memory: tempfile.TemporaryDirectory[str] | None = None

    def settle(self, folder: Path | None, process_group: ProcessGroup) -> Engine:
        """See ``Engine.settle``."""
        if self.starts and process_group.is_main:
            find_interpreter()  # fails before training starts
        return super().settle(folder, process_group)

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self._within = within

    def sync(self, version: int) -> None:
        """See ``Engine.sync``.

        Raises:
            UsageError: server unavailable, wrong model or tokenizer, or weight transfer unsupported.
        """
        if version == self.version and not self.is_asleep:
            return
        label = f"{secrets.token_hex(4)}:{version}"
        if self.process_group.is_main:
            self._prepare()
        self.process_group.broadcast(None, "a server that waits for weights")
        self._send_weights(label)
        result: tuple[str, list[ServerScores], str | None] = (label, [], None)
        if self.process_group.is_main:
            result = (label, self.server.session(self._scores), self.server.base)
        self.label, scores, base = self.process_group.broadcast(result, "the server's scores")
        if self._server is None:
            self._reach(base)
        difference = largest_difference(self.model, self._within, scores)
        if difference > self.tolerance:
            raise EngineMismatch(
                f"vLLM: after {version} updates the weights were handed over, and the server still computes "
                f"something else: log-probabilities of a fixed batch differ by {difference:.2g} nats (at most "
                f"{self.tolerance:g} is allowed). The last step is saved; if the server computes in another precision, "
                f"give its {self.where}.dtype, or raise {self.where}.tolerance"
            )
        self.version = version
        self.is_asleep = False

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``. Checks that weights are unchanged before and after the batch."""
        if self.version < 0 or self.is_asleep:
            self.sync(max(self.version, 0))
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def rest(self) -> None:
        """See ``Engine.rest``. On a shared GPU, the server releases its memory."""
        if self.sleeps and not self.is_asleep and self.version >= 0:
            self.process_group.agree(False, "answers before the server sleeps")  # wait for pending requests
            if self.process_group.is_main:
                control(self.server, "POST", "/sleep?level=2")
            self.is_asleep = True

    def close(self) -> None:
        """Stop the server if this run started it."""
        if self._process is not None:
            self._process.stop()
        if self._memory is not None:
            self._memory.cleanup()
        if self.starts:
            self._reach(None)
        self._process = None
        self._group = None
        self._memory = None
        self.version = -1

    def make_group(self) -> NcclGroup:
        """Connect to all server workers."""
        return NcclGroup(self.server, self.server.timeout_seconds)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over weights to send. CPU servers get an untied head, because they would not repack a tied one."""
        weights = checkpoint_weights(self.model)
        if self._unties:
            weights = untied(self.model, weights)
        return weights

    @property
    def _unties(self) -> bool:
        return self.starts and self.device.type == "cpu"

    def _shares_gpu(self) -> bool:
        gpus = self.own.get("gpus", ())
        if not gpus:
            return True
        index = self.device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if visible[0]:
            number = visible[index]
        else:
            number = str(index)
        return number in map(str, gpus)

    @property
    def _folder(self) -> Path:
        assert self._memory is not None
        return Path(self._memory.name)

    def _prepare(self) -> None:
        """Prepare the server for weights. If it reads files at startup, it is started later."""
        if self._memory is None:
            place = None
            if MEMORY.is_dir():
                place = MEMORY
            self._memory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True)
            save_without_weights(self.model, self.tokenizer, self._folder, untie=self._unties)
        if self._server is None:
            if not self.by_files:
                self._start()
            return
        self.server.session(self._connect)
        if self.is_asleep:
            torch.cuda.empty_cache()
            control(self.server, "POST", "/wake_up?tags=weights")
            return
        if self.version >= 0:
            self.server.session(self._scores)  # fills a cache, which must be invalidated
        control(self.server, "POST", "/pause?mode=abort")

    def _start(self) -> None:
        """Start a server and wait for it.

        Disables chunked prefill on CPU, where vLLM 0.32 resets seeds or fails.
        """
        on_cpu = self.device.type == "cpu" and not self.own.get("gpus")
        switches = []
        if not self.by_files:
            switches.append("load-format=dummy")
        if self.sleeps:
            switches.append("enable-sleep-mode")
        if on_cpu:
            switches.append("no-enable-chunked-prefill")
        if self.sampling_mask:
            switches += ["return-sampling-mask", "enable-scale-out"]
        options = self.own | {"port": free_port(), "interpreter": find_interpreter(), "name": SERVED}
        options["transfer"] = "nccl"
        if self.by_files:
            options["transfer"] = "files"
        options["switches"] = tuple(switches)
        if self.sleeps and options.get("gpu_memory_utilization") is None:
            options["gpu_memory_utilization"] = SHARED_GPU
        url = f"http://127.0.0.1:{options['port']}"
        log = (self.folder or self._folder) / "vllm.log"
        command = server_command(str(self._folder), **options)
        self._process = OwnServer(command, url, log)
        self._process.wait()
        self._reach(url)
        self.server.session(self._connect)

    def _send_weights(self, label: str) -> None:
        """Replace the server's weights and resume it. Every process contributes its shard."""
        if not self.process_group.is_main:
            for _ in self.weights():  # gathered collectively, used only by the main process
                pass
            return
        try:
            if self.by_files:
                save_weights(self.weights(), self._folder, self.dtype)
                if self._server is None:
                    self._start()
                else:
                    body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
                    control(self.server, "POST", "/collective_rpc", body)
            else:
                if self._group is None:
                    self._group = self.make_group()
                shards = checkpoint_weights(self.model, gathers=False)
                announced = [(name, tensor.shape) for name, tensor in shards]
                self._group.send(self.weights(), self.dtype, announced)
            control(self.server, "POST", "/update_weight_version", {"new_version": label})
            if self.is_asleep:
                control(self.server, "POST", "/wake_up?tags=kv_cache")
            control(self.server, "POST", "/resume")
            control(self.server, "POST", "/reset_prefix_cache")
        except RunFailure as failure:
            self._group = None
            raise RunFailure(f"the weights could not be handed over: {failure}") from None
        finally:
            for file in self._folder.glob("model-*.safetensors"):
                file.unlink()

    async def _scores(self) -> list[ServerScores]:
        """Request log-probabilities for a fixed batch."""
        served = await self._connect()
        size = self.vocab_size or 1

        async def score(body: dict[str, Any]) -> ServerScores:
            read = partial(read_scores, prompt=body["prompt"], vocab_size=size)
            return await self._ask(body, read, "the probe")

        bodies = probe_bodies(served, size, served.context or UNLIMITED_CONTEXT, is_masked=self.sampling_mask)
        return await all_of(score, bodies)

    def _check_label(self) -> None:
        """Refuse a server with unexpected weights.

        Raises:
            RunFailure: restarted, or updated by someone else.
        """
        label = control(self.server, "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
        if label != self.label:
            raise RunFailure(
                f"{self.server.base}: the server has weights called {label[:60]!r}, and was given {self.label!r}: it "
                "was started anew, or another run hands it weights too. Continue when the run has the server for "
                "itself"
            )


# Fixed batch scored by both sides.

# The longest prompt spans more than one key/value block on any device, so that prompt caching is tested.
PROMPT_TOKENS = (300, 40, 7, 3)
NEW_TOKENS = 8
TOP = 20  # as many as a server gives by default
# Nats. In fp32, programs differ by about 1e-5 on unlikely tokens. In bf16, logit rounding (relative 2^-8) permits
# detecting wrong weights, but rarely a single missed update.
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class ServerScores:
    """Server scores for one prompt: prompt and answer ids, and log-probabilities by position and token id."""

    ids: tuple[int, ...]
    places: dict[int, dict[int, float]]


def probe_bodies(
    served: ServedModel, vocab_size: int, context: int, *, is_masked: bool = False
) -> list[dict[str, Any]]:
    """Build two requests per arbitrary prompt: a greedy answer (through the cache) and its scores (bypassing it).

    Servers with masks (``is_masked``) refuse greedy requests, so they draw from the full distribution.
    """
    lengths = [max(1, min(n, context - NEW_TOKENS)) for n in PROMPT_TOKENS]
    numbers = generator(0, "vllm probe").integers(0, vocab_size, (len(lengths), max(lengths)))
    greedy = Sampling(min(NEW_TOKENS, context - 1), temperature=0.0)
    if is_masked:
        greedy = replace(greedy, temperature=1.0, top_k=vocab_size)
    bodies = []
    for i, length in enumerate(lengths):
        prompt = tuple(numbers[i, :length].tolist())
        body = VllmRequest(served.name, prompt, greedy.max_tokens, greedy, seed=0).body()
        bodies.append(body | {"logprobs": TOP})
        bodies.append(body | {"prompt_logprobs": 0, "max_tokens": 1})
    return bodies


def read_scores(answer: dict[str, Any], prompt: Sequence[int], vocab_size: int) -> ServerScores:
    """Parse scores from a ``probe_bodies`` response.

    Raises:
        Unreadable: too many ids, missing log-probabilities, or unknown tokens.
        LookupError, TypeError, ValueError, AttributeError, OverflowError: invalid format.
    """
    choice = answer["choices"][0]
    ids = (*prompt, *map(int, choice["token_ids"]))
    if len(ids) > len(prompt) + NEW_TOKENS:
        raise Unreadable(f"{len(ids) - len(prompt)} tokens, where {NEW_TOKENS} at most were asked for")
    places: dict[int, dict[int, float]] = {}
    for i, each in enumerate(choice.get("prompt_logprobs") or ()):
        if each:
            places[i] = {int(token): float(entry["logprob"]) for token, entry in each.items()}
    for i, each in enumerate(choice["logprobs"]["top_logprobs"] or (), start=len(prompt)):
        places[i] = {int(token.removeprefix("token_id:")): float(value) for token, value in each.items()}
    if not any(places.values()) or not all(0 < place < len(ids) for place in places):
        raise Unreadable("no log-probabilities of a probe")
    named = [token for tokens in places.values() for token in tokens]
    check_vocabulary([*ids, *named], vocab_size)
    return ServerScores(ids, places)


def largest_difference(model: PreTrainedModel, within: Within, scored: Sequence[ServerScores]) -> float:
    """Compute the largest log-probability difference between server and model at temperature 1, in nats.

    ``within`` gathers a sharded model for its forward passes.
    """
    worst = 0.0
    with sampling_mode(model):
        device = next(model.parameters()).device
        for scores in scored:
            ids = torch.tensor([scores.ids], device=device)
            logits = within(partial(model, input_ids=ids, use_cache=False)).logits[0].float()
            own = logits.log_softmax(-1).cpu()
            rows = []
            columns = []
            values = []
            for i, tokens in scores.places.items():
                for token, value in tokens.items():
                    rows.append(i - 1)
                    columns.append(token)
                    values.append(value)
            difference = (own[rows, columns] - torch.tensor(values)).abs()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf")).max()))
    return worst


# Weights in the server's format, and transfer routes.

FILE_BYTES = 1 << 30
MAX_WORKERS = 1 << 16
WORKERS = "/get_world_size"


def checkpoint_weights(model: PreTrainedModel, *, gathers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, tensor) pairs with checkpoint names, in fixed order.

    Tied heads appear once. Adapters are merged into copies one at a time. All processes gather sharded models (FSDP2)
    together; without ``gathers``, shards are returned with the full shape.

    Raises:
        UsageError: 4-bit or 8-bit weights, which cannot be merged exactly.
    """
    bits = quantized_bits(model)
    if bits is not None:
        raise UsageError(f"weights of {bits} bits cannot be handed to another engine; sample with the native one")
    if has_adapter(model):
        named = merged_weights(model)
    else:
        named = model.named_parameters()
    with torch.no_grad():
        for name, tensor in named:
            weight = tensor.detach()
            if gathers:
                weight = whole(weight)
            yield name, weight


def save_without_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, untie: bool = False
) -> None:
    """Write configuration and tokenizer, so that a server can build the model. ``untie``: with a separate head."""
    config = copy.deepcopy(causal_lm(model).config)
    if untie:
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def untied(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Repeat a tied head under a separate name."""
    first: dict[int, str] = {}
    again: dict[str, list[str]] = {}
    for name, weight in causal_lm(model).named_parameters(remove_duplicate=False):
        own = first.setdefault(id(weight), name)
        if own != name:
            again.setdefault(own, []).append(name)
    for name, tensor in weights:
        yield name, tensor
        for other in again.get(name, ()):
            yield other, tensor


def save_weights(
    weights: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, bytes_per_file: int = FILE_BYTES
) -> None:
    """Write weights as safetensors files."""
    pending: dict[str, Tensor] = {}
    num_files = 1
    for name, tensor in weights:
        num_bytes = sum(one.nbytes for one in pending.values())
        if num_bytes >= bytes_per_file:
            save_file(pending, folder / f"model-{num_files:05d}.safetensors", metadata={"format": "pt"})
            num_files += 1
            pending = {}
        pending[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    save_file(pending, folder / f"model-{num_files:05d}.safetensors", metadata={"format": "pt"})


def control(
    server: HttpServer,
    method: Literal["GET", "POST"],
    path: str,
    body: object = None,
    *,
    read: Callable[[Any], Any] = lambda answer: answer,
) -> Any:
    """Call a server route once, without retries since it has side effects.

    Raises:
        RunFailure: no response, or refused; names server and route.
    """
    try:
        return server.call(method, path, body, read=read, retries=0)
    except ServerError as error:
        missing = ""
        if isinstance(error, RequestRefused) and error.status == 404:
            missing = "; it takes no weights: start it with the line that `posttrain serve-command --follows` prints"
        raise RunFailure(f"{server.base}: {path.partition('?')[0]}: {error}{missing}") from None


class NcclGroup:
    """NCCL communicator between this process (rank 0) and all server workers.

    ``timeout_seconds``: timeout per step, after which a missing worker aborts the transfer.

    Raises:
        RunFailure: unsupported routes, or workers do not join.
    """

    def __init__(self, server: HttpServer, timeout_seconds: float) -> None:
        self.server = server
        self.timeout_seconds = timeout_seconds
        num_workers = control(server, "GET", WORKERS, read=read_num_workers)
        size = 1 + num_workers
        identifier = self.make_identifier()
        encoded = base64.b64encode(identifier).decode()
        about = {"nccl_unique_id_b64": encoded, "world_size": size, "rank_offset": 1}
        self._together(
            partial(control, server, "POST", "/init_weight_transfer_engine", {"init_info": about}),
            partial(self.join, size, identifier),
        )

    def make_identifier(self) -> bytes:
        """Create a name for this group; workers receive it with the request."""
        self.device = torch.cuda.current_device()
        return bytes(nccl.unique_id())

    def join(self, size: int, identifier: bytes) -> None:
        """Join the group, then verify workers with a sum."""
        torch.cuda.set_device(self.device)  # in a separate thread
        self.communicator = nccl.init_rank(size, identifier, 0)
        nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[self.communicator])
        torch.cuda.synchronize(self.device)

    def broadcast(self, tensors: Iterator[Tensor]) -> None:
        """Broadcast tensors and wait until all workers have received them."""
        torch.cuda.set_device(self.device)
        for tensor in tensors:
            nccl.broadcast([tensor], 0, comms=[self.communicator])
        torch.cuda.current_stream(self.device).synchronize()

    def send(
        self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype, announced: Sequence[tuple[str, torch.Size]]
    ) -> None:
        """Replace a paused server's weights. ``announced``: names and shapes in order."""
        about = {
            "names": [name for name, _ in announced],
            "dtype_names": [str(dtype).removeprefix("torch.")] * len(announced),
            "shapes": [list(shape) for _, shape in announced],
        }

        def in_order() -> Iterator[Tensor]:
            for (name, weight), expected in zip(weights, announced, strict=True):
                assert (name, weight.shape) == expected, "weights come in the order in which they were announced"
                yield weight.to(dtype).contiguous()

        control(self.server, "POST", "/start_weight_update")
        self._together(
            partial(control, self.server, "POST", "/update_weights", {"update_info": about}),
            partial(self.broadcast, in_order()),
        )
        control(self.server, "POST", "/finish_weight_update", {})

    def _together(self, *work: Callable[[], object]) -> None:
        """Do the work side by side, in threads that keep no process alive: a missing worker lets them wait for ever."""
        futures = [Future[object]() for _ in work]

        def fill(future: Future[object], one: Callable[[], object]) -> None:
            try:
                future.set_result(one())
            except (RunFailure, RuntimeError, OSError, ValueError) as error:
                future.set_exception(error)

        for future, one in zip(futures, work, strict=True):
            threading.Thread(target=fill, args=(future, one), daemon=True).start()
        done, pending = wait(futures, self.timeout_seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if isinstance(error, RunFailure):
                raise error
            if error is not None:
                raise RunFailure(f"a worker was lost: {first_line(error)}")
        if pending:
            raise RunFailure(f"a worker did not take part within {self.timeout_seconds:g} seconds")


def read_num_workers(answer: dict[str, Any]) -> int:
    """Parse a ``WORKERS`` response."""
    count = answer["world_size"]
    if type(count) is not int or not 0 < count <= MAX_WORKERS:
        raise Unreadable(f"a world_size of {count!r:.80}")
    return count
