"""A vLLM server that a run starts, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from posttrain.engines.http import HttpServer, Refused, Unanswered, Unreadable
from posttrain.engines.vllm.command import ServerCommand
from posttrain.errors import RunFailure, UsageError
from posttrain.untrusted import harmless

PYTHON_VARIABLE = "POSTTRAIN_VLLM"
START_SECONDS = 1200.0  # large weights, and compiled kernels the first time
LOOK_SECONDS = 0.2
END_SECONDS = 20.0
# Below what systems give connections that go out (from 32768 or 49152 on), and Kubernetes its services (from 30000 on).
OWN_PORTS = range(20_000, 30_000)
TAIL_BYTES, TAIL_LINES = 8192, 12
# What a launcher of many processes tells each of them about its place, and a server would take for its own.
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# Runs a command for as long as the other end of standard input is open, which the system closes even after kill -9;
# then the command has ten seconds to end, and the whole group of processes ends with it.
_WHILE_OPEN = 'exec 3<&0; "$@" 3<&- & { cat <&3; kill $!; sleep 10; kill -9 0; } & wait %1; kill -9 0'


def interpreter() -> str:
    """Return the Python of the environment that has vLLM. A recipe cannot name it: it would be a program to run.

    Raises:
        UsageError: the environment variable is not set, or names none.
    """
    named = os.environ.get(PYTHON_VARIABLE, "")
    path = shutil.which(named) if named else None
    if path is None:
        stands = f"is {named!r}, which is no program" if named else "is not set"
        raise UsageError(
            f"a run that starts a vLLM server needs the Python that has vLLM, and {PYTHON_VARIABLE} "
            f"{stands}. Install it into an environment of its own and set {PYTHON_VARIABLE}=/that/bin/python, or give "
            "the url of a server that runs (docs/serving.md)"
        )
    return str(Path(path).absolute())  # not resolved: a virtual environment's python is a link out of it


def free_port() -> int:
    """Return a port of this machine at which nothing listens and that the system gives no connection by itself."""
    while True:
        port = secrets.choice(OWN_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class OwnServer:
    """A server process of this one. ``log`` gets what it prints. ``wait`` returns when it answers."""

    def __init__(self, command: ServerCommand, url: str, log: Path) -> None:
        self.url, self.log = url, log
        environment = {k: v for k, v in os.environ.items() if k not in _PLACES and not k.startswith(_PLACE_PREFIXES)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WHILE_OPEN, "sh", *command.words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"VLLM_NO_USAGE_STATS": "1"} | command.environment,
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C in the terminal is not sent to it
            )

    def wait(self) -> None:
        """Wait until the server says that it is well.

        Raises:
            RunFailure: it ended, or took longer than ``START_SECONDS``; with the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        server = HttpServer(self.url, timeout_seconds=5.0, retries=0)
        while self._process.poll() is None:
            with contextlib.suppress(Unanswered, Unreadable, Refused):
                return server.call("GET", "/v1/models", read=lambda answer: None)
            if time.monotonic() > deadline:
                self.stop()
                raise RunFailure(f"the vLLM server was not ready after {START_SECONDS:g} seconds. {self.tail()}")
            time.sleep(LOOK_SECONDS)
        raise RunFailure(f"the vLLM server ended before it was ready. {self.tail()}")

    def stop(self) -> None:
        """End the server and everything that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self) -> str:
        """Return the log's last lines, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        return harmless("\n  ".join([f"Its log {self.log} ends:", *lines[-TAIL_LINES:]]))
