"""``ledger.jsonl``: what became of every group of answers that was asked for ahead of training.

One line per event and group, only ever appended. A group is named by its rollout batch, its round of sampling
(``draw``: further rounds come where uniform groups are dropped) and its ``slot`` in it. It is ``issued``, ``done`` once
it is sampled and graded, and then ``consumed`` by training or ``dropped`` with the reason. ``resumed`` says from where
a run goes on: what was consumed after ``step``, and all of the batches from ``batch`` on, is void and comes again with
the same random numbers.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from posttrain.errors import DataError
from posttrain.store.durable import cut_torn_line, storage_errors, sync_file
from posttrain.store.reading import open_record, stated

Event = Literal["issued", "done", "consumed", "dropped", "resumed"]
DIED = "the sampling process died"
_MAX_BYTES = 1 << 33
_BEFORE = {"issued": "", "done": "issued", "consumed": "done", "dropped": "done"}


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One line. ``prompt``: the index of the prompt in the task; ``step``: of the batch's first update."""

    event: Event
    batch: int
    step: int
    draw: int = 0
    slot: int = 0
    prompt: int = 0
    version: int = 0
    reason: str = ""

    @property
    def group(self) -> tuple[int, int, int]:
        return self.batch, self.draw, self.slot


class Ledger:
    """The ledger of one run; safe to append to from several threads. The file is created by the first event."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._is_whole = False  # no torn line at the end

    def append(self, events: Iterable[LedgerEvent]) -> None:
        """Write the events; they survive the death of this process.

        Raises:
            StorageError: the disk is full or not writable.
        """
        lines = "".join(f"{json.dumps({k: v for k, v in asdict(e).items() if v != ''})}\n" for e in events)
        with self._lock, storage_errors("ledger", self.path), open(self.path, "ab+") as file:
            if not self._is_whole:
                cut_torn_line(file.fileno())
                self._is_whole = True
            file.write(lines.encode())

    def flush(self) -> None:
        """Wait until everything appended is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        if self.path.exists():
            with storage_errors("ledger", self.path):
                sync_file(self.path)

    def read(self) -> list[LedgerEvent]:
        """Every event, oldest first; a line that a kill has torn is none.

        Raises:
            DataError: a line is not an event.
        """
        if not self.path.exists():
            return []
        with open_record(self.path, _MAX_BYTES) as file:
            lines = file.read().split(b"\n")[:-1]
        return [_read_event(line, self.path, number) for number, line in enumerate(lines, start=1)]


def standing(events: Sequence[LedgerEvent]) -> dict[tuple[int, int, int], LedgerEvent]:
    """The last event of every group that counts, by (batch, draw, slot); what a resumed run made void does not.

    Raises:
        ValueError: a group was issued, done or used twice, or used before it was done.
    """
    last: dict[tuple[int, int, int], LedgerEvent] = {}
    for event in events:
        if event.event == "resumed":
            last = {group: _as_at(event.step, e) for group, e in last.items() if e.batch < event.batch}
            continue
        before = last[event.group].event if event.group in last else ""
        if event.event == "dropped" and event.reason == DIED and before == "issued":
            del last[event.group]  # it is issued again
            continue
        if before != _BEFORE[event.event]:
            raise ValueError(f"group {event.group} is {event.event} where it was {before or 'not issued'}")
        last[event.group] = event
    return last


def count(events: Sequence[LedgerEvent]) -> dict[str, int]:
    """How many groups stand where: ``issued`` (in flight), ``done`` (in the queue), ``consumed``, ``dropped``."""
    return dict(Counter(event.event for event in standing(events).values()))


def _as_at(step: int, event: LedgerEvent) -> LedgerEvent:
    """What a group was after ``step``: a batch whose first update came later had not been used."""
    if event.event not in ("consumed", "dropped") or event.step <= step:
        return event
    return LedgerEvent("done", event.batch, event.step, event.draw, event.slot, event.prompt, event.version)


def _read_event(line: bytes, path: Path, number: int) -> LedgerEvent:
    try:
        return stated(LedgerEvent, line)
    except ValueError as error:
        raise DataError(path, f"damaged: not an event of a ledger ({error}); move it away", number) from None
