"""A fake vLLM server that takes weights: its routes and a real transfer, with a small model behind them."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from fake_vllm import FakeVllm, Reply, add_scores, completion_json, model_answer
from posttrain.sampling.vllm.following import NcclGroup

# The routes of one transfer of weights.
FILES = ["/pause", "/collective_rpc", "/update_weight_version", "/resume", "/reset_prefix_cache"]
GROUP = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", *FILES[2:]]


class FakeFollower(FakeVllm):
    """Serves a copy of ``model`` with noise on it until weights arrive.

    It keeps a cache of prompts: what it has computed for one is used again until it is reset. ``said`` are the
    routes that were asked for, in order; ``refuses`` one of them; ``drops`` are names left old. Broadcast weights come
    by ``channel`` (see ``QueueGroup``).
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        super().__init__(model_answer(self.model, "processed"), context=512, **options)
        self.label, self.said, self.refuses, self.drops = "default", [], "", ()
        self.keeps_cache = False
        self.cache: dict[str, Any] = {}
        self.channel: queue.Queue[torch.Tensor] = queue.Queue()
        self.paused = threading.Event()
        self.gets |= {
            "/weight_info": lambda body: {"weight_version": self.label},
            "/get_world_size": lambda body: {"world_size": 1},
        }
        steps = {
            "/init_weight_transfer_engine": lambda body: None,
            "/pause": lambda body: self.paused.set(),
            "/start_weight_update": lambda body: None,
            "/update_weights": lambda body: self.receive(body["update_info"]),
            "/finish_weight_update": lambda body: None,
            "/collective_rpc": self.reload,
            "/update_weight_version": lambda body: setattr(self, "label", body["new_version"]),
            "/resume": lambda body: self.paused.clear(),
            "/reset_prefix_cache": lambda body: self.cache.clear() if not self.keeps_cache else None,
        }
        self.posts |= {route: self.step(route, work) for route, work in steps.items()}

    def step(self, route: str, work: Any) -> Any:
        def answer(body: dict[str, Any]) -> dict[str, Any]:
            self.said.append(route)
            if route == self.refuses:
                raise Reply(400, {"error": {"message": "not today"}})
            try:
                work(body)
            except (ValueError, RuntimeError) as error:
                raise Reply(400, {"error": {"message": str(error)}}) from None
            return {}

        return answer

    def receive(self, info: dict[str, Any]) -> None:
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            weight = self.channel.get(timeout=60)
            assert (str(weight.dtype), list(weight.shape)) == (f"torch.{dtype}", shape)
            self.load([(name, weight)])

    def reload(self, body: dict[str, Any]) -> None:
        assert body["method"] == "reload_weights"
        for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
            self.load(list(load_file(file).items()))

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        assert self.paused.is_set(), "weights came while answers were being written"
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, weight in named:
                if name not in self.drops:
                    own[name].copy_(weight)

    def complete(self, body: dict[str, Any]) -> Any:
        assert not self.paused.is_set()
        self.refuse_without_set(body)
        self.bodies.append(body)
        self.trouble(len(self.bodies), body)
        if not body.get("logprobs") or "prompt_logprobs" in body:  # scoring a prompt passes the cache by, as vLLM does
            return super().complete(body)
        known = str(body["prompt"])
        with self._lock:
            if known not in self.cache:
                self.cache[known] = completion_json(body, self.answer(body))
                add_scores(self.cache[known]["choices"][0], body, self.model)
            return self.cache[known]


class QueueGroup(NcclGroup):
    """A group without GPUs: weights go to ``followers`` of the same process by their channels."""

    followers: ClassVar[list[FakeFollower]] = []

    def make_identifier(self) -> bytes:
        return b"a group"

    def join(self, size: int, identifier: bytes) -> None:
        assert size == 2

    def broadcast(self, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            self.followers[0].channel.put(tensor.clone())
