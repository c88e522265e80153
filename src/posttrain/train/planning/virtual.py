"""The schedule of sampling ahead on a virtual clock: the code that runs it (``sources/ahead``, ``sources/partial`` and
``sources/in_flight``), with made-up seconds.

What waits for what, and which version writes which tokens, is decided there and noted in the ledger as in a run; only
the process that samples is replaced, by one that knows how long it would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.engines.base import UNLIMITED_CONTEXT, Sampling
from posttrain.engines.conversation import Conversation
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RolloutSection
from posttrain.store.ledger import Ledger
from posttrain.train.planning.decoding import Span
from posttrain.train.process import Weights
from posttrain.train.sources import Turn
from posttrain.train.sources.ahead import Ahead, Ready
from posttrain.train.sources.in_flight import write_version
from posttrain.train.sources.messages import read_groups
from posttrain.train.sources.partial import PartialAhead
from posttrain.train.sources.rollouts import Drawn

Lengths = Sequence[Sequence[int]]  # of answers, by prompt


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


class VirtualMessenger(VirtualCourier):
    """Carries what a version of the weights is to write, to a ``VirtualWriter``, which keeps the time itself."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, lambda batch: 0.0)

    def submit(self, carry: Callable[..., Any], *told: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(carry(*told))
        return future


def _drawn(prompts: int, batch: int, step: int, version: int) -> dict[str, Any]:
    """A batch of one empty rollout for each prompt, as ``messages.write_drawn`` writes it."""
    empty = {"text": "", "parts": {}, "reward": 0.0, "step": step, "epoch": 0, "rollout_index": 0}
    empty["completion"] = {"ids": [], "logprobs": [], "finish": "stop"}
    groups = [[{**empty, "prompt_index": slot}] for slot in range(prompts)]
    chosen = list(range(prompts))
    return {"sampled": groups, "chosen": chosen, "accepted": 1.0, "version": version, "timing": {}}


class VirtualProcess:
    """Answers with one empty rollout for each prompt."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def draw(
        self, batch: int, step: int, weights: Weights, begins: Callable[[int], None], died: Callable[[str], None]
    ) -> Mapping[str, Any]:
        begins(0)
        return _drawn(self.prompts, batch, step, weights.version)

    def close(self) -> None:
        pass


class VirtualWriter:
    """The process that samples with ``rollout.partial``, and its engine: what a version writes is decided as there.

    ``seconds``: of a generation, by prompt and answer. ``ready_at``: when each batch was there.
    """

    version, context_tokens = 0, UNLIMITED_CONTEXT

    def __init__(
        self, clock: VirtualClock, source: VirtualSource, seconds: Callable[[Sequence[Sequence[Span]]], float]
    ) -> None:
        self.clock, self.source, self.seconds = clock, source, seconds
        self.free_at = 0.0
        self.ready_at: dict[int, float] = {}
        source.engine = self

    def write(
        self,
        new: list[int],
        weights: Weights,
        carried: list[dict[str, Any]],
        begins: Callable[[int, int], None],
        ends: Callable[[Mapping[str, Any]], None],
        died: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        def tell(said: Mapping[str, Any]) -> None:
            if "begins" in said:
                begins(*said["begins"])
            else:
                self.ready_at[said["drawn"]["batch"]] = self.free_at
                ends(said["drawn"])

        self.free_at = max(self.clock.now, self.free_at)
        source: Any = self.source
        return write_version(source, weights.version, new, carried, tell)

    def go_on(self, parts: Sequence[tuple[Any, Sequence[Conversation], int]], sampling: Sampling) -> None:
        """As of an engine: a row's key is its length, and what stands for its tokens has their number alone."""
        going = [([row for row in rows if row.finish is None], reach) for _, rows, reach in parts]
        self.free_at += self.seconds([[(len(r.ids), min(r.key, reach)) for r in rows] for rows, reach in going])
        for rows, reach in going:
            for row in rows:
                row.finish = "stop" if row.key <= reach else None
                written: Any = () if row.finish else range(reach)
                row.ids = written

    def close(self) -> None:
        pass


class VirtualPartial(PartialAhead):
    """Whose trainer waits on the clock."""

    def _taken(self, cycle: int) -> Ready:
        ready = super()._taken(cycle)
        writer: Any = self._process
        writer.clock.now = max(writer.clock.now, writer.ready_at[cycle])
        return ready


@dataclass(frozen=True)
class VirtualRequest:
    """The answers of a batch by prompt, each with its length for a key."""

    prompts: list[tuple[()]]
    lengths: Lengths

    def keys(self, prompt: int) -> list[int]:
        return list(self.lengths[prompt])


@dataclass
class VirtualSource:
    """Prompts without text, the same ones in every batch; ``lengths``: of the answers of a batch."""

    updates: int
    options: RolloutSection
    lengths: Callable[[int], Lengths] | None = None
    engine: Any = None

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

    @property
    def sampling(self) -> Sampling:
        """What bounds the answers."""
        return Sampling(self.options.max_tokens)

    def request(self, batch: int, step: int, attempt: int) -> VirtualRequest:
        """The answers of a batch."""
        assert self.lengths is not None
        return VirtualRequest(self.prompts, self.lengths(batch))

    def collect(self, request: VirtualRequest, said: Any) -> tuple[Any, float]:
        """One empty rollout for each prompt, graded in no time."""
        groups: Any = _drawn(self.options.prompts, 0, 0, 0)["sampled"]
        source: Any = self
        return read_groups(groups, source), 0.0

    def choose(self, sampled: Any, batch: int) -> Drawn:
        """All of them."""
        return Drawn(sampled, sampled, 1.0, batch, {})


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
    clock, source, fixed = _stage(recipe, num_batches)
    process = VirtualProcess(source.options.prompts)
    told: Any = source
    courier = VirtualCourier(clock, generate)
    ahead = Ahead(told, fixed, torch.nn.Module(), ledger, process=process, courier=courier)
    return _played(ahead, source, clock, num_batches, update)


def simulate_partial(
    recipe: Recipe,
    num_batches: int,
    *,
    lengths: Callable[[int], Lengths],
    generate: Callable[[Sequence[Sequence[Span]]], float],
    update: Callable[[int], float],
    ledger: Ledger | None = None,
) -> list[float]:
    """The same with ``rollout.partial``.

    Args:
        lengths: tokens of the answers of batch b.
        generate: seconds of one generation, which writes some answers on, by prompt.
    """
    clock, source, fixed = _stage(recipe, num_batches)
    source.lengths = lengths
    process = VirtualWriter(clock, source, generate)
    told: Any = source
    courier = VirtualMessenger(clock)
    ahead = VirtualPartial(told, fixed, torch.nn.Module(), ledger, process=process, courier=courier)
    return _played(ahead, source, clock, num_batches, update)


def _stage(recipe: Recipe, num_batches: int) -> tuple[VirtualClock, VirtualSource, Recipe]:
    """The clock, the prompts, and the recipe of a run of so many batches."""
    assert recipe.rollout is not None
    updates = recipe.train.epochs * recipe.train.minibatches
    fixed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": num_batches * updates})})
    return VirtualClock(), VirtualSource(updates, recipe.rollout), fixed


def _played(
    ahead: Ahead, source: VirtualSource, clock: VirtualClock, num_batches: int, update: Callable[[int], float]
) -> list[float]:
    seconds = []
    for batch in range(num_batches):
        began = clock.now
        ahead.draw(batch * source.updates + 1, batch)
        clock.now += update(batch)
        seconds.append(clock.now - began)
    return seconds
