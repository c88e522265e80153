"""The trainer's side of answers that go on across updates (``rollout.partial``); ``in_flight`` has their schedule.

As each version of the weights is there, the process that samples is given it together with what the versions before
left unfinished, and gives back what this one leaves. So it may be killed and told the same again, and a checkpoint
holds unfinished answers as they stand behind the version of its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from posttrain.store.ledger import DIED, LedgerEvent
from posttrain.train.process import Weights
from posttrain.train.sources.ahead import Ahead, Ready
from posttrain.train.sources.in_flight import check_carried
from posttrain.train.sources.messages import check_written, read_drawn, read_groups
from posttrain.train.sources.rollouts import Drawn
from posttrain.types import Completion


class PartialAhead(Ahead):
    """See the module, and ``Ahead``."""

    _writing: Future[None] | None = None  # all that the newest version writes

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._carried: list[dict[str, Any]] = []  # behind the newest version that has written
        self._issued: set[tuple[int, int]] = set()  # (batch, round)

    def describe(self, cycle: int, drawn: Drawn) -> dict[str, float]:
        """``staleness``: of the oldest weights; ``token_staleness``: the mean over tokens, both in batches.

        ``continued``: the share of the answers that more than one version wrote.
        """
        said = [rollout.completion for group in drawn.sampled for rollout in group]
        versions = [v for one in said for v in _versions(one)]
        return {
            **super().describe(cycle, drawn),
            "token_staleness": cycle - statistics.fmean(versions) / self.source.updates,
            "continued": statistics.fmean(len(set(_versions(one))) > 1 for one in said),
        }

    def _give_away(self, cycle: int) -> None:
        """The weights as they are, to write on at what is unfinished and to begin what the schedule lets begin."""
        new = self._due(cycle)
        for batch in new:
            self._note(self._round(batch, 0, "issued", cycle))
            self._issued.add((batch, 0))
            self._waiting[batch] = Future()
        weights = self._copied(cycle)
        self._writing = self._courier.submit(self._write, list(new), weights, self._writing)

    def _taken(self, cycle: int) -> Ready:
        assert self._writing is not None, "the version that finishes a batch has been given away"
        taken = self._waiting[cycle]
        either: list[Future[Any]] = [taken, self._writing]
        wait(either, return_when=FIRST_COMPLETED)
        if not taken.done():
            self._writing.result()
        assert taken.done(), "its version finishes a batch, or fails"
        return taken.result()

    def _write(self, new: list[int], weights: Weights, before: Future[None] | None) -> None:
        """In the courier's thread: have this version write, and note what becomes of the groups."""
        if before is not None:
            before.result()
        begun = {(batch, 0) for batch in new}  # with this version, and not at their end

        def begins(batch: int, attempt: int) -> None:
            if (batch, attempt) not in self._issued:
                self._note(self._round(batch, attempt, "issued", weights.version))
                self._issued.add((batch, attempt))
                begun.add((batch, attempt))

        def ends(stated: Mapping[str, Any]) -> None:
            batch = stated["batch"]
            if self._waiting[batch].done():
                return  # it said so before it died
            drawn = read_drawn(stated, self.source)
            begun.difference_update({known for known in begun if known[0] == batch})
            self._note_done(batch, drawn)
            self._waiting[batch].set_result(Ready(drawn, self._version))

        def died(cause: str) -> None:
            for batch, attempt in sorted(begun):
                self._note(self._round(batch, attempt, "dropped", weights.version, DIED))
            self._issued.difference_update(begun)
            begun.clear()

        self._carried = self._process.write(new, weights, self._carried, begins, ends, died)

    def _note_done(self, batch: int, drawn: Drawn) -> None:
        for attempt in range(len(drawn.sampled) // self.source.options.prompts):
            self._note(self._round(batch, attempt, "done", drawn.version))

    def _rows(self, step: int, without: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
        if self._writing is not None:
            self._writing.result()
        return [*super()._rows(step, frozenset(row["batch"] for row in self._carried)), *self._carried]

    def _restored(self, row: dict[str, Any], vocabulary: int) -> Future[Ready]:
        if "rows" not in row:
            return super()._restored(row, vocabulary)
        check_carried(row, self.source.options.prompts, self.source.options.group)
        check_written(row, self.source, vocabulary)
        read_groups(row["sampled"], self.source)
        self._carried.append(row)
        return Future()

    def _note_resumed(self, step: int) -> None:
        """What is unfinished in the checkpoint may have been used since, which is void; so is what stands behind it."""
        first = min((row["batch"] for row in self._carried), default=self._next)
        self._note([LedgerEvent("resumed", first, step - 1)])
        unfinished = {row["batch"]: len(row["sampled"]) // self.source.options.prompts + 1 for row in self._carried}
        for batch, waiting in sorted(self._waiting.items()):
            if batch in unfinished:
                for attempt in range(unfinished[batch]):
                    self._note(self._round(batch, attempt, "issued", max(0, batch - self.staleness)))
            elif batch > first:
                drawn = waiting.result().drawn
                for attempt in range(len(drawn.sampled) // self.source.options.prompts):
                    self._note(self._round(batch, attempt, "issued", drawn.version))
                self._note_done(batch, drawn)


def _versions(said: Completion) -> tuple[int, ...]:
    """Of each token."""
    return (said.version,) * len(said.ids) if isinstance(said.version, int) else said.version
