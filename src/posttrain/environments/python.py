"""Python that runs: each program in a sandbox of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.environments.contract import EnvironmentFailed
from posttrain.errors import RunFailure
from posttrain.graders.sandbox.sandbox import Bounds, Kind, choose_sandbox, run
from posttrain.registry import register

_PROGRAM = "program.py"
_FACTOR = 6  # elapsed time, in units of computing time


@register("environment")
def python(
    *,
    sandbox: Kind | None = None,
    seconds: Annotated[int, Field(ge=1, le=600)] = 5,
    memory_megabytes: Annotated[int, Field(ge=64)] = 512,
    max_output_chars: Annotated[int, Field(ge=100)] = 4000,
) -> Python:
    """A tool ``python`` that runs a program and returns what it prints, and its error, if it ends with one.

    Every call begins anew, in an empty folder (`docs/code.md` says what each sandbox keeps out). A program that takes
    too long is stopped, and the model reads that.

    Args:
        sandbox: ``bubblewrap`` (the default), or ``process``, which hides nothing of this user from the program.
        seconds: of computing; elapsed time may be 6 times as long. ``rollout.tool_seconds`` should be more.
        memory_megabytes: of the program with all processes that it starts.
        max_output_chars: the rest is cut off.

    Raises:
        UsageError: the sandbox does not work on this machine.
    """
    return Python(choose_sandbox(sandbox, "environment.sandbox"), seconds, memory_megabytes, max_output_chars)


class Python:
    """The environment; it has no state."""

    def __init__(self, kind: Kind, seconds: int, memory_megabytes: int, max_chars: int) -> None:
        self._kind: Kind = kind
        self._seconds, self._max_chars = seconds, max_chars
        self._bounds = Bounds(cpu_seconds=seconds, memory_bytes=memory_megabytes * 2**20)

    def reset(self) -> None:
        """Prepare nothing."""

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program.
        """
        try:
            files = {_PROGRAM: code.encode("utf-8", "replace")}
            seconds = float(_FACTOR * self._seconds)
            ended = run([_PROGRAM], files, kind=self._kind, bounds=self._bounds, seconds=seconds)
        except RunFailure as error:
            raise EnvironmentFailed(str(error)) from error
        said, complaint = (text.decode("utf-8", "replace") for text in (ended.stdout, ended.stderr))
        if ended.timed_out or ended.code == 137:
            said += f"\nstopped: it took more than {self._seconds} seconds or more memory than it may have"
        elif ended.code:
            complaint = complaint.strip()[-self._max_chars // 2 :]  # its end says what happened
            said = f"{self._cut(said, self._max_chars - len(complaint))}\n{complaint}"
        return self._cut(said.strip("\n"), self._max_chars) or "(nothing was printed)"

    def _cut(self, text: str, limit: int) -> str:
        return text if len(text) <= limit else f"{text[:limit]} ... (cut off)"
