"""The trainer's side of the process that samples ahead: it is started, given weights and batches, and watched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from posttrain import errors
from posttrain.consent import trusts_remote_code
from posttrain.errors import PosttrainError, RunFailure, UsageError
from posttrain.models.forward.linear import products
from posttrain.recipes.recipe import Recipe
from posttrain.train.sources.messages import Weights, receive, send, send_weights

MAX_STARTS = 3  # of one batch, where a signal ends the process
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from posttrain.train.sources.sampling_worker import main; main()"
)


class SamplingProcess:
    """One process at a time, started when it is first asked for a batch.

    A process that a signal ended (killed, out of memory) is started again and given the same batch: its weights and
    random numbers are the same, so its answers are.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._version: int | None = None  # of the weights that it has

    def draw(
        self, batch: int, step: int, weights: Weights, begins: Callable[[int], None], died: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """The drawn batch, as ``messages.write_drawn`` writes it. Waits for it.

        Args:
            begins: told of every round of sampling.
            died: told that the process was lost, before another is started.

        Raises:
            PosttrainError: what the process says that it could not do.
            RunFailure: the process ended, and goes on ending.
        """
        for attempt in range(MAX_STARTS):
            try:
                return self._ask(batch, step, weights, begins)
            except (EOFError, BrokenPipeError):
                code = self._end()
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                died(cause)
                if code >= 0 or attempt + 1 == MAX_STARTS or self.is_closed:
                    last = "; what it said stands above" if code > 0 else ", out of memory perhaps"
                    raise RunFailure(
                        f"the process that samples rollout batch {batch} ended ({cause}{last}), {attempt + 1} "
                        f"{'time' if attempt == 0 else 'times'}. rollout.staleness: 0 samples without such a process"
                    ) from None
        raise AssertionError("every way out of the loop is above")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.is_closed = True
        if self._process is not None:
            self._process.kill()

    def _ask(self, batch: int, step: int, weights: Weights, begins: Callable[[int], None]) -> Mapping[str, Any]:
        process = self._started()
        assert process.stdin is not None
        if self._version != weights.version:
            send_weights(process.stdin, weights)
            self._version = weights.version
        send(process.stdin, {"batch": batch, "step": step, "version": weights.version})
        while "drawn" not in (reply := self._receive(process)):
            begins(reply["begins"])
        drawn: Mapping[str, Any] = reply["drawn"]
        return drawn

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
        pipe = subprocess.PIPE
        process = self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=1 << 20)
        self._version = None
        if self.is_closed:
            process.kill()
        assert process.stdin is not None
        settings = {"num_threads": torch.get_num_threads(), "trust_remote_code": trusts_remote_code()}
        send(process.stdin, {"recipe": self.recipe.dump(), "products": products(), **settings})
        assert "ready" in self._receive(process)
        return process

    def _receive(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        reply = receive(process.stdout)
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


def _error_of(name: str, message: str) -> PosttrainError:
    """The error that the process raised, as far as its message alone makes it."""
    kind: type[PosttrainError] = getattr(errors, name, RunFailure)
    if kind.__init__ is not Exception.__init__:
        kind = UsageError if issubclass(kind, UsageError) else RunFailure
    return kind(f"while sampling ahead: {message}")
