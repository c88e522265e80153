"""The weights of a model in training as a vLLM server takes them, and the routes by which it takes them."""

from __future__ import annotations

import base64
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.cuda import nccl
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import RunFailure, UsageError, first_line
from posttrain.models.forward.forward import causal_lm
from posttrain.models.load import quantized_bits
from posttrain.models.lora import has_adapter, merged_weights
from posttrain.process_group import whole
from posttrain.sampling.http import HttpServer, Refused, Unanswered, Unreadable

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
    named = merged_weights(model) if has_adapter(model) else model.named_parameters()
    with torch.no_grad():
        for name, tensor in named:
            yield name, whole(tensor.detach()) if gathers else tensor.detach()


def save_without_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, untie: bool = False
) -> None:
    """Write configuration and tokenizer, from which a server builds the model. ``untie``: with a head of its own."""
    config = copy.deepcopy(causal_lm(model).config)
    if untie:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def untied(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, with a tied head once more under its own name."""
    first: dict[int, str] = {}
    again: dict[str, list[str]] = {}
    for name, weight in causal_lm(model).named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            again.setdefault(first[id(weight)], []).append(name)
    for name, tensor in weights:
        yield from ((one, tensor) for one in (name, *again.get(name, ())))


def save_weights(
    weights: Iterator[tuple[str, Tensor]], folder: Path | None, dtype: torch.dtype, bytes_per_file: int = FILE_BYTES
) -> None:
    """Write the weights as safetensors files of a folder. None: only gather them, as processes do that write none."""
    pending: dict[str, Tensor] = {}
    num_files = 0
    for name, tensor in weights:
        if folder is None:
            continue
        if sum(one.nbytes for one in pending.values()) >= bytes_per_file:
            num_files += 1
            save_file(pending, folder / f"model-{num_files:05d}.safetensors", metadata={"format": "pt"})
            pending.clear()
        pending[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    if folder is not None and pending:
        save_file(pending, folder / f"model-{num_files + 1:05d}.safetensors", metadata={"format": "pt"})


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
    place = f"{server.base}: {path.partition('?')[0]}"
    try:
        return server.call(method, path, body, read=read, retries=0)
    except (Unanswered, Unreadable) as error:
        raise RunFailure(f"{place}: {error}") from None
    except Refused as error:
        missing = "; it takes no weights: start it with the line that `posttrain serve-command --follows` prints"
        raise RunFailure(f"{place}: HTTP {error.status}: {error}{missing if error.status == 404 else ''}") from None


class NcclGroup:
    """A NCCL communicator of this process (rank 0) with all workers of a server.

    ``timeout_seconds``: for every step, after which a missing worker ends the transfer.

    Raises:
        RunFailure: the server has no such routes, or its workers do not join.
    """

    def __init__(self, server: HttpServer, timeout_seconds: float) -> None:
        self.server, self.timeout_seconds = server, timeout_seconds
        size, identifier = 1 + control(server, "GET", WORKERS, read=read_num_workers), self.make_identifier()
        about = {"nccl_unique_id_b64": base64.b64encode(identifier).decode(), "world_size": size, "rank_offset": 1}
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
            if (error := future.exception()) is not None:
                raise error if isinstance(error, RunFailure) else RunFailure(f"a worker was lost: {first_line(error)}")
        if pending:
            raise RunFailure(f"a worker did not take part within {self.timeout_seconds:g} seconds")


def read_num_workers(answer: dict[str, Any]) -> int:
    """Read the answer of ``WORKERS``."""
    count = answer["world_size"]
    if type(count) is not int or not 0 < count <= MAX_WORKERS:
        raise Unreadable(f"a world_size of {count!r:.80}")
    return count
