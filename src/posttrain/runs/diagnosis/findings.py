"""A finding about a run, and its kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal["fault", "audit", "level", "explanation"]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A finding about a run.

    Args:
        kind: ``fault``: the books do not balance, which proves that something is wrong. ``audit``: a number of an
            audited update that agrees. ``level``: a number that is often seen with trouble, and proves nothing.
            ``explanation``: looks wrong and is not, or says which part of the run could not be read.
        check: the balance, the metric or the file that it is about.
        step: the update at which it is seen first; None if it is about the whole run.
        expected: the value that the records or experience give.
        found: the value that the run has.
        decided_by: the test that decides, or the reason.
        causes: likely causes of a fault, the likeliest first.
        num_updates: the number of updates that show it.
    """

    kind: FindingKind
    check: str
    step: int | None
    expected: str
    found: str
    decided_by: str
    causes: tuple[str, ...] = ()
    num_updates: int = 1


def level(check: str, expected: str, found: str, decided_by: str, step: int | None = None) -> RunFinding:
    """Return a finding that is no proof."""
    return RunFinding("level", check, step, expected, found, decided_by)


def explanation(check: str, expected: str, found: str, decided_by: str, step: int | None = None) -> RunFinding:
    """Return a finding about what is no fault."""
    return RunFinding("explanation", check, step, expected, found, decided_by)
