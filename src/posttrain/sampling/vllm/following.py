"""A vLLM server whose weights follow a model in training: a user's, or the run's own.

The server names its weights by the label of the last transfer. It is asked for it before and after every batch, so that
a restarted server, or one with weights from elsewhere, is refused. After every transfer both sides score a fixed batch,
which finds a tensor that did not arrive, a head that was packed before, or a cache of prompts that was kept.
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

SERVED = "policy"  # the name of the model at the run's own server
SHARED_GPU = 0.3  # the share of the trainer's own GPU that a server takes while it is awake
MEMORY = Path("/dev/shm")
PREFIX = "posttrain-vllm-"


class TrainingVllmEngine(VllmEngine):
    """See ``vllm``. The first ``sync`` starts the server where the run has its own (``url`` is None).

    ``own``: options of ``server_command`` for it. Of several processes that train, the first controls the server, and
    all ask it.
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
        self.version = -1  # the server has no weights yet
        self.label = ""
        self.is_asleep = False
        self._within: Within = lambda compute: compute()
        self._process: OwnServer | None = None
        self._group: NcclGroup | None = None
        self._memory: tempfile.TemporaryDirectory[str] | None = None

    def settle(self, folder: Path | None, process_group: ProcessGroup) -> Engine:
        """See ``Engine.settle``."""
        if self.starts and process_group.is_main:
            find_interpreter()  # missed before anything is trained
        return super().settle(folder, process_group)

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self._within = within

    def sync(self, version: int) -> None:
        """See ``Engine.sync``.

        Raises:
            UsageError: no server at the address, or one of another model or tokenizer, or that takes no weights.
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
        """See ``Engine.generate``; the server has the same weights before and after the batch."""
        if self.version < 0 or self.is_asleep:
            self.sync(max(self.version, 0))
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def rest(self) -> None:
        """See ``Engine.rest``: on the trainer's own GPU the server gives its memory back."""
        if self.sleeps and not self.is_asleep and self.version >= 0:
            self.process_group.agree(False, "answers before the server sleeps")  # nobody asks any more
            if self.process_group.is_main:
                control(self.server, "POST", "/sleep?level=2")
            self.is_asleep = True

    def close(self) -> None:
        """End the server, where it is the run's own."""
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
        """Return a group with all workers of the server."""
        return NcclGroup(self.server, self.server.timeout_seconds)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for the server. One on a CPU has no tied head, which it would not pack anew."""
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
        """Bring the server to where it takes weights; one that reads files at its start is started later."""
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
            self.server.session(self._scores)  # fills a cache, which must not outlive the weights
        control(self.server, "POST", "/pause?mode=abort")

    def _start(self) -> None:
        """Start the run's own server, and wait for it.

        A CPU's server reads no prompt in chunks, where vLLM 0.32 resets a seed or fails.
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
        """Replace the weights of the server, which then answers again. Every process takes part with its shard."""
        if not self.process_group.is_main:
            for _ in self.weights():  # gathered together, and kept by none but the main process
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
        """Return the server's log-probabilities of a fixed batch."""
        served = await self._connect()
        size = self.vocab_size or 1

        async def score(body: dict[str, Any]) -> ServerScores:
            read = partial(read_scores, prompt=body["prompt"], vocab_size=size)
            return await self._ask(body, read, "the probe")

        bodies = probe_bodies(served, size, served.context or UNLIMITED_CONTEXT, is_masked=self.sampling_mask)
        return await all_of(score, bodies)

    def _check_label(self) -> None:
        """Refuse a server that has other weights than it got last.

        Raises:
            RunFailure: it was started anew meanwhile, or got weights from elsewhere.
        """
        label = control(self.server, "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
        if label != self.label:
            raise RunFailure(
                f"{self.server.base}: the server has weights called {label[:60]!r}, and was given {self.label!r}: it "
                "was started anew, or another run hands it weights too. Continue when the run has the server for "
                "itself"
            )


# A fixed batch that both sides score.

# The longest is more than a block of keys and values on any device, so that a cache of prompts takes part.
PROMPT_TOKENS = (300, 40, 7, 3)
NEW_TOKENS = 8
TOP = 20  # as many as a server gives by default
# Nats. In fp32 two programs differ by some 1e-5 in unlikely tokens; in bf16 by the rounding of logits, 2^-8 of their
# size, which tells other weights apart but hardly one update from none.
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class ServerScores:
    """A server's view of one prompt: ids of prompt and answer, and at places in them log-probabilities by token id."""

    ids: tuple[int, ...]
    places: dict[int, dict[int, float]]


def probe_bodies(
    served: ServedModel, vocab_size: int, context: int, *, is_masked: bool = False
) -> list[dict[str, Any]]:
    """Return two requests for each prompt of arbitrary ids: a greedy answer (from the cache), its scores (past it).

    A server with masks (``is_masked``) answers nothing greedily: there it is a draw of the whole distribution.
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
    """Return the scores of an answer to one of ``probe_bodies``.

    Raises:
        Unreadable: too many ids, or log-probabilities that are missing or of tokens that the model has not.
        LookupError, TypeError, ValueError, AttributeError, OverflowError: an answer of another form.
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
    """Return the largest difference between the server's log-probabilities and the model's, at temperature 1, in nats.

    ``within``: gathers a sharded model around its forward passes.
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


# The weights as a server takes them, and the routes by which it takes them.

FILE_BYTES = 1 << 30
MAX_WORKERS = 1 << 16
WORKERS = "/get_world_size"


def checkpoint_weights(model: PreTrainedModel, *, gathers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every weight under its name in a checkpoint, always in the same order.

    A tied head comes once. Adapters are merged into copies, one at a time. A sharded model (FSDP2) is gathered by all
    processes together; without ``gathers`` a weight is the shard, with the shape of the whole.

    Raises:
        UsageError: weights of 4 or 8 bits, which cannot be merged exactly.
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
    """Write configuration and tokenizer, from which a server builds the model. ``untie``: with a head of its own."""
    config = copy.deepcopy(causal_lm(model).config)
    if untie:
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def untied(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, with a tied head once more under its own name."""
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
    """Write the weights as safetensors files of a folder."""
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
    """Ask a route of the server once, since it changes something.

    Raises:
        RunFailure: no answer, or a refusal; the message names server and route.
    """
    try:
        return server.call(method, path, body, read=read, retries=0)
    except ServerError as error:
        missing = ""
        if isinstance(error, RequestRefused) and error.status == 404:
            missing = "; it takes no weights: start it with the line that `posttrain serve-command --follows` prints"
        raise RunFailure(f"{server.base}: {path.partition('?')[0]}: {error}{missing}") from None


class NcclGroup:
    """A NCCL communicator of this process (rank 0) with all workers of a server.

    ``timeout_seconds``: for every step, after which a missing worker ends the transfer.

    Raises:
        RunFailure: the server has no such routes, or its workers do not join.
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
        """Return the name of a new group; its workers take it from the request."""
        self.device = torch.cuda.current_device()
        return bytes(nccl.unique_id())

    def join(self, size: int, identifier: bytes) -> None:
        """Enter the group; workers add up one number first."""
        torch.cuda.set_device(self.device)  # in a thread of its own
        self.communicator = nccl.init_rank(size, identifier, 0)
        nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[self.communicator])
        torch.cuda.synchronize(self.device)

    def broadcast(self, tensors: Iterator[Tensor]) -> None:
        """Send the tensors; return once all workers have them."""
        torch.cuda.set_device(self.device)
        for tensor in tensors:
            nccl.broadcast([tensor], 0, comms=[self.communicator])
        torch.cuda.current_stream(self.device).synchronize()

    def send(
        self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype, announced: Sequence[tuple[str, torch.Size]]
    ) -> None:
        """Replace the weights of the server, which is paused; ``announced``: their names and shapes, in order."""
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
    """Read the answer of ``WORKERS``."""
    count = answer["world_size"]
    if type(count) is not int or not 0 < count <= MAX_WORKERS:
        raise Unreadable(f"a world_size of {count!r:.80}")
    return count
