"""The engine behind a vLLM server whose weights follow a model in training.

Three things keep it honest. The server calls its weights what the last transfer called them, and is asked for that
name before and after every batch: one that was started anew, or given weights by somebody else, does not pass. After
every transfer both sides score a fixed batch, which catches what no name can: a tensor that did not arrive, a head that
was packed before, a cache of prompts that was kept. And a server that a run started itself is started again when it
dies, given the weights again, and asked again with the same seeds.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from posttrain.engines.base import Engine, Sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.vllm.command import ServerOptions, server_command
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.http import HttpServer
from posttrain.engines.vllm.probe import default_tolerance
from posttrain.engines.vllm.protocol import ServedModel
from posttrain.engines.vllm.server import OwnServer, free_port, interpreter
from posttrain.engines.vllm.transfer import Collectives, WeightSender, ask
from posttrain.engines.weights import save_without_weights
from posttrain.errors import EngineMismatch, RunFailure
from posttrain.world import Within, World

if TYPE_CHECKING:
    from posttrain.engines.vllm.placed import PlacedServer

Result = TypeVar("Result")
SERVED = "policy"


@dataclass(frozen=True)
class Own:
    """How a server of the run's own is started (see ``vllm``)."""

    port: int = 0
    gpus: tuple[int, ...] = ()
    gpu_memory: float | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int | None = None
    eager: bool = False
    restarts: int = 2


class FollowingEngine(VllmEngine):
    """See ``vllm``. ``url``: of a server that runs; None: the run starts one, when its weights are first needed.

    Of several processes that train, rank 0 hands over the weights and all of them ask it; see ``settle``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        url: str | None,
        own: Own,
        collectives: Literal["auto", "gloo", "nccl"] = "auto",
        *,
        wanted: Sequence[str] = (),
        **asking: Any,
    ) -> None:
        self.own = own if url is None else None
        port = 0 if url is not None else own.port or free_port(0)
        names = (SERVED,) if url is None else wanted
        super().__init__(url or f"http://127.0.0.1:{port}", model=model, tokenizer=tokenizer, wanted=names, **asking)
        self.dtype: torch.dtype = getattr(torch, own.dtype)
        on_gpu = next(model.parameters()).device.type == "cuda"
        self.collectives: Collectives = ("nccl" if on_gpu else "gloo") if collectives == "auto" else collectives
        self.process: OwnServer | PlacedServer | None = None
        self.version = -1  # the server has been given nothing yet
        self.restarts = 0
        self._port, self._token = port, secrets.token_hex(4)
        self._sender: WeightSender | None = None

    def settle(self, folder: Path | None, world: World, placed_as: str | None = None) -> Engine:
        """See ``Engine.settle``; one server of several processes' own, or placed elsewhere, is a fleet of one."""
        super().settle(folder, world)
        if self.own is None:
            return self
        if placed_as is None and world.size == 1:
            interpreter()  # missed before anything is trained
            free_port(self._port, where=self.where)
            return self
        from posttrain.engines.vllm.fleet import following_fleet

        asking = {name: getattr(self, name) for name in ("timeout_seconds", "concurrency", "retries", "where")}
        asking |= {"logprobs": self.logprobs, "tolerance": self.tolerance}
        fleet = following_fleet(self.model, self.tokenizer, [None], self.own, self.collectives, **asking)
        return fleet.settle(folder, world, placed_as)

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self.reader.take_parts(within, self.world)

    def sync(self, version: int) -> None:
        """See ``Engine.sync``. The first one starts the server, where the run has one of its own.

        Raises:
            UsageError: no server, or one of another model or tokenizer, or that takes no weights.
        """
        if version == self.version:
            return
        self.reader.by_main(self.world, lambda: self._alive(lambda: self._transfer(version)))
        self.url, self._token = self.world.tell((self.url, self._token), "the server's weights")
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``."""
        if self.version < 0:
            self.sync(0)
        return self._alive(lambda: self.ask(prompts, keys, sampling))

    def ask(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """As ``generate``, of a server that has been given weights; nothing is done about one that fails."""
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def close(self) -> None:
        """End the server, where it is the run's own."""
        self._end_server()
        self.version = -1

    def _end_server(self) -> None:
        self._sender = None
        if self.process is not None:
            self.process.stop()
            self.process = None

    def weights(self) -> Any:
        """What is handed over (see ``checkpoint_weights``)."""
        return self.reader.weights()

    def _probe(self, server: HttpServer, served: ServedModel) -> None:
        """Not before every batch: every sync ends with it."""

    @property
    def _label(self) -> str:
        return f"{self._token}:{self.version}"

    def _alive(self, work: Callable[[], Result]) -> Result:
        """``work`` with a server that runs; where it is the run's own and dies, again with another one."""
        while True:
            try:
                if self.own is not None and self.process is None:
                    self._start()
                    if self.version >= 0:
                        self._transfer(self.version)
                return work()
            except EngineMismatch:
                raise
            except RunFailure as failure:
                reason = f"the vLLM server failed: {failure}"
                if self.own is None or self.process is None or self.version < 0:
                    raise  # not ours, or one that never worked
                if self.restarts == self.own.restarts:
                    raise RunFailure(
                        f"{reason}. It was started again {self.restarts} times already ({self.where}.restarts). "
                        f"{self.process.tail()}"
                    ) from None
                self.restarts += 1
                self._notices += (f"{reason}; it is started again and given the weights of now, with the same seeds",)
                self._end_server()

    def _start(self) -> None:
        self._launch()
        assert self.process is not None
        try:
            self.process.wait()
        except BaseException:
            self._end_server()
            raise

    def _launch(self) -> None:
        """Start a server and do not wait until it is ready."""
        model, options = self._to_be_served()
        command = server_command(str(model), replace(options, interpreter=interpreter()))
        process = OwnServer(command, self.url, model.parent / "vllm.log")
        process.start()
        self.process = process

    def _to_be_served(self) -> tuple[Path, ServerOptions]:
        """A folder with what a server needs to know of the model, and how it is started."""
        assert self.own is not None
        folder = Path(tempfile.mkdtemp(prefix="posttrain-vllm-")) if self.folder is None else self.folder
        model = folder / "served"
        save_without_weights(self.model, self.tokenizer, model)
        return model, ServerOptions(
            port=self._port,
            dtype=self.own.dtype,
            max_model_len=self.own.max_model_len,
            gpu_memory=self.own.gpu_memory,
            gpus=self.own.gpus,
            eager=self.own.eager,
            follows=True,
            empty=True,
            name=SERVED,
            whole_prompts=not self.own.gpus and next(self.model.parameters()).device.type == "cpu",
        )

    def _transfer(self, version: int) -> None:
        with self._open() as server:
            served = self._connect(server)
            try:
                if self._sender is None:
                    self._sender = WeightSender(server, server.host, self.collectives, self.timeout_seconds)
                else:
                    self.score(server, served)  # what a cache keeps of the weights before will show below
                self._send(server, f"{self._token}:{version}")
            except RunFailure as failure:
                self._sender = None
                raise RunFailure(f"{self.url}: the weights could not be handed over: {failure}") from None
            difference = self.score(server, served)
        dtype = str(self.dtype).removeprefix("torch.")
        tolerance = default_tolerance(self.model, dtype) if self.tolerance is None else self.tolerance
        if difference > tolerance:
            raise EngineMismatch(
                f"{self.url}: after {version} updates the weights were handed over, and the server still computes "
                f"something else: log-probabilities of a fixed batch differ by {difference:.2g} nats (at most "
                f"{tolerance:g} is allowed). The last step is saved; if the server computes in another precision, give "
                f"its {self.where}.dtype, or raise {self.where}.tolerance"
            )

    def _send(self, server: HttpServer, label: str) -> None:
        assert self._sender is not None
        self._sender.send(server, self.weights, self.dtype, label)

    def _check_label(self) -> None:
        """Refuse a server that has other weights than it was given last.

        Raises:
            RunFailure: it was started anew meanwhile, or somebody else gave it weights.
        """
        with self._open() as server:
            label = ask(server, "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
        if label != self._label:
            raise RunFailure(
                f"{self.url}: the server has weights called {label[:60]!r}, and was given {self._label!r}: it was "
                "started anew, or another run hands it weights too. Continue when the run has the server for itself"
            )
