"""Code grading: a program is correct if it passes its tests, run in a separate sandbox."""

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

# Locates programs in answers, using text rules only. Nothing written by a model is parsed or compiled here.

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_DEFINITION = r"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*="
MAX_CHARS = 100_000
MAX_WORKERS = 8
WALL_FACTOR = 6  # wall-clock limit per grading, as a multiple of CPU time


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """List (lowercase language, content) for complete fenced blocks, in order. Linear time."""
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
    """Extract the program from a completion, or None.

    Ignores thinking. Prefers the last complete Python block defining one of ``names``, then simply the last one.
    Without blocks, uses the whole text if it defines one of ``names`` or continues the body begun by ``prefix``
    (``goes_on``), cut where that body ends. ``prefix`` is prepended.
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
    """Find the last complete fenced Python block following the thinking, or None."""
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
    """Correct if the program passes all tests.

    ``right = 1[every assertion of the tests holds]``. Takes the last fenced Python block that defines the requested
    function, else the last block, else the text itself if it is code, prefixed by the head given in the problem.
    ``meta["tests"]`` holds test ``code``, the ``names`` it calls, a ``prelude``, the head as ``prefix``, and
    ``goes_on`` (the model was asked to continue from that head).

    The program runs in its own sandbox and answers calls; tests run in another one and see results as plain data.
    Programs therefore never see their tests and cannot forge a verdict by changing, printing or killing anything.
    Hanging programs give ``timeout``, programs that exit give ``crash``.

    Args:
        sandbox: ``bubblewrap`` (default), or ``process``, which does not hide this user's files from the program.
        timeout_seconds: CPU time limit, for program and tests each. The wall-clock limit is 6 times higher.
        memory_megabytes: memory limit, for the program including its subprocesses and for tests.
        num_workers: parallel gradings; defaults to one per processor, at most 8. Verdicts do not depend on it.

    Source: functional correctness in HumanEval (Chen et al. 2021, arXiv 2107.03374), section 2.1. Departure: in-place
    changes to arguments are not visible, and results that are not plain data are rejected.

    Raises:
        UsageError: the sandbox does not work on this machine. The message lists working ones.
        RunFailure: a sandbox could not be started.
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
