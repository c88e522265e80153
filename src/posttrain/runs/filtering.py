"""Which runs, and in which order: filters and sorting of what ``listing`` found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from posttrain.errors import UsageError
from posttrain.registry import suggest
from posttrain.runs.listing import RunSummary
from posttrain.runs.paths import fits

STATES = ("running", "finished", "failed", "interrupted", "dead", "damaged")
# name: (what is sorted by, whether the largest comes first)
SORT_KEYS: dict[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "created": (lambda run: run.created, False),
    "updated": (lambda run: run.updated, True),
    "name": (lambda run: run.name, False),
    "state": (lambda run: run.state, False),
    "step": (lambda run: run.step, True),
    "accuracy": (lambda run: run.value if run.standing is not None and run.standing[0] == "accuracy" else None, True),
    "headline": (lambda run: run.standing, True),
    "size": (lambda run: run.disk_bytes, True),
}


@dataclass(frozen=True, slots=True)
class Filter:
    """What a run must be: every one of these that is given.

    ``states``: in one of them. ``tags``: having all of them. ``recipe``, ``objective`` and ``model``: a part of
    the name, or a shell pattern. ``names``: fitting one of these patterns.
    """

    states: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    recipe: str | None = None
    objective: str | None = None
    model: str | None = None
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Filter()

    def __call__(self, run: RunSummary) -> bool:
        """Whether the run passes."""
        return (
            (not self.states or run.state in self.states)
            and set(self.tags) <= set(run.tags)
            and _matches(run.recipe, self.recipe)
            and _matches(run.objective, self.objective)
            and _matches(run.model, self.model)
            and (not self.names or any(fits(run.name, pattern) for pattern in self.names))
        )


def check_states(states: Sequence[str]) -> tuple[str, ...]:
    """The states, if there are such.

    Raises:
        UsageError: with a suggestion.
    """
    for state in states:
        if state not in STATES:
            raise UsageError(
                f"--state: there is no state {state!r}.{suggest(state, STATES)} States: {', '.join(STATES)}"
            )
    return tuple(states)


def sort_runs(runs: Sequence[RunSummary], key: str, *, reverse: bool = False) -> list[RunSummary]:
    """Sorted by a key of ``SORT_KEYS``, or by a metric of the last step, largest first. Runs without it come last.

    Raises:
        UsageError: neither; the message lists both.
    """
    if key in SORT_KEYS:
        value, largest_first = SORT_KEYS[key]
    else:
        metrics = sorted({name for run in runs for name in run.metrics})
        if key not in metrics:
            known = list(dict.fromkeys([*SORT_KEYS, *metrics]))
            raise UsageError(f"--sort: there is no {key!r} to sort by.{suggest(key, known)} Known: {', '.join(known)}")
        value, largest_first = (lambda run: run.metrics.get(key)), True
    having = [run for run in runs if value(run) is not None]
    without = [run for run in runs if value(run) is None]
    return sorted(having, key=value, reverse=largest_first != reverse) + without


def _matches(text: str, pattern: str | None) -> bool:
    return pattern is None or pattern in text or fnmatchcase(text, pattern)
