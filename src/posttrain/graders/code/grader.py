"""Right if a program passes its tests, which run in another sandbox than the program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from posttrain.graders.answers import tagged_response
from posttrain.graders.code.judging import Checks, Walls, judge_all
from posttrain.graders.grading import Submission, Verdict, is_blank
from posttrain.graders.sandbox.sandbox import Bounds, Kind, choose_sandbox
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.registry import register

# Where the program stands in an answer. Text rules only: nothing a model wrote is parsed or compiled out here.

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_DEFINITION = r"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*="
MAX_CHARS = 100_000


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
    """The program in a completion, or None.

    Of what follows the thinking it is the last complete fenced block of Python that defines one of ``names``, else the
    last such block; without any block the text itself, if it defines one of ``names``, or if it ``goes_on`` in the
    body that ``prefix`` began (cut at the first line that does not belong to it). ``prefix`` is put before it.
    """
    response = tagged_response(text)
    if response is None or is_blank(response) or len(response) > MAX_CHARS:
        return None
    blocks = _programs(response)
    program = next((one for one in reversed(blocks) if defines(one, names)), blocks[-1] if blocks else None)
    if program is None and _FENCE.search(response) is None:
        if defines(response, names):
            program = response
        elif goes_on:
            program = _body(response)
    if program is None:
        return None
    return f"{prefix.rstrip()}\n{program}\n" if prefix else program


def last_program(text: str) -> str | None:
    """The last complete fenced block of Python of what follows the thinking, or None."""
    response = tagged_response(text)
    blocks = [] if response is None else _programs(response)
    return blocks[-1] if blocks else None


def _programs(response: str) -> list[str]:
    return [content for language, content in fenced_blocks(response) if language in _PYTHON and not is_blank(content)]


def defines(program: str, names: Sequence[str]) -> bool:
    """Whether a function, class or variable of one of these names is defined at the left margin."""
    pattern = "|".join(_DEFINITION.format(name=re.escape(name)) for name in names)
    return re.search(pattern, program, re.MULTILINE) is not None


def _body(text: str) -> str | None:
    """The indented lines that a text begins with: how a model goes on that was given the head of a function."""
    kept = []
    for line in text.split("\n"):
        if line.strip() and not line.startswith((" ", "\t")):
            break
        kept.append(line)
    body = "\n".join(kept)
    return None if is_blank(body) else body.strip("\n")


MAX_WORKERS = 8
WALL_FACTOR = 6  # elapsed time that a grading may take, in units of its computing time


@register("grader", batched=True)
def code_tests(
    submissions: Sequence[Submission],
    *,
    sandbox: Kind | None = None,
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
        sandbox: ``bubblewrap`` (the default), or ``process``, which hides nothing of this user from the program.
        timeout_seconds: of computing, for the program and for its tests. The limit on elapsed time is 6 times as long.
        memory_megabytes: of the program with all processes that it starts, and of its tests.
        num_workers: gradings at a time; the default is one per processor, at most 8. It does not change a verdict.

    Source: the functional correctness of HumanEval (Chen et al. 2021, arXiv 2107.03374), section 2.1. Departure: tests
    run elsewhere than the program, so a change of an argument in place is not seen, and results that are no plain data
    are refused.

    Raises:
        UsageError: the sandbox does not work on this machine; the message names what does.
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
        walls = Walls(choose_sandbox(sandbox), bounds, float(WALL_FACTOR * timeout_seconds))
        outcomes = judge_all(list(asked), walls, num_workers or min(count_cpus(), MAX_WORKERS))
        for (pair, places), outcome in zip(asked.items(), outcomes, strict=True):
            verdicts.update((place, Verdict(outcome, extracted=pair[0])) for place in places)
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
