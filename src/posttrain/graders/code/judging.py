"""Judge programs with two sandboxes connected by pipes: one for the program, one for tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import RunFailure
from posttrain.graders.code.exchange import BAD, GONE, RIGHT, SOLUTION, WRONG, send
from posttrain.graders.grading import Outcome
from posttrain.graders.sandbox.sandbox import Bounds, Program, SandboxKind

EXCHANGE = Path(__file__).with_name("exchange.py").read_bytes()


@dataclass(frozen=True, slots=True)
class Checks:
    """Test code that calls ``names``, following ``prelude``, which defines helpers."""

    names: tuple[str, ...]
    tests: str
    prelude: str = ""


@dataclass(frozen=True, slots=True)
class Walls:
    """The sandbox of programs and tests, as ``choose_sandbox`` gave it, and their limits."""

    kind: SandboxKind
    bounds: Bounds
    seconds: float


def judge_all(submissions: Sequence[tuple[str, Checks]], walls: Walls, num_workers: int) -> list[Outcome]:
    """Judge programs against their tests, ``num_workers`` at a time. Outcomes keep the input order.

    Raises:
        RunFailure: a sandbox could not be started.
    """
    with ThreadPoolExecutor(max(1, min(num_workers, len(submissions)))) as pool:
        return list(pool.map(lambda pair: judge_program(pair[0], pair[1], walls), submissions))


def judge_program(program: str, checks: Checks, walls: Walls) -> Outcome:
    """Judge one program: ``right``, ``wrong``, ``timeout``, ``crash`` (the program exited) or ``ungraded`` (invalid
    tests).

    Tests are sent through a socket to a process with unreadable memory. They are never written to disk, and the
    program starts only afterwards.

    Raises:
        RunFailure: a sandbox could not be started.
    """
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        (hear_calls, speak_calls) = os.pipe()
        (hear_replies, speak_replies) = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        opened = [hear_calls, speak_calls, hear_replies, speak_replies, nowhere]
        exchange = {"exchange.py": EXCHANGE}
        limits = (walls.kind, walls.bounds, walls.seconds)
        try:
            channel = theirs.fileno()
            boot = ["-c", f"import exchange as tester; tester.test({channel})"]
            tester = Program(boot, exchange, (hear_replies, speak_calls, nowhere), *limits, inherited=channel)
            theirs.close()
            ours.settimeout(walls.seconds)
            with suppress(OSError):  # exited or timed out
                if ours.recv(1):
                    send(ours.fileno(), asdict(checks))
            boot = ["-c", "import exchange; exchange.answer()"]
            files = exchange | {SOLUTION: program.encode("utf-8", errors="replace")}
            candidate = Program(boot, files, (hear_calls, speak_replies, nowhere), *limits)
        finally:
            theirs.close()
            for descriptor in opened:
                os.close(descriptor)
        ended = tester.wait()
        has_kept = (ended is not None and ended.code == GONE) or candidate.end()
        other = candidate.wait()
    if ended is None or (other is None and ended.code == GONE):
        raise RunFailure("bubblewrap could not set up a sandbox")
    if ended.timed_out or (ended.code == GONE and other is not None and other.timed_out):
        return "timeout"
    outcomes: dict[int, Outcome] = {RIGHT: "right", WRONG: "wrong", BAD: "ungraded"}
    if has_kept:
        return outcomes.get(ended.code, "crash")
    return "crash"
