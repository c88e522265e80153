"""Locks, where the file system has them and where it refuses: there a claim says who holds one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.store.locks import Held, hold, holder

# Read by every Python that finds it on its path: a file system without flock.
WITHOUT_FLOCK = """\
import fcntl, os
def flock(descriptor, kind):
    raise OSError(int(os.environ["REFUSAL"]), os.strerror(int(os.environ["REFUSAL"])))
fcntl.flock = flock
"""


@pytest.fixture(params=[None, errno.ENOSYS])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Error number that ``flock`` raises; None: it works."""
    if request.param is not None:
        refuse(monkeypatch, request.param)
    return request.param


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def hold_elsewhere(path: Path, place: Path, refusal: int | None) -> subprocess.Popen[str]:
    """Another process that holds the lock until it is killed."""
    (place / "sitecustomize.py").write_text(WITHOUT_FLOCK if refusal is not None else "")
    program = "import sys, time, pathlib; from posttrain.store.locks import hold\n"
    program += "with hold(pathlib.Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(place), *sys.path]), "REFUSAL": str(refusal)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_hold_by_another_process_names_it_and_is_free_after_a_kill(tmp_path: Path, refusal: int | None) -> None:
    path = tmp_path / ".lock"
    assert holder(path) is None
    other = hold_elsewhere(path, tmp_path, refusal)
    name = f"pid {other.pid} on {socket.gethostname()}"
    try:
        assert holder(path) == name
        with pytest.raises(Held, match=f"^{name}$"), hold(path, 0.1):
            pytest.fail("the lock was given twice")
        assert holder(path) == name
    finally:
        other.kill()
        other.wait()
    assert holder(path) is None
    with hold(path, 0.5):
        assert holder(path) == f"pid {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(Held), hold(path, 0.1):
            pytest.fail("the lock was given twice")
        assert holder(path) is not None
    assert holder(path) is None
    assert [item.name for item in tmp_path.glob(".lock*")] == [".lock"]  # no claim is left


def test_claim_of_another_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.ENOLCK)
    path, claim = tmp_path / ".lock", tmp_path / ".lock-claim"
    path.write_text("pid 1 on elsewhere\n")
    claim.write_text("1\nelsewhere\n")
    os.utime(claim, (time.time() - 60,) * 2)
    expected = f"a process of another machine; if it is gone, delete {claim}"
    assert holder(path) == expected
    with pytest.raises(Held, match="of another machine"), hold(path, 0.1):
        pytest.fail("a claim that counts was taken")
    assert claim.read_text() == "1\nelsewhere\n"


def test_what_is_no_lock_file_has_no_holder_and_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one would wait for a writer
    (tmp_path / "file").write_text("kept")
    os.symlink(tmp_path / "file", tmp_path / "link")
    assert [holder(tmp_path / name) for name in ("pipe", "link", "missing")] == [None, None, None]
    with pytest.raises(OSError, match="link"), hold(tmp_path / "link"):
        pytest.fail("held")
    os.link(tmp_path / "file", tmp_path / ".lock")
    with hold(tmp_path / ".lock"):
        assert (tmp_path / "file").read_text() == "kept"


def test_error_of_the_disk_is_not_taken_for_a_missing_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="error"), hold(tmp_path / ".lock"):
        pytest.fail("held")
