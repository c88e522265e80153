"""A vLLM server that a run starts, watches and ends."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.engines.vllm import keeper
from posttrain.engines.vllm.command import ServerCommand
from posttrain.errors import RunFailure, UsageError
from posttrain.untrusted import harmless

PYTHON_VARIABLE = "POSTTRAIN_VLLM"
START_SECONDS = 1200.0  # large weights, and compiled kernels the first time
LOOK_SECONDS = 0.2
END_SECONDS = keeper.GRACE_SECONDS + 10.0
PORT_SECONDS = keeper.GRACE_SECONDS + 2.0
# Below what systems give connections that go out (from 32768 or 49152 on), and Kubernetes its services (from 30000 on).
OWN_PORTS = range(20_000, 30_000)
TAIL_BYTES, TAIL_LINES = 8192, 12
# NVIDIA's driver has a folder for each GPU; which of them a process sees is the business of these variables.
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# What a launcher of many processes tells each of them about its place, and a server would take for its own.
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def interpreter() -> str:
    """The Python of the environment that has vLLM. A recipe cannot name it: it would be a program to run.

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


def free_port(wanted: int, address: str = "127.0.0.1", where: str = "engine") -> int:
    """``wanted``, or one that is free (0), of an address of this machine.

    The server of a process that was killed ends a little later than that, so one is waited for ``PORT_SECONDS``. It
    listens long after it was given a port: one that the system hands out itself another program's connection may get.

    Raises:
        UsageError: something else listens there.
    """
    deadline = time.monotonic() + PORT_SECONDS
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        port = wanted or secrets.choice(OWN_PORTS)
        try:
            with socket.create_server((address, port), family=family):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UsageError(
                    f"{where}.port: {port} cannot be had ({error.strerror}); give another one, or 0 for any free one"
                ) from None
        if wanted:
            time.sleep(LOOK_SECONDS)


def check_gpus(wanted: Sequence[int], where: str = "engine") -> None:
    """That this machine has these GPUs, before a server that is started on them finds out in a minute.

    NVIDIA's driver lists them all, whatever ``CUDA_VISIBLE_DEVICES`` leaves to this process; where it says nothing,
    torch counts, unless such a variable hides some from it, too.

    Raises:
        UsageError: one is not there.
    """
    listed = len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0
    if not wanted or (not listed and any(os.environ.get(name) is not None for name in HIDING)):
        return
    there = listed or torch.cuda.device_count()
    if missing := [gpu for gpu in wanted if gpu >= there]:
        has = f"its {there} have the numbers 0 to {there - 1}" if there else "it has none that CUDA sees"
        raise UsageError(f"{where}.gpus: {list(wanted)}: this machine has no GPU {missing[0]}; {has}")


class OwnServer:
    """A server process behind a keeper (``keeper.py``), so that it ends with this process, however that ends.

    ``log`` gets what it prints. ``start`` returns at once; ``wait`` when it answers.
    """

    def __init__(self, command: ServerCommand, url: str, log: Path) -> None:
        self.command, self.url, self.log = command, url, log
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the keeper, while it runs."""
        return self._keeper.pid if self._keeper is not None and self._keeper.poll() is None else None

    def start(self) -> None:
        """Start the process; what one before it printed stays in the log."""
        environment = {k: v for k, v in os.environ.items() if k not in _PLACES and not k.startswith(_PLACE_PREFIXES)}
        environment |= {"VLLM_NO_USAGE_STATS": "1"} | self.command.environment
        with self.log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, *self.command.words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.log.parent,
                start_new_session=True,  # Ctrl-C in the terminal is not sent to it
            )

    def wait(self) -> None:
        """Until the server says that it is well.

        Raises:
            RunFailure: it ended, or took longer than ``START_SECONDS``; with the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        while True:
            if self.pid is None:
                raise RunFailure(f"the vLLM server ended before it was ready. {self.tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError, http.client.HTTPException):
                opener.open(f"{self.url}/health", timeout=5).close()
                return
            if time.monotonic() > deadline:
                self.stop()
                raise RunFailure(f"the vLLM server was not ready after {START_SECONDS:g} seconds. {self.tail()}")
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End the server and everything that it started."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()  # the keeper's sign to end the server
        try:
            self._keeper.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()
        self._keeper = None

    def tail(self) -> str:
        """The log's last lines, to stand in a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        if not lines:
            return f"Its log {self.log} is empty"
        return harmless("\n  ".join([f"Its log {self.log} ends:", *lines[-TAIL_LINES:]]))
