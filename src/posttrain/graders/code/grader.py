"""Right if a program passes its tests, which run in another sandbox than the program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from posttrain.graders.answers import tagged_response
from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Submission, Verdict, is_blank
from posttrain.graders.sandbox.sandbox import Bounds, SandboxKind, choose_sandbox
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.registry import register

# Where the program stands in an answer. Text rules only: nothing a model wrote is parsed or compiled out here.

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_DEFINITION = r"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*="
MAX_CHARS = 100_000
MAX_WORKERS = 8
WALL_FACTOR = 6  # elapsed time that a grading may take, in units of its computing time


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, content) of each complete fenced block, in order. Linear."""
    blocks = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() : fence.start()].strip("\n")))
            opened = None
    return blocks


def extract_program(text: str, names: Sequence[str], prefix: str = "", *, goes_on: bool = False) -> str | None:
    """Return the program in a completion, or None.

    Of what follows the thinking it is the last complete fenced block of Python that defines one of ``names``, else the
    last such block; without any block the text itself, if it defines one of ``names``, or if it ``goes_on`` in the
    body that ``prefix`` began (cut at the first line that does not belong to it). ``prefix`` is put before it.
    """
    response = tagged_response(text)
    if response is None or is_blank(response) or len(response) > MAX_CHARS:
        return None
    definition = re.compile("|".join(_DEFINITION.format(name=re.escape(name)) for name in names), re.MULTILINE)
    blocks = _programs(response)
    program = next((one for one in reversed(blocks) if definition.search(one)), blocks[-1] if blocks else None)
    if program is None and _FENCE.search(response) is None:
        if definition.search(response):
            program = response
        elif goes_on:
            lines = response.splitlines(keepends=True)
            body = "".join(itertools.takewhile(lambda line: not line.strip() or line[0] in " \t", lines))
            if is_blank(body):
                program = None
            else:
                program = body.strip("\n")
    if program is None:
        return None
    if prefix:
        return f"{prefix.rstrip()}\n{program}\n"
    return program


def last_program(text: str) -> str | None:
    """Return the last complete fenced block of Python of what follows the thinking, or None."""
    response = tagged_response(text)
    if response is None:
        blocks = []
    else:
        blocks = _programs(response)
    if blocks:
        return blocks[-1]
    return None


def _programs(response: str) -> list[str]:
    return [content for language, content in fenced_blocks(response) if language in _PYTHON and not is_blank(content)]


@register("grader", batched=True)
def code_tests(
    submissions: Sequence[Submission],
    *,
    sandbox: SandboxKind | None = None,
    timeout_seconds: Annotated[int, Field(ge=1)] = 10,
    memory_megabytes: Annotated[int, Field(ge=64)] = 512,
    num_workers: Annotated[int, Field(ge=1)] | None = None,
) -> list[Verdict]:
    """Right if the program in the answer passes the tests of its problem.

    ``right = 1[every assertion of the tests holds]``. The program is the last fenced block of Python that defines the
    function asked for, else the last one, else the text itself if it is code, behind the head that the problem gave.
    ``meta["tests"]`` holds the ``code`` of the tests, the ``names`` that it calls, its ``prelude``, the head as
    ``prefix``, and ``goes_on``: the model was to go on from it.

    The program runs in one sandbox and answers calls; the tests run in another and see its results as plain data. So a
    program knows no test, and nothing that it changes, prints or kills is a verdict. A program that
    hangs is a ``timeout``, one that ends itself a ``crash``.

    Args:
        sandbox: ``bubblewrap`` (the default), or ``process``, which hides nothing of this user from the program.
        timeout_seconds: of computing, for the program and for its tests. The limit on elapsed time is 6 times as long.
        memory_megabytes: of the program with all processes that it starts, and of its tests.
        num_workers: gradings at a time; by default one per processor, at most 8. It does not change a verdict.

    Source: the functional correctness of HumanEval (Chen et al. 2021, arXiv 2107.03374), section 2.1. Departure: a
    change of an argument in place is not seen, and results that are no plain data are refused.

    Raises:
        UsageError: the sandbox does not work on this machine; the message names what does.
        RunFailure: a sandbox cannot be set up.
    """
    verdicts = [Verdict("ungraded") for _ in submissions]
    to_run: dict[tuple[str, Checks], list[int]] = {}
    for place, one in enumerate(submissions):
        tests = one.meta.get("tests")
        if not tests:
            continue
        program = extract_program(
            one.text, tests["names"], tests.get("prefix", ""), goes_on=bool(tests.get("goes_on", False))
        )
        if program is None:
            verdicts[place] = Verdict("no_answer")
        else:
            checks = Checks(tuple(tests["names"]), tests["code"], tests.get("prelude", ""))
            to_run.setdefault((program, checks), []).append(place)
    if to_run:
        bounds = Bounds(cpu_seconds=timeout_seconds, memory_bytes=memory_megabytes * 2**20)
        walls = Walls(choose_sandbox(sandbox), bounds, float(WALL_FACTOR * timeout_seconds))
        outcomes = judge_all(list(to_run), walls, num_workers or min(count_cpus(), MAX_WORKERS))
        for ((program, _), places), outcome in zip(to_run.items(), outcomes, strict=True):
            for place in places:
                verdicts[place] = Verdict(outcome, extracted=program)
    return verdicts
