"""Two sandboxes for one verdict: the program in one, its tests in the other, and pipes between them.

The program gets calls and gives values. The tests, which are a data set's code and so a stranger's too, get values and
end with a verdict: their process's exit code, as the kernel tells it to the supervisor of their sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from posttrain.graders.code.candidate import SOLUTION
from posttrain.graders.code.tester import BAD, GONE, RIGHT, TESTS, WRONG
from posttrain.graders.grading import Outcome
from posttrain.graders.sandbox.levels import Level, open_sandbox
from posttrain.graders.sandbox.sandbox import Bounds, Sandbox, SandboxGone

_FOLDER = "posttrain/graders/code"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}  # sets are walked in the same order: the same verdict again


@dataclass(frozen=True, slots=True)
class Checks:
    """What a program has to pass: code that calls ``names``, after ``prelude`` has defined what it needs."""

    names: tuple[str, ...]
    tests: str
    prelude: str = ""


@dataclass(frozen=True, slots=True)
class Walls:
    """Where programs and tests run: a level that ``choose_level`` gave, its image, and what one process may use."""

    level: Level
    bounds: Bounds
    seconds: float
    image: str | None = None


def judge_all(asked: Sequence[tuple[str, Checks]], walls: Walls, num_workers: int) -> list[Outcome]:
    """The outcome for each program and its tests, in order; so many at a time.

    Raises:
        RunFailure: a sandbox cannot be set up.
    """
    with ThreadPoolExecutor(max(1, min(num_workers, len(asked)))) as pool:
        return list(pool.map(lambda pair: judge(pair[0], pair[1], walls), asked))


def judge(program: str, tests: Checks, walls: Walls) -> Outcome:
    """``right``, ``wrong`` or ``timeout``; ``crash``: the program ended itself; ``ungraded``: tests that are none.

    Raises:
        RunFailure: a sandbox cannot be set up.
    """
    with ExitStack() as stack:
        boxes = []
        for role in ("candidate", "tester"):
            box = open_sandbox(walls.level, walls.bounds, walls.image)
            stack.callback(box.close)
            for name in ("plain", role):
                box.write_file(f"{_FOLDER}/{name}.py", _source(name))
            boxes.append(box)
        candidate, tester = boxes
        candidate.write_file(SOLUTION, program.encode("utf-8", errors="replace"))
        spec = {"names": tests.names, "tests": tests.tests, "prelude": tests.prelude}
        tester.write_file(TESTS, json.dumps(spec).encode())
        try:
            _connect(candidate, tester, walls.seconds)
            ended = tester.wait()
            if ended.timed_out or (ended.code == GONE and candidate.wait().timed_out):
                return "timeout"
        except SandboxGone:
            return "crash"
    outcomes: dict[int, Outcome] = {RIGHT: "right", WRONG: "wrong", BAD: "ungraded"}
    return outcomes.get(ended.code, "crash")


def _connect(candidate: Sandbox, tester: Sandbox, seconds: float) -> None:
    """Start both, each with the other at its standard input and output."""
    (hear_calls, speak_calls), (hear_replies, speak_replies) = os.pipe(), os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for box, role, ends in (
            (candidate, "candidate", (hear_calls, speak_replies, nowhere)),
            (tester, "tester", (hear_replies, speak_calls, nowhere)),
        ):
            boot = f"from posttrain.graders.code.{role} import main; main()"
            box.start([*box.python, "-c", boot], ends, ".", _ENVIRONMENT, seconds)
    finally:
        for descriptor in (hear_calls, speak_calls, hear_replies, speak_replies, nowhere):
            os.close(descriptor)


@cache
def _source(name: str) -> bytes:
    return (Path(__file__).parent / f"{name}.py").read_bytes()
