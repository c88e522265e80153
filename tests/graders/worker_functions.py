"""Functions that the workers under test run; each misbehaves in one way."""

from __future__ import annotations

import faulthandler
import os
import socket
import subprocess
import sys
import time
from typing import Any

KEPT: list[bytearray] = []


def answer(item: list[Any]) -> Any:
    """``[what to do, argument]``."""
    kind, argument = item
    return BEHAVIOURS[kind](argument)


def _spin(_: Any) -> None:
    while True:
        pass


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def _raise(text: str) -> None:
    raise KeyError(text)


def _leave(code: int) -> None:
    raise SystemExit(code)


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def _keep(num_bytes: int) -> int:
    KEPT.append(bytearray(num_bytes))
    return os.getpid()


def _print(text: str) -> int:
    print(text * 100_000)
    print(text * 100_000, file=sys.stderr)
    return len(sys.stdin.read())


def _close_everything(_: Any) -> None:
    os.closerange(3, 64)


def _write_nonsense(text: str, times: int = 100) -> None:
    for descriptor in range(3, 12):
        try:
            os.write(descriptor, text.encode() * times)
        except OSError:
            continue


def _facts(_: Any) -> list[Any]:
    heavy = {"torch", "sympy", "pydantic", "numpy", "yaml"} & set(sys.modules)
    return [sorted(heavy), hash("one"), os.environ["PYTHONHASHSEED"], os.getsid(0) == os.getpid()]


def _surroundings(_: Any) -> list[Any]:
    return [dict(os.environ), os.getcwd(), [place for place in sys.path if not os.path.isabs(place)]]


BEHAVIOURS: dict[str, Any] = {
    "echo": lambda value: value,
    "length": len,
    "repeat": lambda count: "x" * count,
    "pid": lambda _: os.getpid(),
    "spin": _spin,
    "multiply": lambda _: (9**9**9) % 7,  # one call of machine code that no signal handler of Python's interrupts
    "sleep": _sleep,
    "allocate": lambda count: len(bytearray(count)),
    "keep": _keep,
    "recurse": _recurse,
    "raise": _raise,
    "leave": _leave,
    "leave at once": os._exit,
    "fault": lambda _: faulthandler._sigsegv(),  # type: ignore[attr-defined]
    "no json": lambda _: {1, 2},
    "nan": lambda _: [float("nan")],
    "print": _print,
    "close": _close_everything,
    "nonsense": _write_nonsense,
    "say once": lambda text: _write_nonsense(text, 1),
    "facts": _facts,
    "surroundings": _surroundings,
    "system": lambda path: os.system(f"touch {path}"),
    "start": lambda path: subprocess.run(["touch", path], check=False).returncode,
    "open": lambda path: open(path, "w").close(),
    "low open": lambda path: os.open(path, os.O_WRONLY | os.O_CREAT),
    "remove": os.remove,
    "connect": lambda _: socket.create_connection(("127.0.0.1", 9), timeout=1),
    "eval": lambda text: eval(text),
    "exec": lambda text: exec(text),
    "compile": lambda text: compile(text, "<string>", "exec") and None,
}


def answer_as_number(item: list[Any]) -> Any:
    """``[what to do, a number as text]``."""
    kind, argument = item
    number = float(argument)
    return answer([kind, int(number) if kind in ("allocate", "leave", "recurse") else number])
