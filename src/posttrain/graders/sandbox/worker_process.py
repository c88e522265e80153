"""The process of a worker (``workers.WorkerPool``): one function, one item after the other.

This module is all that the process imports besides the function's own module, so it must stay light. Messages are lines
of JSON. From the parent: first the settings (``target`` and ``workers.Limits``), then items. To the parent:
``{"ready": true}`` or ``{"failed": reason}``, then for each item ``{"value": ...}`` or ``{"crash": reason}``;
``"last": true`` says that the process ends with this answer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

try:
    import resource
except ImportError:  # Windows: no limit on memory
    resource = None  # type: ignore[assignment]

MAX_RESULT_BYTES = 65536  # one answer; more is a crash of the item
MAX_REASON_CHARS = 300
STATM = "/proc/self/statm"

# Modules that compile text of their own: Python's while others are imported, sympy's of how many variables there are.
_COMPILERS = frozenset(
    ("collections", "dataclasses", "typing", "_frozen_importlib", "_frozen_importlib_external", "importlib._bootstrap",
     "importlib._bootstrap_external", "sympy.polys.monomials")
)  # fmt: skip
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "tempfile.", "pty.", "ftplib.", "http.", "urllib.", "smtplib.",
            "webbrowser.", "sqlite3.", "pickle.", "ctypes.", "code.__new__")  # fmt: skip
_PERMITTED = ("os.listdir", "os.scandir")  # an import looks for its file
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ItemFailed(Exception):
    """The function raised; the message says what."""


def main() -> None:
    """Serve until the parent closes the pipe."""
    requests, results = _take_pipes()
    with suppress(OSError):  # a parent that is killed meanwhile leaves its empty folder to this process
        os.rmdir(os.getcwd())
    try:
        settings = json.loads(requests.readline() or "null")
        if settings is None:
            return
        module, _, name = settings["target"].partition(":")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        _send(results, {"failed": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]})
        return
    _refuse_effects(settings["compiles"])
    size = _address_space()
    _send(results, {"ready": True})
    for line in requests:
        answer = answer_item(function, json.loads(line), settings)
        if _address_space() - size > settings["memory_bytes"]:
            answer["last"] = True  # what it keeps is as much as one item may use: a new process takes over
        _send(results, answer)
        if "last" in answer:
            return


def answer_item(function: Callable[[Any], Any], item: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """``{"value": ...}`` or ``{"crash": reason}``; under the limits."""
    try:
        value = _call(function, item, settings)
    except ItemFailed as error:
        return {"crash": str(error)}
    except MemoryError:
        return {"crash": "MemoryError: over the memory limit", "last": True}
    except RecursionError:
        return {"crash": "RecursionError: nested too deeply"}
    if len(value) > MAX_RESULT_BYTES:
        return {"crash": f"the result has {len(value)} bytes, more than {MAX_RESULT_BYTES}"}
    return {"value": json.loads(value)}


def _call(function: Callable[[Any], Any], item: Any, settings: dict[str, Any]) -> str:
    """The function's result as JSON. A time limit that is passed ends this process: see ``workers.Limits``."""
    _limit_memory(settings["memory_bytes"])
    _set_timers(settings["cpu_seconds"], settings["wall_seconds"])
    try:
        return json.dumps(function(item))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the function may raise anything; what it was is reported
        raise ItemFailed(f"{type(error).__name__}: {_shown(error)}"[:MAX_REASON_CHARS]) from error
    except SystemExit as error:
        raise ItemFailed("SystemExit") from error
    finally:
        _set_timers(0, 0)
        _limit_memory(None)


def _set_timers(cpu_seconds: float, wall_seconds: float) -> None:
    """Have the kernel end this process; where there are no timers (Windows) the parent does, by elapsed time."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def _shown(error: Exception) -> str:
    """The first argument if it is text: asking any other object to show itself may take for ever."""
    first = error.args[0] if error.args else ""
    return first if isinstance(first, str) else ""


def _take_pipes() -> tuple[IO[bytes], int]:
    """Move the two pipes away from standard input and output, where a library might read or print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    if hasattr(signal, "setitimer"):
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, results = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    return requests, results


def _limit_memory(num_bytes: int | None) -> None:
    """Let the address space grow by ``num_bytes`` from here; None lifts the limit."""
    if resource is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    size = _address_space()
    if num_bytes is not None and size:
        soft = size + num_bytes if hard == resource.RLIM_INFINITY else min(size + num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes of address space of this process; 0 where the system does not say (there is no memory limit then)."""
    try:
        with open(STATM, "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _refuse_effects(compiles: bool) -> None:
    """From here on nothing is executed as code that was not a file before, and nothing is written or started.

    Answers are data. They are read by a grammar and never evaluated; this holds the line once more, also for what
    a library might do with them. Where the function ``compiles`` text, what it runs still has none of these effects,
    and reads no files but those that an import could. It is no sandbox against machine code.
    """
    readable = tuple(os.path.realpath(place) + os.sep for place in (*sys.path, sys.prefix, sys.base_prefix))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile":
            if not compiles and sys._getframe(1).f_globals.get("__name__") not in _COMPILERS:
                raise PermissionError("a worker compiles no text")
        elif event == "open":
            if _opens_to_write(arguments):
                raise PermissionError("a worker writes no files")
            path = arguments[0]
            named = compiles and isinstance(path, str | bytes) and path != STATM
            if named and not os.path.realpath(os.fsdecode(path)).startswith(readable):
                raise PermissionError("a worker reads no files but Python's")
        elif event.startswith(_REFUSED) and event not in _PERMITTED:
            raise PermissionError(f"a worker does no {event}")

    sys.addaudithook(check)


def _opens_to_write(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & _WRITES)


def _send(results: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(results, data) :]
    except BrokenPipeError:
        os._exit(0)  # the parent is gone
