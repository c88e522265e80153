"""The work of this process at this moment, and a line about it when nothing else was printed for a while.

Whatever may take long says so with ``phase``; it costs a list entry. ``heartbeat`` starts the thread that reads them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TypeVar

from posttrain.untrusted import harmless, note_output, seconds_since_output

PieceT = TypeVar("PieceT", bound=Sized)
QUIET_SECONDS = 20.0  # without output; a line is due within 30, also where the thread gets the processor late


@dataclass(eq=False)
class Phase:
    """Work that is under way.

    ``total``: of ``unit``, if it is known; ``num_done``: of them. ``describe``: the progress as text, in their place.
    """

    name: str
    total: int | None = None
    unit: str = ""
    describe: Callable[[], str] | None = None
    num_done: int = 0
    began: float = field(default_factory=time.monotonic)

    def progress(self) -> str:
        """Return ``128 of 512 answers``; "" if nothing is known."""
        if self.describe is not None:
            return self.describe()
        if self.total is None:
            return ""
        return f"{self.num_done:,} of {self.total:,} {self.unit}".rstrip()


_PHASES: list[Phase] = []
_IS_BEATING = threading.Lock()


@contextmanager
def phase(
    name: str, total: int | None = None, unit: str = "", describe: Callable[[], str] | None = None
) -> Iterator[Phase]:
    """Say what the block does. ``name`` is what stands in front of the progress: ``sampling``, ``loading tiny``."""
    begun = Phase(name, total, unit, describe)
    _PHASES.append(begun)
    try:
        yield begun
    finally:
        _PHASES.remove(begun)


def each_piece(name: str, pieces: Sequence[PieceT], unit: str) -> Iterator[PieceT]:
    """Yield the pieces of some work (rows of a batch), and say meanwhile how many of their members are done."""
    with phase(name, sum(map(len, pieces)), unit) as work:
        for piece in pieces:
            yield piece
            work.num_done += len(piece)


def describe_activity(default: Phase) -> str:
    """Return the phases under way in a line, the outer ones first, with the seconds of the last: ``step 3 of 60,
    sampling: 128 of 512 answers, 61 s``. ``default``: what is said if there are none."""
    phases = list(_PHASES) or [default]
    last = phases[-1]
    outer = [f"{phase.name} {phase.progress()}".rstrip() for phase in phases[:-1]]
    about = f"{time.monotonic() - last.began:.0f} s"
    progress = last.progress()
    if progress:
        about = f"{progress}, {about}"
    line = ", ".join([*outer, f"{last.name}: {about}"])
    return harmless(line).replace("\n", " ")


@contextmanager
def heartbeat(what: str, stream: IO[str] | None, *, is_on: bool = True) -> Iterator[None]:
    """During the block, print a line to ``stream`` whenever nothing was printed for ``QUIET_SECONDS``.

    Within another heartbeat this one does nothing. ``what`` is at work if no phase is.
    """
    if not is_on or stream is None or not _IS_BEATING.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(Phase(what), stream, ended), name="heartbeat", daemon=True)
    note_output()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _IS_BEATING.release()


def _beat(default: Phase, stream: IO[str], ended: threading.Event) -> None:
    while not ended.wait(max(0.0, QUIET_SECONDS - seconds_since_output())):
        if seconds_since_output() < QUIET_SECONDS:
            continue
        note_output()
        try:
            print(describe_activity(default), file=stream, flush=True)
        except (OSError, ValueError):  # nobody reads any more; whatever else is printed will say so
            return


def is_redirected() -> bool:
    """Return whether standard output is no terminal, where views of the progress draw themselves."""
    return sys.stdout is None or not sys.stdout.isatty()
