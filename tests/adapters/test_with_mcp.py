"""Tools of a Model Context Protocol server, with the real package: a command that is started, and one on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.contract import Session, Toolset, build_toolset
from posttrain.sampling.environments.mcp_tools import CLOSE_SECONDS
from posttrain.sampling.environments.pool import Pool
from posttrain.sampling.environments.tools import MAX_RESULT_CHARS
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Call
from posttrain.untrusted import command_name, declare_code
from refusing import refuses
from serving import free_port

pytest.importorskip("mcp", reason="needs the package mcp: make test-adapters ADAPTERS=mcp")
pytestmark = pytest.mark.adapters
SCRIPT = str(Path(__file__).with_name("example_mcp.py"))
COMMAND = [sys.executable, SCRIPT]
EPISODES = Path(__file__).parents[2] / "contrib" / "episodes.yaml"
START_SECONDS = 60


@contextmanager
def listening(port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(START_SECONDS * 10):
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield server
        finally:
            server.kill()


@contextmanager
def opened(**options: Any) -> Iterator[tuple[Toolset, Session]]:
    declare_code({"command": options.get("command")})
    built = build_toolset(None, [Component(name="mcp", **options)])
    try:
        with Pool() as pool:
            yield built, Session(built, pool, 30.0)
    finally:
        built.close()


def call(session: Session, name: str, **arguments: Any) -> Call:
    tool = session.toolset.tools[name]
    job = session.call(tool, tool.read(arguments))
    assert job is not None, session.failure
    return session.answer(tool, json.dumps(arguments), job)


def is_alive(process: int) -> bool:
    """Return True for a process that runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tools_of_a_command_are_those_that_it_lists_and_its_process_ends_with_them() -> None:
    with opened(command=COMMAND) as (built, session):
        assert list(built.tools) == ["add", "die", "draw", "fail", "much", "process", "wait"]
        assert built.tools["add"].schema == {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two whole numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 0}},
                    "required": ["a"],
                },
            },
        }
        assert call(session, "add", a=20, b=22).result == "42"
        assert call(session, "add", a="20").result == "20"
        with refuses(ValueError, "'c'"):
            built.tools["add"].read({"a": 1, "c": 2})
        with refuses(ValueError, "'a'"):
            built.tools["add"].read({"b": 1})
        process = int(call(session, "process").result)
        assert int(call(session, "process").result) == process
        assert process != os.getpid()
        assert is_alive(process)
    assert not is_alive(process)


def test_errors_large_results_and_pictures_are_outcomes_of_the_call() -> None:
    with opened(command=COMMAND) as (_, session):
        failed = call(session, "fail", reason="no reason")
        assert (failed.outcome, session.failure) == ("failed", "")
        assert failed.result.startswith("ServerToolError: Error executing tool fail")
        wrong = call(session, "add", a="many")
        assert (wrong.outcome, session.failure) == ("failed", "")
        assert "valid integer" in wrong.result
        large = call(session, "much", characters=1_000_000)
        assert large.outcome == "ok"
        assert large.result == "x" * MAX_RESULT_CHARS + " ... (cut off)"
        assert call(session, "draw").result == "a dot\n[image (image/png), which is no text]"


def test_a_call_that_takes_too_long_is_given_up_and_the_server_goes_on() -> None:
    with opened(command=COMMAND, only=["wait", "add"]) as (built, session):
        assert list(built.tools) == ["add", "wait"]
        call(session, "add", a=1)
        hurried = Session(built, session.pool, 0.2)
        late = call(hurried, "wait", seconds=30)
        assert (late.outcome, hurried.num_late, hurried.failure) == ("timeout", 1, "")
        assert call(session, "add", a=1).result == "1"


def test_calls_of_many_rollouts_run_at_the_same_time() -> None:
    with opened(command=COMMAND) as (built, session):
        sessions = [Session(built, session.pool, 30.0) for _ in range(8)]
        call(session, "wait", seconds=0)
        tool = built.tools["wait"]
        began = time.monotonic()
        jobs = [one.call(tool, {"seconds": 1.0}) for one in sessions]
        for one, job in zip(sessions, jobs, strict=True):
            assert job is not None
            assert one.answer(tool, "", job).result == "waited"
        assert time.monotonic() - began < 6  # one after the other it would be 8


def test_a_server_that_ends_breaks_the_episode_and_the_next_call_starts_another() -> None:
    with opened(command=COMMAND) as (built, session):
        first = int(call(session, "process").result)
        ended = call(session, "die")
        assert ended.outcome == "failed"
        assert session.failure.startswith("tool 'die': the server")
        assert "it has ended" in session.failure
        assert r"out of \x1b[31mmemory" in session.failure
        again = Session(built, session.pool, 30.0)
        second = int(call(again, "process").result)
        assert second != first
        assert not is_alive(first)


def test_a_server_on_loopback_that_ends_and_comes_back() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with listening(port) as server, opened(url=url, only=["add", "process"]) as (built, session):
        assert call(session, "add", a=20, b=22).result == "42"
        server.kill()
        server.wait()
        for _ in range(2):
            gone = Session(built, session.pool, 30.0)
            assert call(gone, "add", a=1).outcome == "failed"
            assert gone.failure.startswith(f"tool 'add': the server '{url}': ")
        with listening(port):
            back = Session(built, session.pool, 30.0)
            assert call(back, "add", a=1, b=1).result == "2"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command": ["no-such-server"]}, ["tools.0", "no-such-server", "no such command"]),
        ({"command": [sys.executable, "-c", "import no_such_module"]}, ["tools.0", "ended", "no_such_module"]),
        ({"command": ["sleep", "600"], "start_seconds": 0.5}, ["tools.0", "0.5 seconds"]),
        ({"command": ["yes"], "start_seconds": 0.5}, ["tools.0", "0.5 seconds"]),
        ({"command": COMMAND, "only": ["ad"]}, ["tools.0.only", "'ad'", "add"]),
        ({"url": "http://127.0.0.1:9/mcp"}, ["tools.0", "127.0.0.1:9"]),
    ],
    ids=["absent", "broken", "silent", "noise", "absent tool", "nobody"],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(options: Any, named: list[str], capfd: Any) -> None:
    declare_code(options)
    began = time.monotonic()
    with refuses(UsageError, *named):
        build_toolset(None, [Component(name="mcp", **options)])
    assert time.monotonic() - began < CLOSE_SECONDS  # what does not end by itself was ended
    assert capfd.readouterr() == ("", "")  # nothing that it wrote, and no traceback of the package


def calls_of(folder: Path) -> list[Call]:
    rows = RolloutStore(folder / "rollouts.db", read_only=True).training()
    return [call for row in rows for turn in row.turns for call in turn.calls]


def test_a_model_is_trained_with_it_resumed_to_the_bit_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text(
        json.dumps(
            {
                "extends": str(EPISODES),
                "environment": None,
                "task": {"name": "sums", "max_value": 20, "size": 64},
                "tools": [{"name": "mcp", "command": COMMAND, "only": ["add"]}],
                "rewards": ["correct", {"name": "tool_calls", "weight": 0.5}],
                "rollout": {
                    "engine": {
                        "name": "choosing_engine:choosing",
                        "texts": [' <tool>add: {"a": 3, "b": 4}</tool>', " </think> <answer> 7 </answer>"],
                    },
                    "num_prompts": 2,
                    "group_size": 4,
                    "max_turns": 3,
                    "max_turn_tokens": None,
                },
                "eval": None,
            }
        )
    )
    words = ["--quiet", "--runs-dir", "runs", "--train.save_every", "1"]
    assert main(["train", "sums.yaml", "--run", "whole", "--train.steps", "2", *words]) == 0, capsys.readouterr().err
    done = calls_of(tmp_path / "runs" / "whole")
    assert done
    assert {(one.tool, one.result, one.outcome) for one in done} == {("add", "7", "ok")}
    assert main(["train", "sums.yaml", "--run", "half", "--train.steps", "1", *words]) == 0
    code = ["--allow-code", "choosing_engine:choosing"]
    resume = ["runs", "resume", "half", "--runs-dir", "runs", "--steps", "2", "--accept-changes", "--quiet", *code]
    capsys.readouterr()
    from posttrain import untrusted

    monkeypatch.setattr(untrusted, "_FOLDERS", {})
    assert main(resume) == 2
    allowed = ["--allow-code", command_name(COMMAND)]
    assert allowed[1] in capsys.readouterr().err
    assert main([*resume, *allowed]) == 0, capsys.readouterr().err
    assert calls_of(tmp_path / "runs" / "half") == done
    weights = [
        sorted((tmp_path / "runs" / name / "checkpoints" / "step-000002").glob("*.safetensors"))
        for name in ("whole", "half")
    ]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    texts = json.dumps([' <tool>add: {"a": 3, "b": 4}</tool>'])
    asked = ["evaluate", "runs/whole", "--limit", "2", "--engine", "scripted", "--engine.texts", texts, "--out", "out"]
    assert main([*asked, *code, *allowed]) == 0, capsys.readouterr().err
