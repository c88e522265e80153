"""Locks, where the file system has them and where it refuses: there a claim says who holds one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from posttrain.store.locks import Held, hold, holder
from refusing import refuses


@pytest.fixture(params=[None, errno.ENOSYS])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, and once ``flock`` raises an error of that number."""
    if request.param is not None:
        refuse(monkeypatch, request.param)


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def hold_elsewhere(path: Path) -> int:
    """Return the number of another process, which holds the lock until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold(path):
                os.write(writing, b"1")
                time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)
    return child


@pytest.mark.usefixtures("refusal")
def test_hold_by_another_process_names_it_and_is_free_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert holder(path) is None
    other = hold_elsewhere(path)
    name = f"pid {other} on {socket.gethostname()}"
    try:
        assert holder(path) == name
        with pytest.raises(Held, match=f"^{name}$"), hold(path, 0.1):
            pytest.fail("the lock was given twice")
        assert holder(path) == name
    finally:
        os.kill(other, 9)
        os.waitpid(other, 0)
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
    expected = f"a process on another machine; if it has ended, delete {claim}"
    assert holder(path) == expected
    with refuses(Held, "on another machine"), hold(path, 0.1):
        pytest.fail("a claim that counts was taken")
    assert claim.read_text() == "1\nelsewhere\n"


def test_what_is_no_lock_file_has_no_holder_and_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one would wait for a writer
    (tmp_path / "file").write_text("kept")
    os.symlink(tmp_path / "file", tmp_path / "link")
    assert [holder(tmp_path / name) for name in ("pipe", "link", "missing")] == [None, None, None]
    with refuses(OSError, "link"), hold(tmp_path / "link"):
        pytest.fail("held")
    os.link(tmp_path / "file", tmp_path / ".lock")
    with hold(tmp_path / ".lock"):
        assert (tmp_path / "file").read_text() == "kept"


def test_error_of_the_disk_is_not_taken_for_a_missing_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EIO)
    with refuses(OSError, "error"), hold(tmp_path / ".lock"):
        pytest.fail("held")
