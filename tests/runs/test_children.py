"""Children end with their parent, however it ends, and what they have started ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from other_processes import is_alive, wait_until
from posttrain.runs.children import LIFELINE, Child, end_children, start_child

# A child that has a child of its own, and a thread that works; it says so in the folder.
CHILD = """\
import pathlib, subprocess, sys, threading, time
from posttrain.runs.children import end_with_parent
end_with_parent()
end_with_parent()  # the second time there is nothing to do
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(300)
"""
# A parent with two children, which does not let go of either.
PARENT = """\
import pathlib, sys, time
from posttrain.runs.children import start_child
folder = pathlib.Path(sys.argv[1])
for name in ("one", "two"):
    child = start_child([sys.executable, "-c", sys.argv[2], str(folder / name)], folder / f"{name}.log", "a child", 1)
    print(child.process.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_children_and_theirs_along(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    notes = [tmp_path / name for name in ("one", "two")]
    wait_until(lambda: all(note.is_file() and note.read_text() for note in notes))
    everyone = [*children, *(int(note.read_text()) for note in notes)]
    assert all(map(is_alive, everyone))
    os.kill(parent.pid, how)
    parent.wait()
    wait_until(lambda: not any(map(is_alive, everyone)), 10.0)


def test_a_parent_that_is_gone_before_the_child_looks(tmp_path: Path) -> None:
    """The end of a pipe stays there to be read: a child that comes late ends all the same."""
    reading, writing = os.pipe()
    os.close(writing)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "x")],
        env=os.environ | {LIFELINE: "stdin"},
        stdin=reading,
        process_group=0,
    )
    os.close(reading)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, "2 2"),
        ({"OMP_NUM_THREADS": "7"}, "7 7"),
        ({"MKL_NUM_THREADS": "3"}, "2 3"),
        ({"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "3"}, "4,2 3"),
        ({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""}, "2 2"),
    ],
)
def test_start_child_threads_of_the_environment_win(
    ours: dict[str, str], theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    show = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    child = start_child([sys.executable, "-S", "-c", show], tmp_path / "log", "a child", 2)
    wait_until(lambda: child.poll() is not None)
    assert child.log.read_text() == f"{theirs}\n"


def test_a_child_that_ends_gives_its_pipe_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    child = start_child([sys.executable, "-S", "-c", "print(3)"], tmp_path / "log", "a child", 1)
    wait_until(lambda: child.poll() is not None)
    assert (child.poll(), child.log.read_text()) == (0, "3\n")
    stubborn = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
    working: list[Child] = [start_child([sys.executable, "-S", "-c", stubborn], tmp_path / "b", "a child", 1)]
    wait_until(lambda: working[0].log.read_text() == "1\n")
    working[0].process.kill()
    end_children(working)
    assert len(os.listdir("/proc/self/fd")) == before
