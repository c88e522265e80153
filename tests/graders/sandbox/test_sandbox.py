"""Programs in a sandbox: what they get, how they end, what they may use, and what bubblewrap hides from them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.errors import RunFailure, UsageError
from posttrain.graders.sandbox import sandbox
from posttrain.graders.sandbox.sandbox import Bounds, FinishedProgram, choose_sandbox, filter_program, refusal, run
from refusing import refuses

BOUNDS = Bounds(cpu_seconds=60, output_bytes=1000, disk_bytes=4 << 20, file_bytes=2 << 20)
LONG = 120.0  # seconds; a loaded machine needs a part of them
KINDS = ["process", *([] if refusal("bubblewrap") else ["bubblewrap"])]
needs_bubblewrap = pytest.mark.skipif(bool(refusal("bubblewrap")), reason=refusal("bubblewrap"))
each_kind = pytest.mark.parametrize("kind", KINDS)


def python(kind: str, code: str, bounds: Bounds = BOUNDS, seconds: float = LONG, **files: bytes) -> FinishedProgram:
    return run(["-c", code], files, kind=kind, bounds=bounds, seconds=seconds)  # type: ignore[arg-type]


@each_kind
def test_run_gets_its_files_and_nothing_of_the_environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_TEST_SECRET", "1")
    code = (
        "import os, sys; print(os.listdir(), open('a').read(), sys.stdin.read()); "
        "print(sorted(os.environ.keys() - {'PWD', 'LC_CTYPE'}), file=sys.stderr); sys.exit(3)"
    )
    done = python(kind, code, a=b"one")
    assert done == FinishedProgram(3, False, b"['a'] one \n", b"['PYTHONHASHSEED', 'PYTHONUTF8']\n")


@each_kind
def test_run_waiting_program_is_ended_when_time_is_up(kind: str) -> None:
    done = python(kind, "import time; print(1, flush=True); time.sleep(600)", seconds=2.0)
    assert (done.stdout, done.timed_out) == (b"1\n", True)


@each_kind
def test_run_computing_program_is_ended_by_its_computing_time(kind: str) -> None:
    assert python(kind, "while True: pass", replace(BOUNDS, cpu_seconds=1)).timed_out


@each_kind
def test_run_processes_left_behind_are_ended(kind: str) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(600)\n os._exit(0)\n"
        "os.wait(); print('parent')"
    )
    assert python(kind, code) == FinishedProgram(0, False, b"parent\n")


@each_kind
def test_run_memory_is_divided_among_processes(kind: str) -> None:
    """512 MB for four processes: a quarter for each, so that all together keep to the limit."""
    assert python(kind, "bytearray(80 << 20); print(1)").stdout == b"1\n"
    assert b"MemoryError" in python(kind, "bytearray(130 << 20)").stderr
    assert python(kind, "bytearray(130 << 20); print(1)", replace(BOUNDS, processes=2)).stdout == b"1\n"


@needs_bubblewrap
def test_bubblewrap_number_of_processes_is_held() -> None:
    code = (
        "import os, time\nmade = 0\ntry:\n"
        " while made < 50:\n  if os.fork() == 0: time.sleep(600)\n  made += 1\nexcept OSError: print(made)"
    )
    assert python("bubblewrap", code).stdout == b"3\n", "and the first one"


@needs_bubblewrap
def test_bubblewrap_size_and_number_of_files_are_held() -> None:
    code = (
        "import errno\n"
        "try:\n for i in range(9): open(f'f{i}', 'wb').write(bytes(1 << 20))\n"
        "except OSError as error: print(i, errno.errorcode[error.errno])"
    )
    assert python("bubblewrap", code).stdout == b"4 ENOSPC\n"
    many = "import time\nfor i in range(3000): open(f'e{i}', 'w').close()\ntime.sleep(600)"
    assert python("bubblewrap", many).code == 137


@needs_bubblewrap
def test_bubblewrap_shows_python_and_nothing_of_the_user() -> None:
    code = (
        "import os, socket, sys\n"
        "print(socket.gethostname(), os.getcwd(), os.path.exists('/proc'), os.path.exists('/etc/passwd'))\n"
        "print(os.path.exists('/home'), os.path.exists('/root/.ssh'), sorted(os.listdir('/dev')))\n"
        "print([n for n in sys.path if n.endswith('site-packages')], os.access('/', 2), os.access('/usr/lib', 2))"
    )
    assert python("bubblewrap", code).stdout.decode().splitlines() == [
        "sandbox /box False False",
        "False False ['null', 'random', 'urandom', 'zero']",
        "[] False False",
    ]


@needs_bubblewrap
def test_bubblewrap_program_has_no_capabilities() -> None:
    """No effective or permitted ones, and no program that it starts gets any."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "head = ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4))\n"
        "body = ctypes.create_string_buffer(24)\n"
        "libc.capget(head, body)\n"
        "print(body.raw[:8] + body.raw[12:20] == bytes(16), libc.prctl(39, 0, 0, 0, 0), os.getuid() != 0)"
    )
    assert python("bubblewrap", code).stdout == b"True 1 True\n"


@needs_bubblewrap
def test_bubblewrap_failure_of_its_own_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_walls", lambda bounds: ["--ro-bind", "/nothing/here", "/x"])
    with refuses(RunFailure, "bubblewrap: bwrap"):
        python("bubblewrap", "print(1)")


def as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    become = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    paths = os.pathsep.join((str(Path(sandbox.__file__).parents[3]), *(p for p in sys.path if "site-packages" in p)))
    command = ["/usr/bin/python3", "-B", "-c", become + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": paths}, cwd="/")


@needs_bubblewrap
@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/usr/bin/python3").exists() or as_nobody("import posttrain.errors").returncode != 0,
    reason="only a superuser can become another user, who must be able to read this package",
)
def test_bubblewrap_of_an_ordinary_user_has_the_same_walls() -> None:
    code = (
        "from posttrain.graders.sandbox.sandbox import Bounds, run\n"
        'code = \'import os; print(os.getuid(), os.access("/usr/lib", os.W_OK), os.path.exists("/home"))\'\n'
        "print(run(['-c', code], kind='bubblewrap', bounds=Bounds(cpu_seconds=60), seconds=120.0).stdout)\n"
    )
    done = as_nobody(code)
    assert done.stdout == "b'65534 False False\\n'\n", done.stderr


def test_choose_sandbox_that_does_not_run_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "refusal", lambda kind: "no namespaces" if kind == "bubblewrap" else "")
    with refuses(UsageError, "`sandbox: process`"):
        choose_sandbox(None)
    assert choose_sandbox("process") == "process"


def test_refusal_without_bwrap_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: "")
    assert "[sandbox]" in refusal.__wrapped__("bubblewrap")


def run_filter(program: bytes, number: int, architecture: int, argument: int) -> int:
    """Return the verdict of a classic BPF program on a system call."""
    steps = list(struct.iter_unpack("=HBBI", program))
    seen = {0: number, 4: architecture, 16: argument}
    place, loaded = 0, 0
    while True:
        code, yes, no, constant = steps[place]
        if code == 0x06:
            return int(constant)
        if code == 0x20:
            loaded = seen[constant]
        else:
            true = {0x15: loaded == constant, 0x35: loaded >= constant, 0x45: bool(loaded & constant)}[code]
            place += yes if true else no
        place += 1


@pytest.mark.parametrize(
    ("machine", "architecture", "read", "ptrace", "socket", "clone"),
    [("x86_64", 0xC000003E, 0, 101, 41, 56), ("aarch64", 0xC00000B7, 63, 117, 198, 220)],
)
def test_filter_program_refuses_calls_by_number_and_argument(
    machine: str, architecture: int, read: int, ptrace: int, socket: int, clone: int
) -> None:
    program = filter_program(machine)
    allow, refuse, kill, not_there = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
    assert run_filter(program, read, architecture, 0) == allow
    assert run_filter(program, ptrace, architecture, 0) == refuse
    assert run_filter(program, read, 0x40000003, 0) == kill  # a program of another architecture
    assert run_filter(program, 435, architecture, 0) == not_there
    assert run_filter(program, socket, architecture, 1) == refuse
    assert run_filter(program, clone, architecture, 0x3D0F00) == allow  # a thread
    assert run_filter(program, clone, architecture, 0x11 | 0x10000000) == refuse  # a namespace of users
    assert run_filter(program, 0x40000000 | read, architecture, 0) == (refuse if machine == "x86_64" else allow)
    assert filter_program("riscv64") == b""


@each_kind
@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(3000):\n os.mkdir('a'); os.chdir('a')\nprint(1)",
        "import os\nos.mkdir('a'); open('a/b', 'w').close(); os.mkdir('a/c'); os.chmod('a', 0); print(1)",
        "import os\nos.mkdir('a'); os.symlink('/', 'a/root'); os.symlink('a', 'b'); os.mkfifo('c'); print(1)",
    ],
    ids=["deep", "closed", "links"],
)
def test_run_leaves_no_folder(kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = python(kind, code, replace(BOUNDS, disk_bytes=200 << 20))
    assert (done.code, done.stdout) == (0, b"1\n"), done.stderr
    for thread in threading.enumerate():
        if thread.name.startswith("removes"):
            thread.join(LONG)
    assert os.listdir(tmp_path) == []


# Sockets that no process holds: each pair is sent through the next, so that no limit on open files counts them.
HIDDEN_SOCKETS = """
import os, resource, socket
taken = 0
def fill(one):
    global taken
    one.setblocking(False)
    try:
        while True:
            taken += one.send(b'x' * 100_000)
    except BlockingIOError:
        pass
try:
    kept = socket.socketpair()
    for _ in range(3000):
        pair = socket.socketpair()
        fill(pair[0])
        fill(pair[1])
        fill_next = socket.socketpair()
        socket.send_fds(fill_next[0], [b'x'], [kept[0].fileno(), kept[1].fileno(), pair[0].fileno(), pair[1].fileno()])
        for one in (*kept, *pair):
            one.close()
        kept = fill_next
except OSError as error:
    print(type(error).__name__)
print(taken)
"""
NAMED_SOCKETS = """
import socket
held, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0], 0
try:
    held.bind(b'\\0name')
    print('bound')
except OSError as error:
    print(type(error).__name__)
try:
    socket.socket(socket.AF_UNIX)
    print('made')
except OSError as error:
    print(type(error).__name__)
"""


@needs_bubblewrap
def test_bubblewrap_keeps_no_data_in_sockets_that_no_process_holds() -> None:
    kind, taken = python("bubblewrap", HIDDEN_SOCKETS).stdout.split()
    assert kind == b"PermissionError"
    assert int(taken) < 2 << 20
    assert python("bubblewrap", NAMED_SOCKETS).stdout == b"PermissionError\nPermissionError\n"


@each_kind
def test_run_of_asyncio_and_threads_works(kind: str) -> None:
    code = (
        "import asyncio, threading\n"
        "async def f(n):\n await asyncio.sleep(0.01)\n return await asyncio.to_thread(lambda: n * n)\n"
        "async def all():\n return await asyncio.gather(f(2), f(3))\n"
        "print(asyncio.run(all()))"
    )
    assert python(kind, code).stdout == b"[4, 9]\n"


def test_sandbox_in_a_namespace_of_one_user_works_or_says_why_in_a_line() -> None:
    """User 0 of a rootless container may not become another user."""
    program = (
        "from posttrain.graders.sandbox.sandbox import is_superuser, refusal\n"
        "print(is_superuser()); print(repr(refusal('bubblewrap'))); print(repr(refusal('process')))"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this machine makes no namespace of users")
    superuser, boxed, process = done.stdout.splitlines()
    assert superuser == "False"
    assert "Traceback" not in boxed
    assert len(boxed.splitlines()) == 1
    assert process == "''"


def test_program_that_cannot_be_watched_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    sandbox.refusal.cache_clear()
    try:
        with refuses(UsageError, "pidfd_open"):
            choose_sandbox("process")
    finally:
        sandbox.refusal.cache_clear()
