"""A sandbox: a place in which a program of a stranger runs, with four things that can be done with it.

``exec`` runs a program to its end, ``write_file`` and ``read_file`` move files in and out of its working folder, and
``close`` ends all that runs in it. ``start`` is what ``exec`` is made of: it connects the program to descriptors of the
caller's. ``levels.open_sandbox`` chooses how strong the walls are.
"""

from __future__ import annotations

import atexit
import base64
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from posttrain.errors import RunFailure
from posttrain.graders.sandbox.supervisor import receive, send

GRACE_SECONDS = 10.0  # in which a supervisor answers; a loaded machine needs a part of it
START_SECONDS = 120.0
READ_BYTES = 65536
MAX_FILE_BYTES = 16 * 2**20
_FOR_THE_LOADER = ("LD_LIBRARY_PATH", "PYTHONHOME")
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from posttrain.graders.sandbox.supervisor import main; main()"


class SandboxGone(RunFailure):
    """A sandbox was set up and is there no more: at the level ``process`` a program can end its own supervisor."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a program may use; each is the kernel's own limit.

    ``cpu_seconds``: of computing, per process. ``memory_bytes``: address space, per process. ``processes``: and
    threads, at a time. ``file_bytes``: of one file. ``disk_bytes``: of all files (not at the level ``process``).
    ``open_files``: per process. ``output_bytes``: of standard output and of standard error; what is beyond is read
    and thrown away.
    """

    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    file_bytes: int = 16 * 2**20
    disk_bytes: int = 32 * 2**20
    open_files: int = 64
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code, negative for a signal; whether time was up; its seconds of computing.

    ``left`` counts processes that could not be killed, which is possible at the level ``process`` only.
    """

    code: int
    timed_out: bool
    cpu_seconds: float = 0.0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """What ``exec`` gives: the output, bounded (``truncated`` says that there was more), and the end."""

    stdout: bytes
    stderr: bytes
    exit: int
    timed_out: bool
    truncated: bool = False


class Sandbox(ABC):
    """One sandbox, also as a context; used by one thread, for one program at a time.

    ``python`` is the interpreter inside. ``exec`` is made of ``start`` and ``wait``.
    """

    level: str
    layers: tuple[str, ...]
    python: tuple[str, ...]
    bounds: Bounds

    @abstractmethod
    def start(
        self, argv: Sequence[str], descriptors: tuple[int, int, int], cwd: str, env: Mapping[str, str], seconds: float
    ) -> None:
        """Start a program whose standard input, output and error are these descriptors; see ``exec``."""

    @abstractmethod
    def wait(self) -> Ended:
        """Until the program has ended, which it has at the latest when its seconds are over."""

    @abstractmethod
    def write_file(self, path: str, content: bytes) -> None:
        """Write a file in the working folder.

        Raises:
            RunFailure: the folder is full, what stands there is no ordinary file, or docker refuses.
        """

    @abstractmethod
    def read_file(self, path: str, limit: int = MAX_FILE_BYTES) -> bytes:
        """The bytes of an ordinary file in the working folder.

        Raises:
            RunFailure: no such file, no ordinary one, or a longer one.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything that runs inside, and forget the files."""

    def exec(
        self,
        argv: Sequence[str],
        input: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        seconds: float = 10.0,
    ) -> Finished:
        """Run ``argv`` (a program by its full path, and its arguments) until it ends or ``seconds`` have passed.

        Args:
            input: what it reads from standard input.
            cwd: where, seen from the working folder.
            env: all of its environment.

        Raises:
            RunFailure: it cannot be started.
        """
        pipes = [os.pipe() for _ in range(3)]
        (child_in, feed), (out, child_out), (err, child_err) = pipes
        ours = (feed, out, err)
        try:
            self.start(argv, (child_in, child_out, child_err), cwd, env or {}, seconds)
        except RunFailure:
            for pipe in pipes:
                for descriptor in pipe:
                    os.close(descriptor)
            raise
        for descriptor in (child_in, child_out, child_err):
            os.close(descriptor)
        exchange = _Exchange(ours, input, self.bounds.output_bytes)
        exchange.begin()
        try:
            ended = self.wait()
        finally:
            exchange.finish()
        return Finished(exchange.texts[0], exchange.texts[1], ended.code, ended.timed_out, exchange.truncated)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Exchange:
    """Feeds a program and takes its output, in a thread of its own, until both outputs are closed."""

    def __init__(self, descriptors: tuple[int, int, int], feed: bytes, limit: int) -> None:
        self.descriptors = descriptors
        self.unsent = memoryview(feed)
        self.limit = limit
        self.truncated = False
        self._read = (bytearray(), bytearray())
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def texts(self) -> tuple[bytes, bytes]:
        return bytes(self._read[0]), bytes(self._read[1])

    def begin(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """The program has ended: take what is still in the pipes, and wait for nobody who may hold them."""
        os.close(self._stopped)
        self._thread.join()
        for descriptor in (*self.descriptors[1:], self._stop):
            os.close(descriptor)

    def _run(self) -> None:
        feed, out, err = self.descriptors
        places = {out: 0, err: 1}
        with selectors.DefaultSelector() as selector:
            for descriptor in places:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._stop, selectors.EVENT_READ)
            os.set_blocking(feed, False)
            selector.register(feed, selectors.EVENT_WRITE)
            ending = False
            while not ending or places:
                ready = selector.select(0 if ending else None)
                if ending and not any(key.fd in places for key, _ in ready):
                    break
                for key, _ in ready:
                    if key.fd == self._stop:
                        ending = True
                        selector.unregister(self._stop)
                    elif key.fd == feed:
                        if not self._feed(feed):
                            selector.unregister(feed)
                    elif not self._take(key.fd, places[key.fd]):
                        selector.unregister(key.fd)
                        del places[key.fd]
            if feed in selector.get_map():
                os.close(feed)

    def _feed(self, feed: int) -> bool:
        """Whether there is more to write; else the pipe is closed."""
        try:
            self.unsent = self.unsent[os.write(feed, self.unsent[:READ_BYTES]) :] if self.unsent else self.unsent
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.unsent = self.unsent[:0]
        if not self.unsent:
            os.close(feed)
        return bool(self.unsent)

    def _take(self, descriptor: int, place: int) -> bool:
        try:
            part = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        kept = self._read[place]
        room = self.limit - len(kept)
        self.truncated |= len(part) > room
        kept += part[:room]
        return bool(part)


# --- what process and namespaces have in common: a supervisor


class Supervised(Sandbox):
    """A sandbox of this machine, behind a supervisor (``supervisor.py``).

    Raises:
        RunFailure: it cannot be set up; the message says what the kernel refused.
    """

    def __init__(self, level: str, bounds: Bounds) -> None:
        self.level, self.bounds = level, bounds
        self.python: tuple[str, ...] = (os.path.realpath(sys.executable), "-s", "-S", "-B")
        self.layers: tuple[str, ...] = ()
        self._ended: Ended | None = None
        self._seconds = 0.0
        try:
            self.folder = tempfile.mkdtemp(prefix="posttrain-box-")
        except OSError as error:
            raise RunFailure(f"a sandbox needs an empty folder, and none can be made: {error}") from None
        settings = {"level": level, "bounds": asdict(bounds), "folder": self.folder}
        self._control, self._process = _starter().open(settings)
        try:
            self.layers = tuple(self._hear(START_SECONDS)["layers"])
        except RunFailure:
            self.close()
            raise

    def start(
        self, argv: Sequence[str], descriptors: tuple[int, int, int], cwd: str, env: Mapping[str, str], seconds: float
    ) -> None:
        self._ended, self._seconds = None, seconds
        message = {"start": list(argv), "cwd": cwd, "env": dict(env), "seconds": seconds}
        self._ask(message, list(descriptors))

    def wait(self) -> Ended:
        """Raises ``SandboxGone`` where the supervisor was ended, or answers no more."""
        while self._ended is None:
            self._note(self._hear(self._seconds + GRACE_SECONDS))
        return self._ended

    def write_file(self, path: str, content: bytes) -> None:
        self._ask({"write": path_inside(path), "content": base64.b64encode(content).decode()})

    def read_file(self, path: str, limit: int = MAX_FILE_BYTES) -> bytes:
        return base64.b64decode(self._ask({"read": path_inside(path), "limit": limit})["content"])

    def close(self) -> None:
        if self._control.fileno() >= 0:
            self._control.close()
        if self._process >= 0:
            poll = selectors.DefaultSelector()
            with poll:
                poll.register(self._process, selectors.EVENT_READ)
                if not poll.select(GRACE_SECONDS):
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, message: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        try:
            send(self._control, message, descriptors)
        except OSError as error:
            raise SandboxGone(f"the sandbox is gone: {error}") from None
        while "ended" in (answer := self._hear(GRACE_SECONDS + START_SECONDS)):
            self._note(answer)
        if "error" in answer:
            raise RunFailure(f"sandbox: {answer['error']}")
        return answer

    def _note(self, message: dict[str, Any]) -> None:
        killed = message["ended"] == -signal.SIGKILL and message["seconds"] >= self.bounds.cpu_seconds
        by_cpu = killed or message["ended"] == -signal.SIGXCPU
        overdue = bool(message["overdue"]) or by_cpu
        self._ended = Ended(message["ended"], overdue, message["seconds"], message["left"])

    def _hear(self, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        try:
            answer = receive(self._control)
        except (OSError, ValueError) as error:
            raise SandboxGone(f"the sandbox does not answer: {error}") from None
        if answer is None:
            raise SandboxGone("the sandbox ended without a word")
        if "failed" in answer[0]:
            raise RunFailure(f"no sandbox of the level {self.level}: {answer[0]['failed']}")
        return answer[0]


def path_inside(path: str) -> str:
    """A path in the working folder.

    Raises:
        RunFailure: it leads out of it.
    """
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path or not parts[-1]:
        raise RunFailure(f"sandbox: {path!r} is no path of a file in the working folder")
    return path


class _Starter:
    """The process that forks supervisors; one for this program."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair()
        package = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOT, package],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONHASHSEED": "0"}
                | {name: os.environ[name] for name in _FOR_THE_LOADER if name in os.environ},
                start_new_session=True,
            )
        self._requests.settimeout(START_SECONDS)
        atexit.register(self.close)

    def open(self, settings: dict[str, Any]) -> tuple[socket.socket, int]:
        """The socket of a new supervisor, and a handle of its process (-1: it has ended already)."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                send(self._requests, settings, [theirs.fileno()])
                answer = receive(self._requests)
            except OSError as error:
                ours.close()
                raise RunFailure(f"the process that starts sandboxes does not answer: {error}") from None
        if answer is None:
            ours.close()
            raise RunFailure("the process that starts sandboxes ended; it needs Linux 5.12 and Python's own libraries")
        return ours, answer[1][0] if answer[1] else -1

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self.owner == os.getpid():
            self._requests.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
            atexit.unregister(self.close)


_STARTERS: list[_Starter] = []
_STARTERS_LOCK = threading.Lock()


def _starter() -> _Starter:
    with _STARTERS_LOCK:
        if not _STARTERS or not _STARTERS[-1].alive:
            _STARTERS[:] = [_Starter()]
        return _STARTERS[-1]
