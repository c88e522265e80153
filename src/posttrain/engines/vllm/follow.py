"""One vLLM server whose weights follow a model in training, a user's or the run's own.

Three things keep it honest. The server calls its weights what the last transfer called them, and is asked for that
name before and after every batch: one that was started anew, or given weights by somebody else, does not pass. After
every transfer both sides score a fixed batch, which catches what no name can: a tensor that did not arrive, a head that
was packed before, a cache of prompts that was kept. And a server that a run started itself is started again when it
dies, given the weights again, and asked again with the same seeds (``fleet.py``).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.vllm.command import ServerOptions, server_command
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.http import HttpServer
from posttrain.engines.vllm.placed import PlacedServer, loss_of
from posttrain.engines.vllm.probe import default_tolerance
from posttrain.engines.vllm.protocol import CompletionRequest, ServedModel
from posttrain.engines.vllm.server import OwnServer, free_port, interpreter
from posttrain.engines.vllm.transfer import Collectives, WeightSender, ask
from posttrain.engines.weights import save_without_weights
from posttrain.errors import EngineMismatch, RunFailure
from posttrain.types import Completion
from posttrain.world import World


@dataclass(frozen=True)
class Orders:
    """Of whom a server is ordered, under which name, and where it listens (0: at a port that is free)."""

    world: World
    name: str
    port: int


class Member(VllmEngine):
    """One of the servers whose weights follow, a user's or (``url`` None) one that the run starts; see ``vllm``.

    ``own``: how it is started, and in which ``dtype`` weights are handed over to any. ``orders``: of whom it is ordered
    where this process does not start it; ``ordered``: which order that is. ``answered`` is what it has answered of a
    batch, and keeps until all of it is there. ``is_current``: it has been given the weights of ``version``, and nothing
    is known against it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        url: str | None,
        own: ServerOptions,
        collectives: Literal["auto", "gloo", "nccl"] = "auto",
        **asking: Any,
    ) -> None:
        self.own = own if url is None else None
        self.process: OwnServer | PlacedServer | None = None
        if url is None:
            url, asking["wanted"] = f"http://127.0.0.1:{own.port}", (own.name,)
        super().__init__(url, model=model, tokenizer=tokenizer, **asking)
        self.dtype: torch.dtype = getattr(torch, own.dtype)
        on_gpu = next(model.parameters()).device.type == "cuda"
        self.collectives: Collectives = ("nccl" if on_gpu else "gloo") if collectives == "auto" else collectives
        self.version = -1  # the server has been given nothing yet
        self._token = secrets.token_hex(4)
        self._sender: WeightSender | None = None
        self.answered: dict[CompletionRequest, Completion] = {}
        self.is_current = False
        self.orders: Orders | None = None
        self.ordered = ""

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``; the server has been given weights, and has these before and behind the batch."""
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def give_weights(self, version: int) -> None:
        """Hand them over; a server that was just started is waited for."""
        self.is_hung_up = False
        if self.process is not None and not self.is_current:
            self.process.wait()
            self.url = self.process.url
            self.ordered = getattr(self.process, "place", "")  # it may have been ordered once more meanwhile
        self.is_current = False
        self._transfer(version)
        self.version, self.is_current = version, True

    def launch(self, anew: bool = False, moves: bool = False) -> None:
        """Start a server of the run's own in the place of the one before; it is not waited for.

        ``anew``: that one has failed. ``moves``: the new one is elsewhere, where nobody asks one without weights.
        """
        self._end_server()
        self.is_current = False
        if self.orders is not None:
            model, options = self._to_be_served()
            options = replace(options, port=self.orders.port)
            process = PlacedServer(self.orders.world, self.orders.name, str(model), options, self.where)
            process.start(anew)
            self.process, self.ordered = process, process.place
            return
        assert self.own is not None, "a server of the run's own"
        if moves:
            self.own = replace(self.own, port=free_port(0))
            self.url = f"http://127.0.0.1:{self.own.port}"
        model, options = self._to_be_served()
        command = server_command(str(model), replace(options, interpreter=interpreter()))
        self.process = OwnServer(command, self.url, model.parent / "vllm.log")
        self.process.start()

    def close(self) -> None:
        """End the server, where it is the run's own."""
        self._end_server()
        self.version = -1

    def _end_server(self) -> None:
        self._sender = None
        if self.process is not None:
            self.process.stop()
            self.process = None

    def _to_be_served(self) -> tuple[Path, ServerOptions]:
        """A folder with what a server needs to know of the model, and how it is started."""
        assert self.own is not None, "a server of the run's own"
        folder = Path(tempfile.mkdtemp(prefix="posttrain-vllm-")) if self.folder is None else self.folder
        save_without_weights(self.model, self.tokenizer, folder / "served")
        on_cpu = not self.own.gpus and next(self.model.parameters()).device.type == "cpu"
        return folder / "served", replace(self.own, whole_prompts=on_cpu)

    def tail(self) -> str:
        """The end of what its server said."""
        return "" if self.process is None else self.process.tail()

    @property
    def place(self) -> tuple[Any, ...]:
        """What the other processes have to know to ask it."""
        return self.url, self._token, self.version, self._served, self.ordered

    @place.setter
    def place(self, told: tuple[Any, ...]) -> None:
        self.url, self._token, self.version, served, self.ordered = told
        if self.own is not None:  # whether a user's server is to be had from here, too, each process finds out
            self._served = served

    def loss(self) -> str | None:
        """Why a server that was placed somewhere is gone, as who placed it says."""
        return None if self.orders is None else loss_of(self.orders.world, self.ordered)

    def _complete(self, server: HttpServer, numbered: tuple[int, CompletionRequest]) -> Completion:
        request = numbered[1]
        if request not in self.answered:
            self.answered[request] = super()._complete(server, numbered)
        return self.answered[request]

    def weights(self) -> Any:
        """What is handed over (see ``checkpoint_weights``)."""
        return self.reader.weights()

    def _probe(self, server: HttpServer, served: ServedModel) -> None:
        """Not before every batch: every sync ends with it."""

    @property
    def _label(self) -> str:
        return f"{self._token}:{self.version}"

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
        """Refuse a server that has other weights than it was given last; no answer of it is kept.

        Raises:
            RunFailure: it was started anew meanwhile, or somebody else gave it weights.
        """
        try:
            with self._open() as server:
                label = ask(server, "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
            if label != self._label:
                raise RunFailure(
                    f"{self.url}: the server has weights called {label[:60]!r}, and was given {self._label!r}: it was "
                    "started anew, or another run hands it weights too. Continue when the run has the server for itself"
                )
        except RunFailure:
            self.answered.clear()
            raise
