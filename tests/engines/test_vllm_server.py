"""A server process that a run starts: it shows its log where it cannot start, and ends with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.engines.vllm.command import ServerCommand
from posttrain.engines.vllm.server import OwnServer
from posttrain.errors import RunFailure

MOST_SECONDS = 90.0


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ends before it is opened, or before it is read
        return False


def shell(text: str, tmp_path: Path) -> OwnServer:
    return OwnServer(ServerCommand("policy", ("sh", "-c", text)), "http://127.0.0.1:9", tmp_path / "vllm.log")


def test_own_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = shell("echo no such model; printf '\\033[31mred\\n'; exit 3", tmp_path)
    with pytest.raises(
        RunFailure, match=r"ended before it was ready\. Its log .*vllm\.log ends:\n  no such model"
    ) as told:
        server.wait()
    assert "\\x1b[31mred" in str(told.value), "what a log holds reaches no terminal raw"
    server.stop()


def test_own_server_when_stopped_ends_with_what_it_started(tmp_path: Path) -> None:
    server = shell("sleep 600 & echo $! $$; wait", tmp_path)
    wait_until(lambda: len((tmp_path / "vllm.log").read_text().split()) == 2)
    pids = list(map(int, (tmp_path / "vllm.log").read_text().split()))
    assert all(map(is_running, pids))
    server.stop()
    wait_until(lambda: not any(map(is_running, pids)))


def test_own_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engines.vllm.server.END_SECONDS", 0.5)
    server = shell("trap '' TERM; echo $$; while :; do sleep 1; done", tmp_path)
    wait_until(lambda: (tmp_path / "vllm.log").read_text().split())
    pid = int((tmp_path / "vllm.log").read_text())
    os.kill(pid, signal.SIGTERM)
    assert is_running(pid), "it ignores SIGTERM"
    server.stop()
    wait_until(lambda: not is_running(pid))
    assert not is_running(pid)


def test_own_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL, which nobody can answer."""
    program = (
        "import time; from pathlib import Path; from posttrain.engines.vllm.command import ServerCommand; "
        "from posttrain.engines.vllm.server import OwnServer; "
        f"OwnServer(ServerCommand('p', ('sh', '-c', 'echo $$; exec sleep 600')), '', Path({str(tmp_path / 'log')!r})); "
        "time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    wait_until(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().split())
    server = int((tmp_path / "log").read_text())
    assert is_running(server)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(server))
