"""The schedule of sampling ahead on a virtual clock: the code that runs it (``sources/ahead``), with made-up seconds.

What waits for what is decided by ``Ahead`` and noted in its ledger as in a run; only the process that samples is
replaced, by one that knows how long it would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RolloutSection
from posttrain.store.ledger import Ledger
from posttrain.train.process import Weights
from posttrain.train.sources import Turn
from posttrain.train.sources.ahead import Ahead


class VirtualClock:
    """The trainer's time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0


class VirtualFuture(Future[Any]):
    """A result that is there at ``at``; who asks earlier waits until then."""

    def __init__(self, clock: VirtualClock, at: float) -> None:
        super().__init__()
        self.clock, self.at = clock, at

    def result(self, timeout: float | None = None) -> Any:
        self.clock.now = max(self.clock.now, self.at)
        return super().result(timeout)


class VirtualCourier:
    """Carries one batch after another; batch b takes ``seconds(b)``."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.free_at = 0.0

    def submit(self, carry: Callable[..., Any], batch: int, weights: Weights) -> Future[Any]:
        self.free_at = max(self.clock.now, self.free_at) + self.seconds(batch)
        future = VirtualFuture(self.clock, self.free_at)
        future.set_result(carry(batch, weights))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


class VirtualProcess:
    """Answers with one empty rollout for each prompt."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def draw(
        self, batch: int, step: int, weights: Weights, begins: Callable[[int], None], died: Callable[[str], None]
    ) -> Mapping[str, Any]:
        begins(0)
        empty = {"text": "", "parts": {}, "reward": 0.0, "step": step, "epoch": 0, "rollout_index": 0}
        empty["completion"] = {"ids": [], "logprobs": [], "finish": "stop"}
        groups = [[{**empty, "prompt_index": slot}] for slot in range(self.prompts)]
        chosen = list(range(self.prompts))
        return {"sampled": groups, "chosen": chosen, "accepted": 1.0, "version": weights.version, "timing": {}}

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class VirtualSource:
    """Prompts without text, the same ones in every batch."""

    updates: int
    options: RolloutSection

    @property
    def kept(self) -> list[int]:
        """The places of all prompts."""
        return list(range(self.options.prompts))

    @property
    def prompts(self) -> list[tuple[()]]:
        """Their tokens: none."""
        return [()] * self.options.prompts

    @property
    def task(self) -> VirtualSource:
        """What holds the examples."""
        return self

    @property
    def examples(self) -> list[None]:
        """One for each prompt."""
        return [None] * self.options.prompts

    @property
    def order(self) -> VirtualSource:
        """What says which prompts a batch takes."""
        return self

    def turn(self, batch: int, attempt: int) -> Turn:
        """All of them, in every batch."""
        return Turn(self.kept, [batch] * self.options.prompts)


def simulate(
    recipe: Recipe,
    num_batches: int,
    *,
    generate: Callable[[int], float],
    update: Callable[[int], float],
    ledger: Ledger | None = None,
) -> list[float]:
    """Seconds that each rollout batch takes, from one batch's end of training to the next one's.

    Args:
        recipe: resolved; its ``rollout.staleness`` is the schedule.
        generate: seconds of sampling and grading batch b.
        update: seconds of all updates on batch b, with what the trainer does alone beside them.
    """
    assert recipe.rollout is not None
    prompts, updates = recipe.rollout.prompts, recipe.train.epochs * recipe.train.minibatches
    source: Any = VirtualSource(updates, recipe.rollout)
    fixed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": num_batches * updates})})
    clock = VirtualClock()
    courier = VirtualCourier(clock, generate)
    ahead = Ahead(source, fixed, torch.nn.Module(), ledger, process=VirtualProcess(prompts), courier=courier)
    seconds = []
    for batch in range(num_batches):
        began = clock.now
        ahead.draw(batch * updates + 1, batch)
        clock.now += update(batch)
        seconds.append(clock.now - began)
    return seconds
