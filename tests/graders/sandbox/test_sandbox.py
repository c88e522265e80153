"""The four things that can be done with a sandbox, at each level that this machine has."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.errors import RunFailure, UsageError
from posttrain.graders.sandbox import kernel, levels
from posttrain.graders.sandbox.levels import choose_level, open_sandbox, refusal
from posttrain.graders.sandbox.sandbox import Bounds, Sandbox, Supervised

BOUNDS = Bounds(cpu_seconds=60, output_bytes=1000, disk_bytes=4 << 20, file_bytes=2 << 20)
LONG = 120.0  # seconds; a loaded machine needs a part of them
NAMESPACES = not refusal("namespaces")
LEVELS = ["process", *(["namespaces"] if NAMESPACES else [])]
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason=f"no namespaces: {refusal('namespaces')}")


@pytest.fixture(params=LEVELS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Supervised(request.param, BOUNDS) as sandbox:
        yield sandbox


@pytest.fixture
def inner() -> Iterator[Sandbox]:
    with Supervised("namespaces", BOUNDS) as sandbox:
        yield sandbox


def python(box: Sandbox, code: str, **options: object) -> tuple[str, str, int]:
    done = box.exec([*box.python, "-c", code], seconds=LONG, **options)  # type: ignore[arg-type]
    assert not done.timed_out
    return done.stdout.decode(), done.stderr.decode(), done.exit


def test_a_program_gets_what_it_is_given_and_nothing_else(box: Sandbox) -> None:
    os.environ["POSTTRAIN_TEST_SECRET"] = "1"
    code = (
        "import os, sys; print(sys.stdin.read(), dict(os.environ), file=sys.stderr); print(os.listdir()); sys.exit(3)"
    )
    out, err, code_at_end = python(box, code, input=b"asked", env={"LC_ALL": "C.UTF-8", "A": "1"})
    assert (out, err, code_at_end) == ("[]\n", "asked {'LC_ALL': 'C.UTF-8', 'A': '1'}\n", 3)
    del os.environ["POSTTRAIN_TEST_SECRET"]


def test_files_go_in_and_out_and_stay_between_programs(box: Sandbox) -> None:
    box.write_file("a/b.txt", b"one")
    assert python(box, "open('c.txt', 'w').write(open('b.txt').read() * 2)", cwd="a")[2] == 0
    assert box.read_file("a/c.txt") == b"oneone"
    box.write_file("a/c.txt", b"")
    assert box.read_file("a/c.txt") == b""
    for path in ("/etc/passwd", "../x", "a/../../x", "", "a/"):
        with pytest.raises(RunFailure, match="no path of a file in the working folder"):
            box.read_file(path)


def test_files_that_are_none_are_refused(box: Sandbox) -> None:
    assert python(box, "import os; os.symlink('/etc/passwd', 'link'); open('long', 'w').write('x' * 11)")[2] == 0
    with pytest.raises(RunFailure, match="symbolic link"):
        box.read_file("link")
    with pytest.raises(RunFailure, match="symbolic link"):
        box.write_file("link", b"x")
    with pytest.raises(RunFailure, match="more than 10 bytes"):
        box.read_file("long", limit=10)
    with pytest.raises(RunFailure, match="No such file"):
        box.read_file("nothing")


def test_output_is_bounded_and_the_program_is_not_held_up(box: Sandbox) -> None:
    done = box.exec([*box.python, "-c", "print('x' * 1_000_000); print('end')"], seconds=LONG)
    assert (done.stdout, done.truncated, done.exit, done.timed_out) == (b"x" * 1000, True, 0, False)


def test_input_that_nobody_reads_and_much_that_is_read(box: Sandbox) -> None:
    assert python(box, "pass", input=b"x" * 1_000_000)[2] == 0
    assert python(box, "import sys; print(len(sys.stdin.buffer.read()))", input=b"x" * 3_000_000)[0] == "3000000\n"


def test_time_is_up(box: Sandbox) -> None:
    done = box.exec([*box.python, "-c", "import time; print(1, flush=True); time.sleep(600)"], seconds=3.0)
    assert (done.exit, done.timed_out) == (-9, True)
    assert python(box, "print(2)")[0] == "2\n"  # the sandbox is still there


@pytest.mark.parametrize("level", LEVELS)
def test_computing_time_is_up(level: str) -> None:
    with Supervised(level, replace(BOUNDS, cpu_seconds=1)) as box:
        done = box.exec([*box.python, "-c", "while True: pass"], seconds=LONG)
    assert done.timed_out
    assert done.exit < 0


def test_what_a_program_leaves_running_is_ended_with_it(box: Sandbox) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(600)\n os._exit(0)\n"
        "os.wait(); print('parent')"
    )
    done = box.exec([*box.python, "-c", code], seconds=LONG)
    assert (done.stdout, done.timed_out) == (b"parent\n", False)


def test_a_program_that_is_not_there(box: Sandbox) -> None:
    with pytest.raises(RunFailure, match="No such file"):
        box.exec(["/nowhere/program"])
    assert python(box, "print(1)")[0] == "1\n"


@needs_namespaces
def test_what_is_to_be_seen_inside(inner: Sandbox) -> None:
    assert set(inner.layers) <= {"landlock", "seccomp"}
    code = (
        "import os, socket, sys\n"
        "print(socket.gethostname(), os.getcwd(), os.path.exists('/proc'), os.path.exists('/etc/passwd'))\n"
        "print(os.path.exists('/home'), os.path.exists('/root/.ssh'), sorted(os.listdir('/dev')))\n"
        "print([n for n in sys.path if n.endswith('site-packages')], os.access('/', 2), os.access('/usr/lib', 2))"
    )
    out, err, _ = python(inner, code)
    assert err == ""
    assert out.splitlines() == [
        "sandbox /box False False",
        "False False ['null', 'random', 'urandom', 'zero']",
        "[] False False",
    ]


@needs_namespaces
def test_a_program_inside_has_no_rights(inner: Sandbox) -> None:
    code = (
        "import ctypes, os, resource\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "head = ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4))\n"
        "body = ctypes.create_string_buffer(24)\n"
        "nothing = not libc.capget(head, body) and body.raw == bytes(24)\n"
        "print(nothing, libc.prctl(39, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))"
    )
    assert python(inner, code)[0] == "True 1 (0, 0)\n"


@needs_namespaces
def test_the_folder_is_as_large_as_it_may_be(inner: Sandbox) -> None:
    code = (
        "import errno\n"
        "try:\n for i in range(9): open(f'f{i}', 'wb').write(bytes(1 << 20))\n"
        "except OSError as error: print(i, errno.errorcode[error.errno])"
    )
    assert python(inner, code)[0] == "4 ENOSPC\n"


def run_as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    become = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    return subprocess.run(
        [sys.executable, "-c", become + code], capture_output=True, text=True, timeout=300, check=False
    )


@needs_namespaces
@pytest.mark.skipif(
    os.getuid() != 0 or run_as_nobody("import posttrain, json.tool, wave").returncode != 0,
    reason="only a superuser can become another user, and that one must be able to read this Python",
)
def test_an_ordinary_user_has_the_same_walls() -> None:
    """The supervisor of a user who is no superuser maps one user only: 0 inside, without any right."""
    code = (
        "from posttrain.graders.sandbox.sandbox import Bounds, Supervised\n"
        "code = 'import os; print(os.getuid(), os.access(\"/usr/lib\", os.W_OK))'\n"
        "with Supervised('namespaces', Bounds(cpu_seconds=60)) as box:\n"
        "    print(box.exec([*box.python, '-c', code], seconds=120.0))\n"
    )
    done = run_as_nobody(code)
    assert "stdout=b'0 False\\n'" in done.stdout, done.stderr


# --- the ladder


def test_the_default_is_the_strongest_that_needs_no_image() -> None:
    assert choose_level(None, None) == ("namespaces" if NAMESPACES else "process")
    assert choose_level("process", None) == "process"


def test_a_weaker_level_than_the_default_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_REASONS", {"namespaces": "unshare: Operation not permitted", "process": ""})
    with pytest.warns(
        UserWarning, match=r"at the level 'process'.*refuses namespaces \(unshare: Operation not permitted\)"
    ):
        assert choose_level(None, None) == "process"


def test_a_level_that_is_not_there_names_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"namespaces": "unshare: Operation not permitted", "process": "", "docker": "there is no command docker"}
    monkeypatch.setattr(levels, "_REASONS", reasons)
    with pytest.raises(UsageError, match=r"of the level namespaces: unshare: .*; what works here: process$"):
        choose_level("namespaces", None)
    with pytest.raises(UsageError, match=r"of the level docker: there is no command docker; what works here: process$"):
        choose_level(None, "python:3.11")
    with pytest.raises(UsageError, match="the level docker needs an image"):
        choose_level("docker", None)
    with pytest.raises(UsageError, match="an image is for the level docker, not process"):
        choose_level("process", "python:3.11")


# --- system calls


def run_filter(program: bytes, number: int, architecture: int, argument: int) -> int:
    """What a classic BPF program says of a system call."""
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
def test_the_filter_of_system_calls(
    machine: str, architecture: int, read: int, ptrace: int, socket: int, clone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MACHINE", machine)
    program = kernel.filter_program()
    allow, refuse, kill, not_there = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
    assert run_filter(program, read, architecture, 0) == allow
    assert run_filter(program, ptrace, architecture, 0) == refuse
    assert run_filter(program, read, 0x40000003, 0) == kill  # a program of another architecture
    assert run_filter(program, 435, architecture, 0) == not_there
    assert run_filter(program, socket, architecture, 1) == allow
    assert run_filter(program, socket, architecture, 2) == refuse
    assert run_filter(program, clone, architecture, 0x3D0F00) == allow  # a thread
    assert run_filter(program, clone, architecture, 0x11 | kernel.CLONE_NEWUSER) == refuse
    assert run_filter(program, 0x40000000 | read, architecture, 0) == (refuse if machine == "x86_64" else allow)


# --- docker's command line, played by a script

FAKE = """#!{python}
import json, os, subprocess, sys
folder = {folder!r}
with open(os.path.join(folder, 'calls'), 'a') as log:
    log.write(json.dumps(sys.argv[1:]) + chr(10))
verb, *rest = sys.argv[1:]
box = os.path.join(folder, 'box')
if verb == 'version':
    print('28.0')
elif verb == 'run':
    if 'missing:latest' in rest:
        sys.exit('Unable to find image')
    os.makedirs(box)
    print('0123abcd')
elif verb == 'rm':
    subprocess.run(['rm', '-r', box])
elif verb == 'exec':
    at, env = box, {{'PATH': os.environ['PATH']}}
    while rest[0].startswith('--'):
        if rest.pop(0) == '--interactive':
            continue
        value = rest.pop(0)
        if '=' in value:
            env.update([value.split('=', 1)])
        else:
            at = value.replace('/box', box, 1)
    assert rest.pop(0) == '0123abcd'
    code = subprocess.run([a.replace('/box', box, 1) for a in rest], cwd=at, env=env).returncode
    sys.exit(128 - code if code < 0 else code)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a command ``docker`` that runs everything here; ``calls`` holds what it was told."""
    monkeypatch.setattr(levels, "_REASONS", {})
    program = tmp_path / "docker"
    program.write_text(FAKE.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_a_container(docker: Path) -> None:
    assert choose_level(None, "python:3.11-slim") == "docker"
    with open_sandbox("docker", BOUNDS, "python:3.11-slim") as box:  # type: ignore[attr-defined]
        box.write_file("a/b.txt", b"one")
        done = box.exec(["/bin/sh", "-c", "cat b.txt; cat; echo $X >&2; exit 4"], b"in", "a", {"X": "y"}, LONG)
        assert (done.stdout, done.stderr, done.exit, done.timed_out) == (b"onein", b"y\n", 4, False)
        assert box.read_file("a/b.txt") == b"one"
        with pytest.raises(RunFailure, match="more than 2 bytes"):
            box.read_file("a/b.txt", limit=2)
        with pytest.raises(RunFailure, match="docker exec: exit code"):
            box.read_file("nothing")
        assert box.exec(["/bin/sh", "-c", "sleep 600"], seconds=0.5).timed_out
    assert not (docker / "box").exists()
    started = next(line for line in (docker / "calls").read_text().splitlines() if line.startswith('["run"'))
    for words in ('"--network", "none"', '"--read-only"', '"--cap-drop", "ALL"', '"no-new-privileges"',
                  '"65534:65534"',
                  '"--pids-limit"', '"--memory"', f'size={BOUNDS.disk_bytes}"',
                  '"python:3.11-slim", "sleep"'):  # fmt: skip
        assert words in started


def test_an_image_that_is_not_there(docker: Path) -> None:
    with pytest.raises(RunFailure, match="docker run: Unable to find image"):
        open_sandbox("docker", BOUNDS, "missing:latest")
