"""Track current work, and print a line about it after long silence.

Wrap slow work in ``phase``, which costs only a list entry. ``heartbeat`` starts the thread that reports phases.
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
    """Work in progress.

    ``total``: expected count in ``unit``, if known; ``num_done``: finished count. ``describe``: custom progress text,
    replacing these counts.
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
    """Announce what a block does. ``name`` introduces the progress: ``sampling``, ``loading tiny``."""
    begun = Phase(name, total, unit, describe)
    _PHASES.append(begun)
    try:
        yield begun
    finally:
        _PHASES.remove(begun)


def each_piece(name: str, pieces: Sequence[PieceT], unit: str) -> Iterator[PieceT]:
    """Yield pieces (such as row batches), reporting how many members are done."""
    with phase(name, sum(map(len, pieces)), unit) as work:
        for piece in pieces:
            yield piece
            work.num_done += len(piece)


def describe_activity(default: Phase) -> str:
    """Summarize active phases in one line, outermost first, timing the innermost.

    Example: ``step 3 of 60, sampling: 128 of 512 answers, 61 s``. Falls back to ``default`` if idle.
    """
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
    """Print a status line to ``stream`` after every ``QUIET_SECONDS`` without output.

    Nested heartbeats do nothing. ``what`` is reported if no phase is active.
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
    """Check if standard output is redirected; on terminals, progress views draw themselves."""
    return sys.stdout is None or not sys.stdout.isatty()
