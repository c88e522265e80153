"""A server that a run starts, watches and ends: the process and its keeper, and a run whose server is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.engines.vllm import keeper, server
from posttrain.engines.vllm.command import PLUGIN, ServerCommand
from posttrain.engines.vllm.server import OwnServer, free_port, interpreter
from posttrain.errors import RunFailure, UsageError
from small_runs import Events, make_recipe, recorded, watched

PATIENCE = 90.0


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE
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


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = shell("echo no such model; printf '\\033[31mred\\n'; exit 3", tmp_path)
    server.start()
    with pytest.raises(
        RunFailure, match=r"ended before it was ready\. Its log .*vllm\.log ends:\n  no such model"
    ) as caught:
        server.wait()
    assert "\\x1b[31mred" in str(caught.value), "what a log holds reaches no terminal raw"
    assert "Python" not in str(caught.value), "the keeper adds nothing of its own"


def test_the_server_and_what_it_started_end_when_it_is_stopped(tmp_path: Path) -> None:
    server = shell("sleep 600 & echo $! $$; wait", tmp_path)
    server.start()
    wait_until(lambda: len((tmp_path / "vllm.log").read_text().split()) == 2)
    pids = list(map(int, (tmp_path / "vllm.log").read_text().split()))
    assert all(map(is_running, pids))
    assert server.pid is not None
    server.stop()
    wait_until(lambda: not any(map(is_running, pids)))
    assert server.pid is None


@pytest.mark.parametrize("killed", ["who started it", "the keeper"])
def test_the_server_ends_with_a_process_that_is_killed(tmp_path: Path, killed: str) -> None:
    """SIGKILL, which nobody can answer."""
    words = [sys.executable, keeper.__file__, "sh", "-c", "echo $$; exec sleep 600"]
    starter = (
        f"import subprocess, time; kept = subprocess.Popen({words!r}, stdin=subprocess.PIPE); "
        "print(kept.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen([sys.executable, "-c", starter], stdout=output)
    wait_until(lambda: len(log.read_text().split()) == 2)
    kept, server = map(int, log.read_text().split())
    assert is_running(kept)
    assert is_running(server)
    os.kill(run.pid if killed == "who started it" else kept, signal.SIGKILL)
    wait_until(lambda: not is_running(server))
    run.kill()
    run.wait()
    wait_until(lambda: not is_running(kept))


def test_a_port_in_use_and_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PORT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"engine\.port: {port} cannot be had \(Address already in use"):
            free_port(port)
    assert free_port(0) > 0
    monkeypatch.setenv("POSTTRAIN_VLLM", "/no/such/python")
    with pytest.raises(UsageError, match="POSTTRAIN_VLLM is '/no/such/python', which is no program"):
        interpreter()


def test_a_port_that_its_server_is_about_to_leave_is_waited_for() -> None:
    """As where the process that had started one was killed, and another goes on."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    leaves = threading.Timer(1.0, taken.close)
    leaves.start()
    started = time.monotonic()
    assert free_port(port) == port
    assert time.monotonic() - started > 0.5
    leaves.join()


def test_what_makes_vllm_find_the_plug_in_is_shipped() -> None:
    """Where the folder is on Python's path it is an installed package, with the entry point that vLLM looks for."""
    code = "from importlib.metadata import entry_points as e; print([x.value for x in e(group='vllm.general_plugins')])"
    seen = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(PLUGIN)}, capture_output=True, text=True, check=True
    )
    assert seen.stdout.strip() == "['posttrain_vllm:register']"


def test_a_run_starts_its_server_and_survives_its_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in runs as a process in vLLM's place; it is killed before step 2 is sampled, and started again."""
    program = Path(__file__).parent / "fake_server_process.py"
    python = tmp_path / "python"
    path = os.pathsep.join(p for p in sys.path if p)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("POSTTRAIN_VLLM", str(python))
    pids: list[int] = []

    class Killing(Events):
        def __call__(self, event: str, facts: dict[str, Any]) -> None:
            super().__call__(event, facts)
            if event == "step" and facts["step"] == 1:
                pids.append(int((tmp_path / "run" / "pid").read_text()))
                os.kill(pids[0], signal.SIGKILL)

    engine = {"name": "vllm", "retries": 0, "timeout_seconds": 120}
    events = Killing()
    recipe = make_recipe("grpo", rollout={"engine": engine}, train={"steps": 3})
    result = watched(tmp_path / "run", recipe, events)
    assert (result.step, result.reason) == (3, "finished")
    said, *others = [facts["message"] for facts in events.of("notice")]
    assert others == []
    assert said.startswith("the vLLM server failed: ")
    assert "; it is started again, given the weights of now, and asked for what it had not answered" in said
    rows = recorded(tmp_path / "run")[0]
    assert [(row.step, row.version) for row in rows] == [(s, s - 1) for s in (1, 2, 3) for _ in range(16)]
    last = int((tmp_path / "run" / "pid").read_text())
    assert last != pids[0]
    assert not is_running(last), "it ended with the run"
