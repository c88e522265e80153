"""Findings about a run, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal["fault", "audit", "level", "explanation"]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A finding about a run.

    Args:
        kind: ``fault``: a violated balance, which proves an error. ``audit``: a matching number in an audited update.
            ``level``: a value that often accompanies problems but proves nothing. ``explanation``: looks wrong but is
            harmless, or names a part of the run that could not be read.
        check: the balance, metric or file concerned.
        step: first affected update; None for the whole run.
        expected: the value expected from records or experience.
        found: the actual value.
        decided_by: a test to settle it, or the reason.
        causes: likely causes of a fault, most likely first.
        num_updates: number of affected updates.
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
    """Build a level finding, which proves nothing."""
    return RunFinding("level", check, step, expected, found, decided_by)


def explanation(check: str, expected: str, found: str, decided_by: str, step: int | None = None) -> RunFinding:
    """Build a finding about harmless numbers."""
    return RunFinding("explanation", check, step, expected, found, decided_by)
