"""Sampling ahead without a process of its own, which takes seconds to start: the same, told in the same words."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipes.recipe import Recipe
from posttrain.train.build import prepare_sampling
from posttrain.train.process import Weights, receive, send, send_weights
from posttrain.train.sources import ahead, sampling_process
from posttrain.train.sources.sampling_process import KEPT


def sample_inline(patch: pytest.MonkeyPatch) -> None:
    """Let runs do in this process what they do in two."""
    patch.setattr(ahead, "SamplingProcess", InlineProcess)
    patch.setattr(ahead, "ThreadPoolExecutor", InlineExecutor)


class Killed(BaseException):
    """What nothing catches: the process is gone."""


class InlineProcess:
    """A ``SamplingProcess`` that is none: another model in this process, told the same in the same words."""

    def __init__(self, recipe: Recipe, folder: Path | None, starts_servers: bool = False) -> None:
        assert not starts_servers, "whoever started this process starts none"
        self.notices: list[str] = []
        self.source, self.model = prepare_sampling(recipe, None if folder is None else folder / KEPT)

    def draw(
        self, batch: int, step: int, weights: Weights, begins: Callable[[int], None], died: Callable[[str], None]
    ) -> Mapping[str, Any]:
        replies = self._answers(weights, {"batch": batch, "step": step, "version": weights.version})
        while (reply := receive(replies)) is not None and "drawn" not in reply:
            begins(reply["begins"])
        assert reply is not None
        self.notices += reply["notices"]
        return reply["drawn"]

    def write(
        self,
        new: list[int],
        weights: Weights,
        carried: list[dict[str, Any]],
        begins: Callable[[int, int], None],
        ends: Callable[[Mapping[str, Any]], None],
        died: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        replies = self._answers(weights, {"version": weights.version, "new": new, "carried": carried})
        while (reply := receive(replies)) is not None and "carried" not in reply:
            begins(*reply["begins"]) if "begins" in reply else ends(reply["drawn"])
        assert reply is not None
        return reply["carried"]

    def _answers(self, weights: Weights, asked: Mapping[str, Any]) -> io.BytesIO:
        """What the process would say to the weights and to what it is asked for."""
        pipe, replies = io.BytesIO(), io.BytesIO()
        send_weights(pipe, weights)
        send(pipe, asked)
        pipe.seek(0)
        for _ in range(2):
            message = receive(pipe)
            assert message is not None
            sampling_process._answer(self.source, self.model, message, replies)
        replies.seek(0)
        return replies

    def close(self) -> None:
        pass


class InlineExecutor:
    """Does what it is given before it returns: nothing overlaps."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass
