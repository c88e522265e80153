"""Right if a program passes its tests, which run in another sandbox than the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from posttrain.graders.code.extraction import extract_program
from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Outcome, Submission, Verdict
from posttrain.graders.sandbox.levels import Level, choose_level
from posttrain.graders.sandbox.sandbox import Bounds
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.registry import register

MAX_WORKERS = 8
WALL_FACTOR = 6  # elapsed time that a grading may take, in units of its computing time


@register("grader", batched=True)
def code_tests(
    submissions: Sequence[Submission],
    *,
    level: Level | None = None,
    image: str | None = None,
    timeout_seconds: Annotated[int, Field(ge=1)] = 10,
    memory_megabytes: Annotated[int, Field(ge=64)] = 512,
    num_workers: Annotated[int, Field(ge=1)] | None = None,
) -> list[Verdict]:
    """Right if the program in the answer passes the tests of its problem.

    ``right = 1[every assertion of the tests holds]``. The program is the last fenced block of Python that defines the
    function asked for, else the last one, else the text itself if it is code; where the problem gave the head of the
    function, it stands in front. ``meta["tests"]`` holds the ``code`` of the tests, the ``names`` of the functions that
    it calls, the ``prelude`` that it needs, the ``prefix``, which is the head, and ``goes_on``: whether the model was
    to go on from it.

    The program runs in one sandbox and answers calls; the tests run in another, where its functions are proxies, and
    arguments and results pass as plain data. So a program knows no test, and nothing that it changes, prints or
    kills is a verdict (`docs/code.md`). A program that hangs is a ``timeout``, one that ends itself a ``crash``.

    Args:
        level: ``namespaces``, ``process`` or ``docker``; the default is ``docker`` where an image is named, else
            ``namespaces`` where the kernel allows it, else ``process`` with a warning.
        image: of a container, with ``python3``.
        timeout_seconds: of computing, for the program and for its tests. The limit on elapsed time is 6 times as long.
        memory_megabytes: of each process.
        num_workers: gradings at a time; the default is one per processor, at most 8. It does not change a verdict.

    Source: the functional correctness of HumanEval (Chen et al. 2021, arXiv 2107.03374), section 2.1. Departure: tests
    run elsewhere than the program, so a change of an argument in place is not seen, and results that are no plain data
    are refused.

    Raises:
        UsageError: this machine has no such level; the message names what works.
        RunFailure: a sandbox cannot be set up.
    """
    verdicts: dict[int, Verdict] = {}
    asked: dict[tuple[str, Checks], list[int]] = {}
    for place, one in enumerate(submissions):
        tests = tests_of(one)
        program = None if tests is None else _program_of(one, tests)
        if tests is None:
            verdicts[place] = Verdict("ungraded")
        elif program is None:
            verdicts[place] = Verdict("no_answer")
        else:
            asked.setdefault((program, tests), []).append(place)
    if asked:
        bounds = Bounds(cpu_seconds=timeout_seconds, memory_bytes=memory_megabytes * 2**20)
        walls = Walls(choose_level(level, image), bounds, float(WALL_FACTOR * timeout_seconds), image)
        outcomes = judge_all(list(asked), walls, num_workers or min(count_cpus(), MAX_WORKERS))
        for (pair, places), outcome in zip(asked.items(), outcomes, strict=True):
            verdicts.update((place, _verdict(outcome, pair[0])) for place in places)
    return [verdicts[place] for place in range(len(submissions))]


def tests_of(submission: Submission) -> Checks | None:
    """The tests of the problem, or None where it has none."""
    stated = submission.meta.get("tests")
    if not stated:
        return None
    return Checks(tuple(stated["names"]), stated["code"], stated.get("prelude", ""))


def _program_of(submission: Submission, tests: Checks) -> str | None:
    stated = submission.meta["tests"]
    return extract_program(
        submission.text, tests.names, stated.get("prefix", ""), goes_on=bool(stated.get("goes_on", False))
    )


def _verdict(outcome: Outcome, program: str) -> Verdict:
    return Verdict(outcome, extracted=program)
