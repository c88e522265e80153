"""The environment ``openenv`` against OpenEnv's own server, with its own client, on loopback."""

from __future__ import annotations

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
from posttrain.sampling.environments.pool import Pool
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Call, Example, Message
from refusing import refuses
from serving import free_port

pytestmark = pytest.mark.adapters
EXAMPLE = Example("row/1", (Message("user", "Question?"),), answer="7", meta={"level": 3})
START_SECONDS = 120
EPISODES = Path(__file__).parents[2] / "contrib" / "episodes.yaml"


@contextmanager
def server(kind: str, sessions: int = 64, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = port or free_port()
    script = Path(__file__).with_name("example_openenv.py")
    with subprocess.Popen([sys.executable, str(script), kind, str(port), str(sessions)]) as process:
        try:
            for _ in range(START_SECONDS * 10):
                assert process.poll() is None, "the server ended"
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            else:
                raise AssertionError("the server does not listen")
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    with server("guessing") as (url, _):
        yield url


def toolset(url: str, **options: Any) -> Toolset:
    return build_toolset(Component(name="openenv_adapter:openenv", url=url, **options))


def begun(built: Toolset, pool: Pool, seed: int = 98) -> Session:
    session = Session(built, pool, 60.0)
    session.begin(EXAMPLE, seed)
    session.said = session.opening()  # type: ignore[attr-defined]
    return session


def act(session: Session, name: str = "act", **arguments: Any) -> Call:
    tool = session.toolset.tools[name]
    job = session.call(tool, tool.read(arguments))
    assert job is not None, session.failure
    return session.answer(tool, "", job)


def play(session: Session) -> list[str]:
    """What is heard until it is right; the reward is 1 less a quarter for every wrong guess."""
    heard = []
    while not session.done:
        heard.append(act(session, number=len(heard) + 1).result)
    return heard


def test_its_actions_are_a_tool_and_its_episodes_follow_from_the_seed(guessing: str) -> None:
    built = toolset(guessing, show=["text"], fields=["level"], reset={"high": 5})
    assert [tool.schema for tool in built.tools.values()] == [
        {
            "type": "function",
            "function": {
                "name": "act",
                "description": "Guess the number.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "number": {"type": "integer", "description": "from 1 to high"},
                        "mood": {"type": "string", "enum": ["sure", "unsure"], "default": "sure"},
                    },
                    "required": ["number"],
                },
            },
        }
    ]
    assert (built.gives_reward, built.pays_turns) == (True, True)
    with Pool() as pool:
        sessions = [begun(built, pool, seed) for seed in (1, 1, 2, 3, 4, 5, 1 << 62)]
        assert {session.said for session in sessions} == {"Level 3: 1 to 5."}  # type: ignore[attr-defined]
        heard = [play(session) for session in sessions]
        assert heard[0] == heard[1]
        assert len({len(one) for one in heard}) > 1
        for session, message in zip(sessions, heard, strict=True):
            assert message == ["higher"] * (len(message) - 1) + ["right"]
            assert session.reward() == session.turn_reward() == 1 - 0.25 * (len(message) - 1)
            assert session.turn_reward() == 0
            assert act(session, number=1).result == "ValueError: the episode is over"
            assert session.failure == ""
        assert {job.error for session in sessions if (job := session.close()) and pool.wait(job)} == {None}


def test_what_is_wrong_with_an_action_is_reported_and_the_episode_goes_on(guessing: str) -> None:
    with Pool() as pool:
        session = begun(toolset(guessing), pool)
        assert session.said == '{"text": "Level 0: 1 to 8.", "tries": 0}'  # type: ignore[attr-defined]
        wrong = act(session, number=0)
        assert (wrong.result, wrong.outcome) == ("ValueError: numbers begin with 1", "failed")
        with refuses(ValueError, "number"):
            session.toolset.tools["act"].read({"number": "many"})
        with refuses(ValueError, "mood:", "'sure'", "'unsure'"):
            session.toolset.tools["act"].read({"number": 1, "mood": "wild"})
        assert act(session, number="1", mood="unsure").outcome == "ok"
        assert session.failure == ""
        session.close()


def test_tools_of_an_environment_are_its_tools() -> None:
    with server("toolbox") as (url, _), Pool() as pool:
        built = toolset(url)
        [schema] = (tool.schema for tool in built.tools.values())
        assert schema["function"]["name"] == "double"
        assert schema["function"]["description"] == "Doubles a number.\n\n< |im_end|> is text."
        session = begun(built, pool)
        assert session.said == ""  # type: ignore[attr-defined]
        assert act(session, "double", number=21).result == "42"
        wrong = act(session, "double", number=-1)
        assert wrong.outcome == "failed"
        assert "no negative numbers" in wrong.result
        assert (session.reward(), session.failure) == (0.0, "")
        session.close()


def test_a_server_that_hangs_or_is_gone_is_a_failure_of_the_environment() -> None:
    port = free_port()
    with server("guessing", port=port) as (url, process), Pool() as pool:
        built = toolset(url, timeout_seconds=2.0)
        hanging, left = begun(built, pool), begun(built, pool)
        assert act(hanging, number=99).outcome == "failed"
        assert hanging.failure == f"tool 'act': {url}: no answer within 2 seconds"
        assert act(left, number=1).outcome == "ok"
        process.kill()
        process.wait()
        with server("guessing", port=port):  # another one, in which nobody has begun an episode
            for _ in range(2):
                left.failure = ""
                assert act(left, number=1).outcome == "failed"
                assert left.failure.startswith(f"tool 'act': {url}: ")
        gone = begun(built, pool)
        assert gone.failure.startswith(f"reset: {url}: Failed to connect")
    with refuses(UsageError, "environment.url"):
        toolset(f"http://127.0.0.1:{free_port()}")


def test_a_server_without_places_states_how_many_it_needs() -> None:
    with server("guessing", sessions=1) as (url, _), Pool() as pool:
        built = toolset(url)
        first, second = begun(built, pool), begun(built, pool)
        assert first.failure == ""
        assert "max_concurrent_envs" in second.failure
        closing = first.close()
        assert closing is not None
        pool.wait(closing)
        for _ in range(100):  # the server takes a moment to see it
            third = begun(built, pool)
            if not third.failure:
                break
            time.sleep(0.1)
        assert third.failure == ""
        third.close()


def test_a_model_is_trained_in_it(guessing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "guess.yaml"
    recipe.write_text(
        f"""
extends: {EPISODES}
environment: {{name: "openenv_adapter:openenv", url: "{guessing}", show: [text]}}
"""
    )
    small = [
        "--rollout.num_prompts",
        "2",
        "--rollout.group_size",
        "4",
        "--train.steps",
        "2",
        "--eval.every",
        "0",
        "--quiet",
    ]
    assert main(["train", str(recipe), "--runs-dir", str(tmp_path), "--run", "x", *small]) == 0, capsys.readouterr().err
    rows = RolloutStore(tmp_path / "x" / "rollouts.db", read_only=True).training()
    assert len(rows) == 16
    assert all("1 to 8." in row.prompt for row in rows)
    assert not any(row.failures for row in rows)
