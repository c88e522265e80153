"""A vLLM plug-in: weights come from a trainer over gloo, where vLLM's own ``nccl`` back end needs GPUs.

``pip install contrib/gloo_weight_transfer`` in vLLM's environment lets vLLM find it (``vllm.general_plugins``);
``--weight-transfer-config '{"backend": "gloo"}'`` uses it, which a run with ``rollout.engine.transfer: gloo`` says to
the server that it starts. It imports nothing of posttrain. ``engines/vllm/transfer.py`` is the other side. Nothing is
pickled: tensors by broadcasts, their names by HTTP.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "gloo"
TIMEOUT = timedelta(minutes=15)
# What the loader of a model raises for a weight that does not fit.
_LOADER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def register() -> None:
    """Make the back end known; vLLM calls this once in each of its processes."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        master_address: str
        master_port: int
        rank_offset: int
        world_size: int

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class GlooWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        receiver: Receiver | None = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.receiver = Receiver(init_info, init_info.rank_offset + worker, self.device)

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if self.receiver is None:
                raise RuntimeError("no trainer has introduced itself: /init_weight_transfer_engine comes first")
            self.receiver.receive(update_info, self.model.load_weights)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            pack_tied_heads(self.model)

        def shutdown(self) -> None:
            self.receiver = None

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Prepare again what shares its weight with another layer and so was given none of its own.

    On a CPU a head that is tied to the embedding multiplies with a packed copy of the weight, which reloading leaves
    as it was: log-probabilities would go on coming from the head before.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        process = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if weight is None or process is None or weight.numel() == 0:
            continue
        if owners.setdefault(id(weight), module) is not module:
            process(module)


class Receiver:
    """One worker's place in the group of trainer (rank 0) and workers."""

    def __init__(self, info: Any, rank: int, device: torch.device) -> None:
        self.device, self.rank, self.num_updates = device, rank, 0
        self.store = dist.TCPStore(info.master_address, info.master_port, info.world_size, False, TIMEOUT)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(info.master_address))]
        options._timeout = TIMEOUT
        self.group = dist.ProcessGroupGloo(self.store, rank, info.world_size, options)

    def receive(self, info: Any, load: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> None:
        """Load every announced weight. All of them are received even if one cannot be loaded, so that nobody hangs.

        Raises:
            ValueError: one could not be loaded.
        """
        failure = None
        self.num_updates += 1
        self.store.set(f"update {self.num_updates} of {self.rank}", "1")  # the trainer waits for it
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast([weight], options).wait()
            if failure is None:
                try:
                    load([(name, weight)])
                except _LOADER_ERRORS as error:
                    failure = ValueError(f"{name} {shape}: {type(error).__name__}: {error}")
        if failure is not None:
            raise failure


def address_towards(peer: str) -> str:
    """The address of this machine on the way to ``peer``; nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
