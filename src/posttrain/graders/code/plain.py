"""Plain data as bytes: what a test may hand to a program, and what comes back. Nothing else passes.

Both sides run in sandboxes, without this package: only the standard library is imported. What is decoded is made of
Python's own types whatever the sender is, so that no object of a program (one that equals everything, say) reaches its
tests. A message is JSON with a length in front.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

HEADER = struct.Struct(">I")
MAX_BYTES = 4 * 2**20  # of one message
MAX_ITEMS = 1_000_000  # of a generator
_EXACT = 2**53  # smaller integers stand as they are

_CONTAINERS: tuple[tuple[str, Any], ...] = (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset))
_KEYS: Any = type({}.keys())
_MAKE: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "keys": lambda items: dict.fromkeys(items).keys(),
}


def take_pipes() -> tuple[int, int]:
    """Keep standard input and output as descriptors of ours, and let nothing else of this process read or write."""
    reading, writing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    return reading, writing


class NoPlainData(TypeError):
    """A value that cannot be handed over."""


class Other:
    """What stands for a value of any other type: it equals only itself, and is true if the value was."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth


def encode(value: Any, *, strict: bool = False) -> Any:
    """The value as JSON can hold it: itself, or ``[kind, content]``.

    Subclasses of Python's types (a ``Counter``, a named tuple) become these types, generators and the like iterators;
    of any other value only its truth is said.

    Raises:
        NoPlainData: a value of another type, where ``strict``.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_EXACT < number < _EXACT else ["int", hex(number)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", [encode(value.start), encode(value.stop), encode(value.step)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, strict=strict), encode(item, strict=strict)] for key, item in value.items()]]
    for name, kind in _CONTAINERS:
        if isinstance(value, kind):
            return [name, _encode_all(value, strict)]
    if isinstance(value, _KEYS):
        return ["keys", _encode_all(value, strict)]
    if isinstance(value, Iterator):
        return ["iterator", _encode_all(value, strict)]
    if strict:
        raise NoPlainData(f"{type(value).__name__} is no plain data")
    return ["other", bool(value)]


def _encode_all(items: Iterable[Any], strict: bool) -> list[Any]:
    return [encode(item, strict=strict) for item in islice(items, MAX_ITEMS)]


def decode(code: Any) -> Any:
    """The value, of Python's own types.

    Raises:
        ValueError, TypeError: nothing that ``encode`` writes.
    """
    if code is None or isinstance(code, bool | str | int):
        return code
    kind, content = code
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "other":
        return Other(content is True)
    if kind == "range":
        return range(*(decode(item) for item in content))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return _MAKE[kind]([decode(item) for item in content])


def seed_if_drawn(source: str) -> None:
    """Whoever draws random numbers draws the same again: so is the verdict. Importing ``random`` takes milliseconds."""
    if "random" in source:
        import random

        random.seed(0)


def send(descriptor: int, message: Any) -> None:
    """Write one message.

    Raises:
        NoPlainData: it is longer than ``MAX_BYTES``.
        OSError: the other side is gone.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise NoPlainData(f"{len(body)} bytes, more than {MAX_BYTES}")
    parts = memoryview(HEADER.pack(len(body)) + body)
    while parts:
        parts = parts[os.write(descriptor, parts) :]


def receive(descriptor: int) -> Any:
    """The next message.

    Raises:
        EOFError: there is none any more.
        ValueError: it is too long, or no JSON.
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
