"""Forks a command for every line on the standard input: ``[words behind posttrain, folder, output file]`` as JSON.

Answers with the process id, and with the exit code once it has ended. The trials of a sweep, which
would be new interpreters, are forked from it as well, with what a new process has of its parent: its output, its
process group and the descriptors that are passed on, and nothing else. Their curves are not drawn: that would take
longer than all else that they do, and nobody looks at them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from imported_late import IMPORTED

from posttrain import cli
from posttrain.commands import summary
from posttrain.commands import sweeps as sweep
from posttrain.commands import train as training
from posttrain.commands.evaluate import models as evaluation
from posttrain.reports import sweeps as pages
from posttrain.runs import children
from posttrain.sweeps import plan, report, runner
from posttrain.train import loop

IMPORTED += (sweep, pages, evaluation, training)
IMPORTED += (plan, report, runner, loop)  # before forking, which is the point


class Forked(subprocess.Popen[bytes]):
    """As ``subprocess.Popen`` of ``python -m posttrain.cli``."""

    def __init__(
        self, command: Sequence[str], *, stdout: BinaryIO, env: dict[str, str], pass_fds: Sequence[int], **_: Any
    ) -> None:
        assert command[1:3] == ["-m", "posttrain.cli"]
        self.args, self.returncode, self._waitpid_lock = command, None, _Lock()
        self.stdin = self.stdout = self.stderr = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in pass_fds:
                    close(descriptor)
            work(command[3:], env)

    def __del__(self) -> None:
        """There is nothing to release."""


class _Lock:
    """Of one thread."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        """Nobody waits."""

    def __enter__(self) -> None:
        """Nobody else is there."""

    def __exit__(self, *_: object) -> None:
        """Nobody waits."""


def close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # that of the listing itself
        return


def work(words: Sequence[str], env: dict[str, str]) -> None:
    """The command line, in this process, to its end."""
    os.environ.clear()
    os.environ.update(env)
    code = 1
    try:
        code = cli.main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def draw_nothing(panels: Sequence[Any], title: str, path: str | Path) -> Path:
    """In the place of ``draw_png``."""
    return Path(path)


def main() -> None:
    summary.draw_png = draw_nothing
    children.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    for line in sys.stdin:
        words, folder, output = json.loads(line)
        process = os.fork()
        if process == 0:
            os.chdir(folder)
            target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(target, 1)
            os.dup2(target, 2)
            work(words, dict(os.environ))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


main()
