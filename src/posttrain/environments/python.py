"""Python that runs: each program in a sandbox of its own."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from pydantic import Field

from posttrain.environments.contract import EnvironmentFailed
from posttrain.errors import RunFailure
from posttrain.graders.sandbox.levels import Level, choose_level, open_sandbox
from posttrain.graders.sandbox.sandbox import Bounds, SandboxGone
from posttrain.registry import register

# The same program prints the same: sets are walked in the same order.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
_PROGRAM = "program.py"
_FACTOR = 6  # elapsed time, in units of computing time


@register("environment")
def python(
    *,
    level: Level | None = None,
    image: str | None = None,
    seconds: Annotated[int, Field(ge=1, le=600)] = 5,
    memory_megabytes: Annotated[int, Field(ge=64)] = 512,
    max_output_chars: Annotated[int, Field(ge=100)] = 4000,
) -> Python:
    """A tool ``python`` that runs a program and returns what it prints, and its error, if it ends with one.

    Every call begins anew, in an empty folder, without network (`docs/code.md` says what each level keeps out). A
    program that takes too long is stopped, and the model is told so.

    Args:
        level, image: how strong the walls are; the strongest that the machine has, unless it is said.
        seconds: of computing; elapsed time may be 6 times as long. ``rollout.tool_seconds`` should be more.
        memory_megabytes: of each process.
        max_output_chars: what is beyond is cut off.

    Raises:
        UsageError: this machine has no such level.
    """
    return Python(choose_level(level, image), image, seconds, memory_megabytes, max_output_chars)


class Python:
    """The environment; it holds nothing between calls."""

    def __init__(self, level: Level, image: str | None, seconds: int, memory_megabytes: int, max_chars: int) -> None:
        self._level, self._image, self._seconds, self._max_chars = level, image, seconds, max_chars
        self._bounds = Bounds(cpu_seconds=seconds, memory_bytes=memory_megabytes * 2**20)

    def reset(self) -> None:
        """Nothing to prepare."""

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program.
        """
        try:
            with closing(open_sandbox(self._level, self._bounds, self._image)) as box:
                box.write_file(_PROGRAM, code.encode("utf-8", "replace"))
                ended = box.exec([*box.python, _PROGRAM], env=_ENVIRONMENT, seconds=float(_FACTOR * self._seconds))
        except SandboxGone:
            return "the program ended the process that watches it"
        except RunFailure as error:
            raise EnvironmentFailed(str(error)) from error
        place = getattr(box, "folder", "")  # of a random name, which would make equal programs say different things
        said, complaint = (
            text.decode("utf-8", "replace").replace(place or "\0", "/box") for text in (ended.stdout, ended.stderr)
        )
        if ended.timed_out or ended.exit in (-9, -24):
            said += f"\nstopped: it took more than {self._seconds} seconds or more memory than it may have"
        elif ended.exit:
            complaint = complaint.strip()[-self._max_chars // 2 :]  # its end says what happened
            said = f"{self._cut(said, self._max_chars - len(complaint))}\n{complaint}"
        return self._cut(said.strip("\n"), self._max_chars) or "(nothing was printed)"

    def _cut(self, text: str, limit: int) -> str:
        return text if len(text) <= limit else f"{text[:limit]} ... (cut off)"
