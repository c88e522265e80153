"""A process beside the trainer's: what they say over its pipe, the side that starts and watches, the side that serves.

Messages are JSON with their length in front, weights raw bytes behind one. Nothing is pickled, and nothing is shared
with a trainer at work: no random state, no mode of a module. The process ends when the trainer's end of its pipe
closes, also in the middle of its work.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from posttrain import errors
from posttrain.consent import declare_code, declare_from_command_line, trusts_remote_code
from posttrain.errors import PosttrainError, RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.train.machine import choices_in_use, use_choices
from posttrain.types import with_float64

MAX_STARTS = 3  # for one piece of work, where a signal ends the process
_HEADER = struct.Struct(">Q")
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2]).main()"
)
Answer = Callable[[dict[str, Any], IO[bytes]], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Weights:
    """The trained weights of one version, on the CPU, and what all weights of that model add up to."""

    version: int
    tensors: Mapping[str, Tensor]
    sums: list[float]


def send(pipe: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write one message."""
    content = json.dumps(message).encode()
    pipe.write(_HEADER.pack(len(content)) + content)
    pipe.flush()


def send_weights(pipe: IO[bytes], weights: Weights) -> None:
    """Write a message that announces the weights, and their bytes."""
    shapes = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in weights.tensors.items()]
    send(pipe, {"weights": weights.version, "shapes": shapes, "sums": weights.sums})
    for tensor in weights.tensors.values():
        pipe.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message, under ``tensors`` the weights that it announces; None where the other side is gone."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    content = pipe.read(size)
    if len(content) < size:
        return None
    message: dict[str, Any] = json.loads(content)
    if "shapes" in message:
        message["tensors"] = {}
        for name, kind, shape in message["shapes"]:
            tensor = torch.empty(shape, dtype=getattr(torch, kind))
            if tensor.numel() and pipe.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:  # type: ignore[attr-defined]
                return None
            message["tensors"][name] = tensor
    return message


def weight_sums(model: Any) -> list[float]:
    """The sum of every parameter, trained or not: what tells one version of a model from another."""
    return [sum_of(p.detach()) for p in model.parameters()]


def sum_of(tensor: Tensor) -> float:
    """Of all its numbers, in float64."""
    return float(with_float64(tensor).sum(dtype=torch.float64))


class BesideProcess:
    """One process at a time, started when it is first asked for something: ``main`` of a ``module``, for a recipe.

    One that a signal ended (killed, out of memory) is started again and asked the same.

    Args:
        settings: what else it is told at its start. environment: variables that it has beside the trainer's.
    """

    def __init__(
        self,
        module: str,
        recipe: Recipe,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.recipe, self.settings = module, recipe, dict(settings or {})
        self.environment = dict(environment or {})
        self.is_closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.is_closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def repeat(
        self, ask: Callable[[], Result], work: str, instead: str, died: Callable[[str], None] = lambda cause: None
    ) -> Result:
        """What ``ask`` gets out of the process, again where a signal ends that.

        Args:
            work: what the process does ("samples rollout batch 3"), and ``instead`` what does without it; for messages.
            died: told that the process was lost, before another is started.

        Raises:
            PosttrainError: what the process says that it could not do.
            RunFailure: the process ended, and goes on ending.
        """
        for attempt in range(MAX_STARTS):
            try:
                return ask()
            except (EOFError, BrokenPipeError):
                code = self._end()
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                died(cause)
                if code >= 0 or attempt + 1 == MAX_STARTS or self.is_closed:
                    last = "; what it said stands above" if code > 0 else ", out of memory perhaps"
                    raise RunFailure(
                        f"the process that {work} ended ({cause}{last}), {attempt + 1} "
                        f"{'time' if attempt == 0 else 'times'}. {instead}"
                    ) from None
        raise AssertionError("every way out of the loop is above")

    def started(self) -> tuple[IO[bytes], bool]:
        """What to write to, and whether the process was started just now; waits until it has built what it needs.

        Raises:
            EOFError: it ended before.
            PosttrainError: what it says that it could not do.
        """
        if self._process is not None:
            assert self._process.stdin is not None
            return self._process.stdin, False
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), self.module]
        pipe = subprocess.PIPE
        variables = os.environ | self.environment
        process = self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=1 << 20, env=variables)
        if self.is_closed:
            process.kill()
        assert process.stdin is not None
        settings = {"recipe": self.recipe.dump(), "trust_remote_code": trusts_remote_code()}
        send(process.stdin, {**settings, **choices_in_use(), **self.settings})
        assert "ready" in self.receive()
        return process.stdin, True

    def receive(self) -> dict[str, Any]:
        """What the process says next.

        Raises:
            EOFError: it ended.
            PosttrainError: what it says that it could not do.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        reply = receive(self._process.stdout)
        if reply is None:
            raise EOFError
        if "error" in reply:
            self._end()
            raise _error_of(reply["error"], reply["message"])
        return reply

    def _end(self) -> int:
        """Wait for the end of a process that has said or shown that it ends; its exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was still to be said
                pipe.close()
        return process.wait()


def serve(doing: str, prepare: Callable[[Recipe, dict[str, Any]], Answer]) -> None:
    """The other side: answer what the trainer asks, one after the other, until it is gone.

    Args:
        doing: what messages of failure begin with ("while sampling ahead").
        prepare: builds what answers, from the recipe and what else the trainer said at the start.
    """
    requests, replies = _take_pipes()
    settings = receive(requests)
    if settings is None:
        return
    use_choices(settings)
    declare_code(settings["recipe"])  # the trainer has imported all of it, and its sys.path came along
    declare_from_command_line((), trust_remote_code=settings["trust_remote_code"])
    try:
        answer = prepare(Recipe.model_validate(settings["recipe"]), settings)
        send(replies, {"ready": True})
        asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(requests, asked), name="listener", daemon=True).start()
        while True:
            answer(asked.get(), replies)
    except PosttrainError as error:
        send(replies, {"error": type(error).__name__, "message": f"{doing}: {error}"})


def _error_of(name: str, message: str) -> PosttrainError:
    """The error that the process raised, as far as its message alone makes it."""
    kind: type[PosttrainError] = getattr(errors, name, RunFailure)
    if kind.__init__ is not Exception.__init__:
        kind = UsageError if issubclass(kind, UsageError) else RunFailure
    return kind(message)


def _listen(requests: IO[bytes], asked: queue.SimpleQueue[dict[str, Any]]) -> None:
    while (message := receive(requests)) is not None:
        asked.put(message)
    os._exit(0)  # the trainer is gone; nobody waits for what is being done


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the pipes away from standard input and output; what is printed goes where the trainer's errors go."""
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer, which closes the pipe when it is done
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(requests, "rb", 1 << 20), os.fdopen(replies, "wb", 1 << 20)
