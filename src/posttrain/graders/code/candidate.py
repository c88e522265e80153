"""What runs a model's program, in the sandbox of the program: it answers calls of its functions, and knows no test.

Nothing here is to be trusted once the program has begun: it may change this module as it likes. All that it can do with
that is answer calls. Messages: first ``["ready"]`` or ``["failed", type, text]``; then for each ``[name, arguments,
keywords]`` one ``["value", value]`` or ``["raised", type, text]``.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from posttrain.graders.code.plain import NoPlainData, decode, encode, receive, seed_if_drawn, send, take_pipes

SOLUTION = "solution.py"
MAX_TEXT = 200


class Refused(Exception):
    """The program, or a call of it, raised: the type and the text of what."""


def main() -> None:
    """Load the program and answer until nobody calls."""
    calls, replies = take_pipes()
    sys.path.remove("")
    try:
        module = load(SOLUTION)
    except Refused as error:
        send(replies, ["failed", *error.args])
        return
    send(replies, ["ready"])
    while True:
        try:
            name, arguments, keywords = receive(calls)
        except EOFError:
            return
        try:
            message = ["value", call(module, name, decode(arguments), decode(keywords))]
        except Refused as error:
            message = ["raised", *error.args]
        try:
            send(replies, message)
        except NoPlainData as error:
            send(replies, ["raised", "TypeError", str(error)])


def load(path: str) -> types.ModuleType:
    """The program as a module, which is not ``__main__``.

    Raises:
        Refused: it cannot be compiled, or raised while it was loaded.
    """
    with open(path, encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    seed_if_drawn(source)
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:
        raise Refused(*_shown(error)) from error
    return module


def call(module: types.ModuleType, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The result of one call, encoded.

    Raises:
        Refused: the program has no such function, raised, or gave what is no plain data.
    """
    try:
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return encode(module.__dict__[name](*arguments, **keywords))
    except BaseException as error:
        raise Refused(*_shown(error)) from error


def _shown(error: BaseException) -> tuple[str, str]:
    """Type and first argument if it is text: asking any other object to show itself may take for ever."""
    first = error.args[0] if error.args else ""
    return type(error).__name__[:MAX_TEXT], first[:MAX_TEXT] if isinstance(first, str) else ""
