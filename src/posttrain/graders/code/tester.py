"""What runs the tests of a data set, in a sandbox of its own: functions of the program are proxies in here.

A call of a proxy is a message to the other sandbox, and its result plain data; what the program raises is raised here
if it is an ordinary error of Python's own. The verdict is the exit code of this process, out of the program's reach.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from posttrain.graders.code.plain import NoPlainData, decode, encode, receive, seed_if_drawn, send, take_pipes

TESTS = "tests.json"
# Exit codes. Not 0, 1 or 2, with which Python ends by itself. ``BAD``: the tests are wrong by themselves.
RIGHT, WRONG, GONE, BAD = 70, 71, 72, 73
MAX_CALLS = 100_000
# What ends an iteration or a program is no ordinary error: raised in a test, it could end the test early.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration")


class ProgramRaised(Exception):
    """The program raised what is no error of Python's own."""


class ProgramGone(BaseException):
    """The program answers no more; no test can catch this by mistake."""


class BadTests(BaseException):
    """The tests ask for what they cannot have."""


class TestsFailed(Exception):
    """An assertion failed, or anything else was raised."""


class Program:
    """The other side, as functions by name."""

    def __init__(self, calls: int, replies: int) -> None:
        self.calls, self.replies = calls, replies
        self.num_calls = 0

    def greet(self) -> bool:
        """Whether the program could be loaded."""
        message = self._hear()
        return isinstance(message, list) and message[:1] == ["ready"]

    def proxy(self, name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            return self._call(name, arguments, keywords)

        function.__name__ = name
        return function

    def _call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.num_calls += 1
        if self.num_calls > MAX_CALLS:
            raise BadTests(f"more than {MAX_CALLS} calls")
        try:
            send(self.calls, [name, encode(arguments, strict=True), encode(keywords, strict=True)])
        except NoPlainData as error:
            raise BadTests(f"a test hands over what is no plain data: {error}") from None
        except OSError:
            raise ProgramGone from None
        message = self._hear()
        try:
            kind, *content = message
            if kind == "value":
                return decode(content[0])
            name, text = content
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
            raise ProgramGone(f"no answer but {error}") from None
        raise error_of(str(name), str(text))

    def _hear(self) -> Any:
        try:
            return receive(self.replies)
        except (EOFError, ValueError, RecursionError, OSError):
            raise ProgramGone from None


def error_of(name: str, text: str) -> Exception:
    """The error of this name, if it is an ordinary one of Python's own; else one that says so."""
    kind = getattr(builtins, name, None)
    ordinary = isinstance(kind, type) and issubclass(kind, Exception) and name not in _NOT_RAISED
    try:
        return kind(text) if ordinary else ProgramRaised(f"{name}: {text}")  # type: ignore[misc]
    except TypeError:  # one that needs more than a text
        return ProgramRaised(f"{name}: {text}")


def main() -> None:
    """Run the tests and end with the verdict."""
    replies, calls = take_pipes()
    sys.path.remove("")
    code = BAD
    try:
        code = run(Program(calls, replies))
    except ProgramGone:
        code = GONE
    except TestsFailed:
        code = WRONG
    finally:
        os._exit(code)


def run(program: Program) -> int:
    """Define what the tests need, then the proxies, then run the tests.

    Raises:
        ProgramGone, TestsFailed, BadTests: as they say.
    """
    with open(TESTS, encoding="utf-8") as file:
        spec = json.load(file)
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(spec["prelude"], "prelude", "exec"), scope)
    tests = compile(spec["tests"], "tests", "exec")
    if not program.greet():
        return WRONG
    scope.update({name: program.proxy(name) for name in spec["names"]})
    seed_if_drawn(spec["tests"])
    try:
        exec(tests, scope)
    except (ProgramGone, BadTests):
        raise
    except BaseException as error:
        raise TestsFailed from error
    return RIGHT if program.num_calls else BAD
