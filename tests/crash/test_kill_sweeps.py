"""``kill -9`` of a sweep: nothing outlives it, and the same command goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import killing_sweeps
import pytest
from killing_sweeps import Starter, Sweep, SweepKill, kill_at_random, kill_once

Moment = Callable[[Sweep, float], bool]


def first_checkpoints(sweep: Sweep, seconds: float) -> bool:
    """A trial has saved something; the other one is about to, so that both are at work."""
    return any(sweep.target.glob("cells/*/checkpoints/step-*"))


def grading(sweep: Sweep, seconds: float) -> bool:
    """A grandchild is there: a worker that grades."""
    return any("worker_process" in line for line in sweep.starter.living().values())


def sampling(sweep: Sweep, seconds: float) -> bool:
    """The last trial, an evaluation, has opened its records."""
    return any(sweep.target.glob("chosen/*/unfinished.jsonl"))


MOMENTS: dict[str, dict[str, Moment]] = {
    "methods": {"first checkpoints": first_checkpoints, "grading": grading},
    "best of n": {"sampling": sampling},
}


def check(kills: list[SweepKill]) -> None:
    for kill in kills:
        assert kill.said == ""  # the same command was refused nothing
        assert kill.goes_on is not None
        assert kill.orphans == []
        assert kill.differences == []


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    process = Starter()
    yield process
    process.close()


@pytest.mark.parametrize("kind", list(killing_sweeps.FILES))
def test_the_same_command_goes_on(starter: Starter, kind: str, tmp_path: Path) -> None:
    whole = Sweep(starter, kind, tmp_path / "whole")
    assert whole.finish()[0] == 0, whole.output.read_text()
    kills = [kill_once(whole, tmp_path / name, moment) for name, moment in MOMENTS[kind].items()]
    check(kills)
    assert [kill.children > 0 for kill in kills] == [True] * len(kills)  # there was something to outlive it
    assert len(list(whole.target.rglob("metrics.jsonl"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(killing_sweeps.FILES))
def test_twenty_kills(kind: str, tmp_path: Path) -> None:
    kills = kill_at_random(kind, 20, 1, tmp_path)
    check(kills)
    assert len(kills) == 20
    assert sum(kill.children > 0 for kill in kills) >= 10
