"""Worker process (``workers.WorkerPool``): runs a single function on successive items.

Imports this module and the target's, so keep this one light. Messages are JSON lines. The parent sends settings first
(``target``, ``max_result_bytes`` and ``workers.Limits``), then items. Replies are ``{"ready": true}`` or
``{"failed": reason}``, then per item ``{"value": ...}`` or ``{"crash": reason}``. ``"last": true`` announces that this
process exits after replying.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

try:
    import resource
except ImportError:  # Windows, where this is read and never run
    resource = None  # type: ignore[assignment]

MAX_REASON_CHARS = 300
STATM = "/proc/self/statm"

# Modules that compile text by design: Python's import machinery, and sympy depending on variable counts.
_COMPILERS = frozenset(
    ("collections", "dataclasses", "typing", "_frozen_importlib", "_frozen_importlib_external", "importlib._bootstrap",
     "importlib._bootstrap_external", "sympy.polys.monomials")
)  # fmt: skip
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "tempfile.", "pty.", "ftplib.", "http.", "urllib.", "smtplib.",
            "webbrowser.", "sqlite3.", "pickle.", "ctypes.", "code.__new__")  # fmt: skip
_PERMITTED = ("os.listdir", "os.scandir")  # imports look for their files
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Serve until the parent closes the channel."""
    requests, results = _take_channel()
    settings = json.loads(requests.readline() or "null")
    if settings is None:
        return
    try:
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
            answer["last"] = True  # retained memory reached an item's limit: a fresh process takes over
        _send(results, answer)
        if "last" in answer:
            return


def answer_item(function: Callable[[Any], Any], item: object, settings: dict[str, Any]) -> dict[str, Any]:
    """Process an item and build its reply. Exceeding a time limit kills this process: see ``workers.Limits``."""
    _limit_memory(settings["memory_bytes"])
    _set_timers(settings["cpu_seconds"], settings["wall_seconds"])
    try:
        value = json.dumps(function(item))
    except MemoryError:
        return {"crash": "MemoryError: over the memory limit", "last": True}
    except RecursionError:
        return {"crash": "RecursionError: nested too deeply"}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raised is reported
        return {"crash": f"{type(error).__name__}: {_error_text(error)}"[:MAX_REASON_CHARS]}
    finally:
        _set_timers(0, 0)
        _limit_memory(None)
    if len(value) > settings["max_result_bytes"]:
        return {"crash": f"the result has {len(value)} bytes, more than {settings['max_result_bytes']}"}
    return {"value": json.loads(value)}


def _error_text(error: BaseException) -> str:
    """First argument of an error, if it is a string. Formatting arbitrary objects could hang."""
    if error.args and isinstance(error.args[0], str):
        return error.args[0]
    return ""


def _set_timers(cpu_seconds: float, wall_seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def _take_channel() -> tuple[IO[bytes], int]:
    """Move the channel off stdin, where libraries might read. Returns request and reply streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the channel
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(0)
    os.dup2(1, 0)
    return requests, results


def _limit_memory(num_bytes: int | None) -> None:
    """Limit further address space growth to ``num_bytes``; None lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    size = _address_space()
    if num_bytes is not None and size:
        if hard == resource.RLIM_INFINITY:
            soft = size + num_bytes
        else:
            soft = min(size + num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Address space in bytes; 0 if unknown (then no memory limit applies)."""
    try:
        with open(STATM, "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _refuse_effects(compiles: bool) -> None:
    """From now on, refuse to execute text as code, to write files and to start processes.

    If the function ``compiles`` text, compiled code has the same restrictions and may only read files an import could
    read. Not a sandbox against machine code.
    """
    readable = tuple(os.path.realpath(place) + os.sep for place in (*sys.path, sys.prefix, sys.base_prefix))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile":
            if not compiles and sys._getframe(1).f_globals.get("__name__") not in _COMPILERS:
                raise PermissionError("a worker compiles no text")
        elif event == "open":
            path, mode, flags = arguments[:3]
            if _writes(mode, flags):
                raise PermissionError("a worker writes no files")
            named = compiles and isinstance(path, str | bytes) and path != STATM
            if named and not os.path.realpath(os.fsdecode(path)).startswith(readable):
                raise PermissionError("a worker reads no files but Python's")
        elif event.startswith(_REFUSED) and event not in _PERMITTED:
            raise PermissionError(f"a worker does no {event}")

    sys.addaudithook(check)


def _writes(mode: object, flags: object) -> bool:
    """Check if opening a file with this mode (``open``) or these flags (``os.open``) allows writing."""
    if isinstance(mode, str):
        return not set("wax+").isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & _WRITES)


def _send(results: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(results, data) :]
    except ConnectionError:
        os._exit(0)  # the parent is gone
