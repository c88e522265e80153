"""Protocol between two sandboxes: a program answering calls, and tests making them.

Imports only Python's standard library, since this file gets copied into both sandboxes. Messages are length-prefixed
JSON. Values travel as plain data and get rebuilt by the receiver, so tests never touch objects owned by the program.

The program's side first writes ``["ready"]`` or ``["failed", type, text]``. For each call ``[name, arguments,
keywords]`` it then writes ``["value", value]`` or ``["raised", type, text]``. Tests report their verdict through their
exit code.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

SOLUTION = "solution.py"
# Exit codes used by tests. Avoids 0, 1 and 2, which Python itself uses. ``BAD`` means invalid tests.
RIGHT = 70
WRONG = 71
GONE = 72
BAD = 73
HEADER = struct.Struct(">I")
MAX_BYTES = 4 * 2**20  # per message
MAX_ITEMS = 1_000_000  # of a generator
MAX_CALLS = 100_000
MAX_TEXT = 200
_EXACT = 2**53  # smaller integers are sent unchanged
# Exceptions that end an iteration or a process must not propagate: raised inside a test, they could end it early.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration")
_CONTAINERS: tuple[tuple[str, Any], ...] = (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset))
_OF_ITEMS = {"list", "tuple", "set", "frozenset", "iterator", "keys"}
_WRITE: dict[Any, Callable[[Any], Any]] = {  # codes for values without contents
    str: str.__str__,
    float: lambda value: ["float", float.hex(value)],
    complex: lambda value: ["complex", [float.hex(value.real), float.hex(value.imag)]],
    (bytes, bytearray): lambda value: ["bytes", bytes(value).hex()],
    range: lambda value: ["range", [encode(value.start), encode(value.stop), encode(value.step)]],
}
_KEYS: Any = type({}.keys())
_MAKE: dict[str, Callable[[Any], Any]] = {  # values from their codes; containers from a list of values
    **dict(_CONTAINERS),
    "iterator": iter,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "int": lambda content: int(content, 16),
    "float": float.fromhex,
    "complex": lambda content: complex(float.fromhex(content[0]), float.fromhex(content[1])),
    "bytes": bytes.fromhex,
    "other": lambda content: Other(content is True),
    "range": lambda content: range(*(decode(item) for item in content)),
    "dict": lambda content: {decode(key): decode(item) for key, item in content},
}


class NoPlainData(TypeError):
    """A value that cannot be transferred."""


class ProgramRaised(Exception):
    """The program raised an exception that is not built into Python."""


class Ended(BaseException):
    """Carries the verdict as an exit code. A BaseException, so that tests cannot catch it by accident."""


class Other:
    """Placeholder for values of unsupported types: equal only to itself, with the original truth value."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth


def encode(value: object, *, strict: bool = False) -> Any:
    """Encode a value for JSON, either unchanged or as ``[kind, content]``.

    Subclasses of built-in types (``Counter``, named tuples) become their base type, generators become iterators, and
    anything else keeps only its truth value.

    Raises:
        NoPlainData: unsupported type, if ``strict``.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        if -_EXACT < number < _EXACT:
            return number
        return ["int", hex(number)]
    for plain, write in _WRITE.items():
        if isinstance(value, plain):
            return write(value)
    if isinstance(value, dict):
        return ["dict", [[encode(key, strict=strict), encode(item, strict=strict)] for key, item in value.items()]]
    for name, kind in (*_CONTAINERS, ("keys", _KEYS), ("iterator", Iterator)):
        if isinstance(value, kind):
            return [name, [encode(item, strict=strict) for item in islice(value, MAX_ITEMS)]]
    if strict:
        raise NoPlainData(f"{type(value).__name__} is no plain data")
    return ["other", bool(value)]


def decode(code: Any) -> Any:
    """Decode a value into built-in Python types.

    Raises:
        ValueError, TypeError, KeyError: input was not produced by ``encode``.
    """
    if code is None or isinstance(code, bool | str | int):
        return code
    kind, content = code
    if kind in _OF_ITEMS:
        content = [decode(item) for item in content]
    return _MAKE[kind](content)


def send(descriptor: int, message: object) -> None:
    """Write a message.

    Raises:
        NoPlainData: longer than ``MAX_BYTES``.
        OSError: the receiver is gone.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise NoPlainData(f"{len(body)} bytes, more than {MAX_BYTES}")
    parts = memoryview(HEADER.pack(len(body)) + body)
    while parts:
        parts = parts[os.write(descriptor, parts) :]


def receive(descriptor: int) -> Any:
    """Read a message.

    Raises:
        EOFError: no messages left.
        ValueError: too long, or invalid JSON.
    """
    (size,) = HEADER.unpack(_read(descriptor, HEADER.size))
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
    return json.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 65536))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _take_pipes() -> tuple[int, int]:
    """Move stdin and stdout to private descriptors, so that other code cannot read or write them."""
    reading = os.dup(0)
    writing = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.path.remove("")
    return reading, writing


def _seed_if_used(source: str) -> None:
    """Seed ``random`` if used, for reproducible verdicts. Importing it takes milliseconds."""
    if "random" in source:
        import random

        random.seed(0)


class RaisedInProgram(Exception):
    """The program raised an exception; holds its type and message."""


def answer() -> None:
    """Run the program's side: load it, then answer calls until the channel closes."""
    calls, replies = _take_pipes()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load() -> list[Any]:
        with open(SOLUTION, encoding="utf-8") as file:
            source = file.read()
        _seed_if_used(source)
        exec(compile(source, SOLUTION, "exec"), module.__dict__)
        return ["ready"]

    def call(name: str, arguments: object, keywords: object) -> list[Any]:
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return ["value", encode(module.__dict__[name](*decode(arguments), **decode(keywords)))]

    try:
        send(replies, _guarded(load))
    except RaisedInProgram as error:
        send(replies, ["failed", *error.args])
        return
    while True:
        try:
            message = _guarded(call, *receive(calls))
        except EOFError:
            return
        except RaisedInProgram as error:
            message = ["raised", *error.args]
        try:
            send(replies, message)
        except NoPlainData as error:
            send(replies, ["raised", "TypeError", str(error)])


def _guarded(function: Callable[..., list[Any]], *arguments: object) -> list[Any]:
    """Call a function that runs program code."""
    try:
        return function(*arguments)
    except BaseException as error:
        raise RaisedInProgram(*_shown(error)) from error


def _shown(error: BaseException) -> tuple[str, str]:
    """Describe an exception by type and first string argument. Formatting arbitrary objects could hang."""
    text = ""
    if error.args and isinstance(error.args[0], str):
        text = error.args[0]
    return type(error).__name__[:MAX_TEXT], text[:MAX_TEXT]


def test(channel: int) -> None:
    """Run the tests' side: read tests from ``channel``, run them against the program's functions, exit with a verdict.

    Tests arrive only once this process has made its memory unreadable to others.
    """
    import ctypes

    replies, calls = _take_pipes()
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: block tracing by processes of the same user
    if os.path.exists("/proc/self/status"):  # outside bubblewrap, which already hides other processes
        with open("/proc/self/status", encoding="ascii") as file:
            if "TracerPid:\t0\n" not in file.read():  # one traces already
                os._exit(1)
    os.write(channel, b"1")
    spec = receive(channel)
    os.close(channel)
    code = BAD
    try:
        code = _run(spec, calls, replies)
    except Ended as end:
        code = end.args[0]
    finally:
        os._exit(code)


def _run(spec: dict[str, Any], calls: int, replies: int) -> int:
    """Define the prelude, then stubs for program functions, then run tests."""
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(spec["prelude"], "prelude", "exec"), scope)
    tests = compile(spec["tests"], "tests", "exec")
    first = _hear(replies)
    if not isinstance(first, list) or first[:1] != ["ready"]:
        return WRONG
    num_calls = 0

    def function_of(name: str) -> Callable[..., Any]:
        def function(*arguments: object, **keywords: object) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > MAX_CALLS:
                raise Ended(BAD)
            return _ask(calls, replies, [name, arguments, keywords])

        function.__name__ = name
        return function

    scope.update({name: function_of(name) for name in spec["names"]})
    _seed_if_used(spec["tests"])
    try:
        exec(tests, scope)
    except Ended:
        raise
    except BaseException as error:  # an assertion failed, or anything else was raised
        raise Ended(WRONG) from error
    if num_calls:
        return RIGHT
    return BAD


def _ask(calls: int, replies: int, call: list[Any]) -> Any:
    """Call a program function, re-raising any exception."""
    name, arguments, keywords = call
    try:
        send(calls, [name, encode(arguments, strict=True), encode(keywords, strict=True)])
    except NoPlainData:
        raise Ended(BAD) from None
    except OSError:
        raise Ended(GONE) from None
    message = _hear(replies)
    try:
        kind, *content = message
        if kind == "value":
            return decode(content[0])
        name, text = content
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        raise Ended(GONE) from None
    raise error_of(str(name), str(text))


def _hear(replies: int) -> Any:
    try:
        return receive(replies)
    except (EOFError, ValueError, RecursionError, OSError):
        raise Ended(GONE) from None


def error_of(name: str, text: str) -> Exception:
    """Look up an ordinary built-in exception by name; falls back to ``ProgramRaised``."""
    kind = getattr(builtins, name, None)
    other = ProgramRaised(f"{name}: {text}")
    if not isinstance(kind, type) or not issubclass(kind, Exception) or name in _NOT_RAISED:
        return other
    try:
        return kind(text)
    except TypeError:  # requires multiple arguments
        return other
