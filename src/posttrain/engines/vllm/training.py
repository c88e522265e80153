"""vLLM servers whose weights follow a model in training: a user's, or the run's own.

Two things keep it honest. A server calls its weights what the last transfer called them, and is asked for that name
before and after every batch: one that was started anew, or given weights by somebody else, does not pass. After every
transfer both sides score a fixed batch, which catches what no name can: a tensor that did not arrive, a head that was
packed before, a cache of prompts that was kept.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.engines.base import UNLIMITED_CONTEXT, Engine, Sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.http import HttpServer, all_of, run
from posttrain.engines.vllm.command import ServerOptions, Transfer, server_command
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.probe import (
    Scores,
    default_tolerance,
    largest_difference,
    probe_bodies,
    probe_prompts,
    read_scores,
)
from posttrain.engines.vllm.server import OwnServer, free_port, interpreter
from posttrain.engines.vllm.transfer import Gloo, GroupTransfer, Nccl, ask_all
from posttrain.engines.weights import checkpoint_weights, save_weights, save_without_weights, untied
from posttrain.errors import EngineMismatch, RunFailure, UsageError
from posttrain.option_types import LOOPBACK
from posttrain.world import Within, World

SERVED = "policy"  # the name of the model at the run's own servers
SHARED_GPU = 0.3  # the share of the trainer's own GPU that a server takes while it is awake
MEMORY, PREFIX = Path("/dev/shm"), "posttrain-vllm-"
LEFT_SECONDS = 3600.0  # a folder of a process that is gone is nobody's after this time


class Trained(VllmEngine):
    """See ``vllm``. The first ``sync`` starts the servers where the run has its own (``urls`` is empty).

    ``own``: how these are started, as in ``ServerOptions``. Of several processes that train, the first has the servers,
    and all ask them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        urls: Sequence[str],
        num_own: int,
        own: dict[str, Any],
        *,
        transfer: Literal["auto", "nccl", "files", "gloo"] = "auto",
        tolerance: float | None = None,
        **asking: Any,
    ) -> None:
        size = int(model.get_input_embeddings().weight.shape[0])
        super().__init__(urls, tokenizer=tokenizer, vocab_size=size, **asking)
        self.model, self.num_own, self.own = model, 0 if urls else num_own, ServerOptions(**own)
        self.device = next(model.parameters()).device
        self.sleeps = not urls and self.device.type == "cuda" and self._shares_gpu()
        self.transfer: Transfer = _chosen_transfer(self.device, self.sleeps) if transfer == "auto" else transfer
        far = [server.base for server in self.servers if server.host not in LOOPBACK]
        if self.transfer == "files" and far:
            raise UsageError(
                f"{self.where}.transfer: files are read by servers of this machine, and {far[0]} is another; use nccl"
            )
        self.dtype: torch.dtype = getattr(torch, self.own.dtype)
        self.tolerance = default_tolerance(model, self.own.dtype) if tolerance is None else tolerance
        self.version, self.label = -1, ""  # the servers have been given nothing yet
        self.is_asleep = False
        self._within: Within = lambda compute: compute()
        self._processes: list[OwnServer] = []
        self._group: GroupTransfer | None = None
        self._memory: tempfile.TemporaryDirectory[str] | None = None

    def settle(self, folder: Path | None, world: World) -> Engine:
        """See ``Engine.settle``."""
        if self.num_own and world.is_main:
            interpreter()  # missed before anything is trained
            if self.num_own > 1 and not self.own.gpus and self.device.type == "cuda":
                raise UsageError(f"{self.where}.servers: {self.num_own} need GPUs of their own; name {self.where}.gpus")
        return super().settle(folder, world)

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self._within = within

    def sync(self, version: int) -> None:
        """See ``Engine.sync``.

        Raises:
            UsageError: no server at an address, or one of another model or tokenizer, or that takes no weights.
        """
        if version == self.version and not self.is_asleep:
            return
        label = f"{secrets.token_hex(4)}:{version}"
        scores: list[Scores] = []
        if self.world.is_main:
            self._prepare()
        self.world.tell(None, "servers that wait for weights")
        self._give_weights(label)
        if self.world.is_main:
            scores = self._scores()
        told = self.world.tell((label, scores, [server.base for server in self.servers]), "the servers' scores")
        self.label, scores, urls = told
        if not self.world.is_main and not self.servers:
            self._reach(urls)
        difference = largest_difference(self.model, self._within, scores)
        if difference > self.tolerance:
            raise EngineMismatch(
                f"vLLM: after {version} updates the weights were handed over, and the server still computes "
                f"something else: log-probabilities of a fixed batch differ by {difference:.2g} nats (at most "
                f"{self.tolerance:g} is allowed). The last step is saved; if the server computes in another precision, "
                f"give its {self.where}.dtype, or raise {self.where}.tolerance"
            )
        self.version, self.is_asleep = version, False

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``; the servers have the same weights before and after the batch."""
        if self.version < 0 or self.is_asleep:
            self.sync(max(self.version, 0))
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def rest(self) -> None:
        """See ``Engine.rest``: on the trainer's own GPU the server gives its memory back."""
        if self.sleeps and not self.is_asleep and self.version >= 0:
            self.world.tell(None, "answers before the servers sleep")
            if self.world.is_main:
                ask_all(self.servers, "POST", "/sleep?level=2")
            self.is_asleep = True

    def close(self) -> None:
        """End the servers, where they are the run's own."""
        for process in self._processes:
            process.stop()
        if self._memory is not None:
            self._memory.cleanup()
        if self.num_own:
            self._reach([])
        self._processes, self._group, self._memory, self.version = [], None, None, -1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are handed over. A CPU's server has no tied head, which it would not pack anew."""
        weights = checkpoint_weights(self.model)
        return untied(self.model, weights) if self._unties else weights

    @property
    def _unties(self) -> bool:
        return bool(self.num_own) and self.device.type == "cpu" and self.transfer == "files"

    def _shares_gpu(self) -> bool:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = self.device.index or 0
        return not self.own.gpus or (visible[index] if visible[0] else str(index)) in map(str, self.own.gpus)

    @property
    def _place(self) -> Path:
        assert self._memory is not None
        return Path(self._memory.name)

    def _prepare(self) -> None:
        """Bring the servers to where they take weights; those that read files at their start are started later."""
        if self._memory is None:
            self._memory = _folder_in_memory()
            save_without_weights(self.model, self.tokenizer, self._place, untie=self._unties)
        if not self.servers:
            if self.transfer != "files":
                self._start()
            return
        run(self._with_servers(self._connect))
        if self.is_asleep:
            torch.cuda.empty_cache()
            ask_all(self.servers, "POST", "/wake_up?tags=weights")
            return
        if self.version >= 0:
            self._scores()  # what a cache keeps of the weights before will show below
        ask_all(self.servers, "POST", "/pause?mode=abort")

    def _start(self) -> None:
        """Start the run's own servers, side by side, and wait for them."""
        share = len(self.own.gpus) // self.num_own
        folder, urls = self.folder or self._place, []
        for i in range(self.num_own):
            options = replace(
                self.own,
                port=free_port(),
                gpus=self.own.gpus[i * share : (i + 1) * share],
                name=SERVED,
                transfer=self.transfer,
                is_empty=self.transfer != "files",
                sleeps=self.sleeps,
                interpreter=interpreter(),
                whole_prompts=self.device.type == "cpu" and not self.own.gpus,
                gpu_memory_utilization=self.own.gpu_memory_utilization or (SHARED_GPU if self.sleeps else None),
            )
            urls.append(f"http://127.0.0.1:{options.port}")
            log = folder / ("vllm.log" if self.num_own == 1 else f"vllm-{i + 1}.log")
            self._processes.append(OwnServer(server_command(str(self._place), options), urls[-1], log))
        for process in self._processes:
            process.wait()
        self._reach(urls)
        run(self._with_servers(self._connect))

    def _give_weights(self, label: str) -> None:
        """Replace the weights of all servers, which then answer again. Every process takes part with its part."""
        if not self.world.is_main:
            save_weights(self.weights(), None, self.dtype)
            return
        try:
            if self.transfer == "files":
                self._give_files(self._place)
            else:
                if self._group is None:
                    kind = Nccl if self.transfer == "nccl" else Gloo
                    self._group = GroupTransfer(self.servers, kind, self.timeout_seconds)
                announced = [(name, tensor.shape) for name, tensor in checkpoint_weights(self.model, gathers=False)]
                self._group.send(self.servers, self.weights(), self.dtype, announced)
            ask_all(self.servers, "POST", "/update_weight_version", {"new_version": label})
            if self.is_asleep:
                ask_all(self.servers, "POST", "/wake_up?tags=kv_cache")
            ask_all(self.servers, "POST", "/resume")
            ask_all(self.servers, "POST", "/reset_prefix_cache")
        except RunFailure as failure:
            self._group = None
            raise RunFailure(f"the weights could not be handed over: {failure}") from None

    def _give_files(self, folder: Path) -> None:
        try:
            save_weights(self.weights(), folder, self.dtype)
            if self.servers:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                ask_all(self.servers, "POST", "/collective_rpc", body)
            else:
                self._start()
        finally:
            for file in folder.glob("model-*.safetensors"):
                file.unlink()

    def _scores(self) -> list[Scores]:
        """Return the servers' log-probabilities of a fixed batch."""

        async def of_server(server: HttpServer) -> list[Scores]:
            served = self._served[server.base]
            context, size = served.context or UNLIMITED_CONTEXT, self.vocab_size or 1

            async def score(body: dict[str, Any]) -> Scores:
                read = partial(read_scores, prompt=body["prompt"], vocab_size=size)
                return await self._ask(server, body, read, "the probe")

            return await all_of(score, probe_bodies(served, probe_prompts(size, context), context))

        groups = run(self._with_servers(partial(all_of, of_server, self.servers)))
        return [scores for group in groups for scores in group]

    def _check_label(self) -> None:
        """Refuse servers that have other weights than they were given last.

        Raises:
            RunFailure: one was started anew meanwhile, or somebody else gave it weights.
        """
        labels = ask_all(self.servers, "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
        for server, label in zip(self.servers, labels, strict=True):
            if label != self.label:
                raise RunFailure(
                    f"{server.base}: the server has weights called {label[:60]!r}, and was given {self.label!r}: it "
                    "was started anew, or another run hands it weights too. Continue when the run has the server for "
                    "itself"
                )


def _folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process; those of processes that were killed are removed, since they take memory."""
    if not MEMORY.is_dir():
        return tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    for left in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            is_old = time.time() - left.stat().st_mtime > LEFT_SECONDS
            if is_old and not Path("/proc", left.name.removeprefix(PREFIX).partition("-")[0]).exists():
                shutil.rmtree(left)
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY, ignore_cleanup_errors=True)


def _chosen_transfer(device: torch.device, shares: bool) -> Transfer:
    return "nccl" if device.type == "cuda" and not shares else "files"
