"""The engine behind a vLLM server whose weights follow a model in training.

Three things keep it honest. The server calls its weights what the last transfer called them, and is asked for that
name before and after every batch: one that was started anew, or given weights by somebody else, does not pass. After
every transfer both sides score a fixed batch, which catches what no name can: a tensor that did not arrive, a head that
was packed before, a cache of prompts that was kept. And a server that a run started itself is started again when it
dies, given the weights again, and asked again with the same seeds (``fleet.py``).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Groups
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.http import HttpServer
from posttrain.engines.vllm.probe import default_tolerance
from posttrain.engines.vllm.protocol import ServedModel
from posttrain.engines.vllm.transfer import Collectives, WeightSender, ask
from posttrain.errors import EngineMismatch, RunFailure
from posttrain.world import Within


class FollowingEngine(VllmEngine):
    """See ``vllm``. The server runs at ``url``; ``dtype``: in which weights are handed over to it.

    Of several processes that train, rank 0 hands over the weights and all of them ask it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        url: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        collectives: Literal["auto", "gloo", "nccl"] = "auto",
        **asking: Any,
    ) -> None:
        super().__init__(url, model=model, tokenizer=tokenizer, **asking)
        self.dtype: torch.dtype = getattr(torch, dtype)
        on_gpu = next(model.parameters()).device.type == "cuda"
        self.collectives: Collectives = ("nccl" if on_gpu else "gloo") if collectives == "auto" else collectives
        self.version = -1  # the server has been given nothing yet
        self._token = secrets.token_hex(4)
        self._sender: WeightSender | None = None

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self.reader.take_parts(within, self.world)

    def sync(self, version: int) -> None:
        """See ``Engine.sync``.

        Raises:
            UsageError: no server, or one of another model or tokenizer, or that takes no weights.
        """
        if version == self.version:
            return
        self.reader.by_main(self.world, lambda: self._transfer(version))
        self.url, self._token = self.world.tell((self.url, self._token), "the server's weights")
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``."""
        if self.version < 0:
            self.sync(0)
        return self.ask(prompts, keys, sampling)

    def ask(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """As ``generate``, of a server that has been given weights."""
        self._check_label()
        groups = super().generate(prompts, keys, sampling)
        self._check_label()
        return [[replace(completion, version=self.version) for completion in group] for group in groups]

    def close(self) -> None:
        """See ``Engine.close``: weights are handed over again before the next batch."""
        self._sender, self.version = None, -1

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
