"""Sampling ahead of training, on a schedule: results do not depend on how fast either side is.

Version v of the weights is what v rollout batches have trained; batches count from 0. With ``rollout.staleness`` S the
groups of batch b, those that replace dropped ones included, are sampled with version max(0, b − S) and trained on in
order. So batch c + S is given away when version c is there, just before the updates of batch c, and with S = 1
sampling one batch and training on the one before take place at the same time.

A checkpoint waits for what is being sampled and keeps it, graded (``held``). So it needs the weights of its own step
alone, and a resumed run repeats no batch and leaves none out.

Of several processes that train, rank 0 has the process, the ledger, and what a checkpoint keeps, and tells the others
what was sampled. That follows from the recipe and the weights, so it is what one process would train on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import CheckpointError
from posttrain.recipes.recipe import Recipe
from posttrain.store.ledger import DIED, Event, Ledger, LedgerEvent
from posttrain.train.process import Weights, sum_of
from posttrain.train.sources.messages import check_written, read_drawn, write_drawn
from posttrain.train.sources.rollouts import START_AGAIN, Drawn, RolloutSource
from posttrain.train.sources.sampling_process import SamplingProcess
from posttrain.world import ONE, World, whole

GATHERED = "weights"  # told by rank 0 where all are to give their parts of them
TOLD = "the batch that was sampled ahead"
HELD = "ahead"  # in a checkpoint's rollout buffer: JSON as bytes
NOT_OURS = "the checkpoint's rollout_buffer.safetensors does not hold the batches that this run sampled ahead"


@dataclass(frozen=True, slots=True)
class Ready:
    """A drawn batch, and the version that the trainer had reached when it was; None in a run resumed since."""

    drawn: Drawn
    at_version: int | None


class Ahead:
    """Has the batches of ``source`` drawn by another process; see the module.

    Args:
        model: what is trained; its weights are copied when a batch is given away.
        ledger: where it is noted what becomes of each group; None for a source that belongs to no run.
        world: of the processes that train.
        process, courier: what draws, and whose thread waits for it, if others than a process beside this one.
    """

    def __init__(
        self,
        source: RolloutSource,
        recipe: Recipe,
        model: Any,
        ledger: Ledger | None,
        *,
        world: World = ONE,
        process: Any = None,
        courier: Any = None,
    ) -> None:
        assert recipe.rollout is not None
        self.source, self.model, self.ledger, self.world = source, model, ledger, world
        self.staleness = recipe.rollout.staleness
        steps = recipe.train.steps
        if steps is None:
            assert recipe.train.passes is not None, "a recipe says steps or passes"
            steps, _ = source.length_of(recipe.train.passes)
        self.num_batches = -(-steps // source.updates)
        folder = None if ledger is None else ledger.path.parent
        self._process = process or SamplingProcess(recipe, folder, world.starts_servers)
        self._courier = courier
        self._waiting: dict[int, Future[Ready]] = {}  # given away, and not behind the last update yet
        self._next = 0  # the first batch that was not given away
        self._version = 0  # of the trainer's weights, as of the last batch that it asked for
        self._has_begun = False

    def draw(self, step: int, cycle: int) -> Drawn:
        """Rollout batch ``cycle``, whose first update is ``step``; gives away those that may be sampled by now.

        Raises:
            PosttrainError: it could not be sampled or graded.
        """
        if self.world.is_main:
            drawn = self._draw(step, cycle)
            if self.world.size > 1:
                self.world.tell(write_drawn(drawn), TOLD)
            return drawn
        while (told := self.world.tell(None, TOLD)) == GATHERED:
            self.gather()
        stated: Any = told
        return read_drawn(stated, self.source)

    def _draw(self, step: int, cycle: int) -> Drawn:
        self._version = cycle
        self._next = max(self._next, cycle)
        if not self._has_begun:
            self._has_begun = True
            if self.ledger is not None and self.ledger.path.exists():
                self._note_resumed(step)
        self._give_away(cycle)
        if cycle not in self._waiting:
            raise CheckpointError(f"{NOT_OURS} (there is no batch {cycle}); {START_AGAIN}")
        started = time.perf_counter()
        ready = self._taken(cycle)
        waited = time.perf_counter() - started
        for batch in [b for b in self._waiting if b < cycle]:
            del self._waiting[batch]
        drawn = ready.drawn
        self._note_use(drawn, cycle, step)
        drawn.timing["waited_seconds"] = waited
        if ready.at_version is not None:
            in_flight = max(0, ready.at_version - drawn.version)
            drawn.timing["staleness_in_flight"] = float(in_flight)
            drawn.timing["staleness_in_queue"] = float(cycle - drawn.version - in_flight)
        return drawn

    def describe(self, cycle: int, drawn: Drawn) -> dict[str, float]:
        """How much older the weights that sampled a batch are than those that train on it, in batches."""
        return {"staleness": float(cycle - drawn.version)}

    def take_notices(self) -> list[str]:
        """What the engine of the process that samples has to say."""
        said: list[str] = []
        while notices := self._process.notices:  # the courier's thread adds to them
            said.append(f"while sampling ahead: {notices.pop(0)}")
        return said

    def held(self, step: int) -> dict[str, Tensor]:
        """All batches that are not trained on yet after ``step``, as a tensor to save; waits for those in flight.

        Raises:
            PosttrainError: one of them could not be sampled or graded.
        """
        if not self.world.is_main:
            return {}
        rows = self._rows(step)
        if self.ledger is not None:
            self.ledger.flush()
        content = bytearray(json.dumps(rows).encode())
        return {HELD: torch.frombuffer(content, dtype=torch.uint8)} if rows else {}

    def restore(self, rollout_buffer: Mapping[str, Tensor], vocabulary: int) -> None:
        """Take back what ``held`` gave; ``vocabulary``: how many tokens the model knows.

        Raises:
            CheckpointError: it is not what ``held`` gives.
        """
        if HELD not in rollout_buffer or not self.world.is_main:
            return
        try:
            for row in json.loads(rollout_buffer[HELD].numpy().tobytes()):
                self._waiting[row["batch"]] = self._restored(row, vocabulary)
            self._next = max(self._waiting) + 1
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{NOT_OURS} ({type(error).__name__}); {START_AGAIN}") from None

    def close(self) -> None:
        """End the process; what it is doing is lost."""
        self._process.close()
        if self._courier is not None:
            self._courier.shutdown(cancel_futures=True)

    def _rows(self, step: int, without: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
        """What a checkpoint after ``step`` keeps of each batch."""
        kept = [b for b in sorted(self._waiting) if b * self.source.updates >= step and b not in without]
        return [{"batch": b, **_untimed(write_drawn(self._waiting[b].result().drawn))} for b in kept]

    def _restored(self, row: dict[str, Any], vocabulary: int) -> Future[Ready]:
        """The batch of a row of ``_rows``."""
        ready: Future[Ready] = Future()
        untimed = {"generate_seconds": 0.0, "score_seconds": 0.0}
        check_written(row, self.source, vocabulary)
        ready.set_result(Ready(read_drawn({**row, "timing": untimed}, self.source), None))
        return ready

    def _note_resumed(self, step: int) -> None:
        self._note([LedgerEvent("resumed", self._next, step - 1)])

    def _taken(self, cycle: int) -> Ready:
        return self._waiting[cycle].result()

    def _give_away(self, cycle: int) -> None:
        """Every batch that the schedule lets be sampled with the weights as they are, and no later one of the run."""
        if batches := self._due(cycle):
            weights = self._copied(cycle)
            for batch in batches:
                self._note(self._round(batch, 0, "issued", cycle))
                self._waiting[batch] = self._courier.submit(self._carry, batch, weights)

    def _due(self, cycle: int) -> range:
        """The batches that begin with the weights as they are; they count as given away from here on."""
        batches = range(self._next, min(cycle + self.staleness, max(cycle, self.num_batches - 1)) + 1)
        self._next = max(self._next, batches.stop)
        return batches

    def _copied(self, cycle: int) -> Weights:
        """The weights as they are, for the courier to carry."""
        self._courier = self._courier or ThreadPoolExecutor(1, "courier")
        self.world.tell(GATHERED, TOLD)
        return Weights(cycle, *self.gather())

    def gather(self) -> tuple[dict[str, Tensor], list[float]]:
        """The trained weights, copied, and what all add up to; of a model in parts all processes are to come here."""
        copies, sums = {}, []
        for name, parameter in self.model.named_parameters():
            tensor = whole(parameter.detach())
            sums.append(sum_of(tensor))
            if parameter.requires_grad and self.world.is_main:
                copies[name] = tensor.to("cpu", copy=True)
        return copies, sums

    def _carry(self, batch: int, weights: Weights) -> Ready:
        """In the courier's thread: have the batch drawn, and note what becomes of its groups."""
        rounds = [0]
        is_issued = True  # round 0, when the batch was given away

        def begins(attempt: int) -> None:
            nonlocal is_issued
            if not (attempt == 0 and is_issued):
                self._note(self._round(batch, attempt, "issued", weights.version))
                rounds.append(attempt)
            is_issued = False

        def died(cause: str) -> None:
            nonlocal is_issued
            for attempt in rounds:
                self._note(self._round(batch, attempt, "dropped", weights.version, DIED))
            rounds.clear()
            is_issued = False

        step = batch * self.source.updates + 1
        stated = self._process.draw(batch, step, weights, begins, died)
        drawn = read_drawn(stated, self.source)
        for attempt in rounds:
            self._note(self._round(batch, attempt, "done", weights.version))
        return Ready(drawn, self._version)

    def _round(self, batch: int, attempt: int, event: Event, version: int, reason: str = "") -> list[LedgerEvent]:
        """The same event for every group of a round of sampling."""
        step = batch * self.source.updates + 1
        places = self.source.order.turn(batch, attempt).places
        return [
            LedgerEvent(event, batch, step, attempt, slot, self.source.kept[place], version, reason)
            for slot, place in enumerate(places)
        ]

    def _note_use(self, drawn: Drawn, batch: int, step: int) -> None:
        chosen, size = {id(group) for group in drawn.chosen}, self.source.options.prompts
        events = []
        for place, group in enumerate(drawn.sampled):
            draw, slot = divmod(place, size)
            prompt = group[0].prompt_index
            why = "" if id(group) in chosen else "not needed" if self.source.fits(group) else "uniform"
            used: Event = "dropped" if why else "consumed"
            events.append(LedgerEvent(used, batch, step, draw, slot, prompt, drawn.version, why))
        self._note(events)

    def _note(self, events: list[LedgerEvent]) -> None:
        if self.ledger is not None:
            self.ledger.append(events)


def _untimed(written: dict[str, Any]) -> dict[str, Any]:
    """Without its seconds: checkpoints of equal runs are equal."""
    return {key: x for key, x in written.items() if key != "timing"}
