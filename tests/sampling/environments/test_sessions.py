"""The contract: episodes, calls, time-outs, failures; results do not depend on which call finishes first."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import example_environments as mine
from posttrain.errors import RecipeError, UnallowedCode, UnknownComponent, UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.contract import Session, build_toolset
from posttrain.sampling.environments.pool import Pool
from posttrain.types import Example, Message
from posttrain.untrusted import declare_code
from refusing import refuses

EXAMPLE = Example("row/1", (Message("user", "Question?"),), answer="7", meta={"level": 3, "not a name": 1})
LONG, SHORT = 60.0, 0.05


@pytest.fixture
def pool() -> Iterator[Pool]:
    mine.RELEASED.clear()
    with Pool() as opened:
        yield opened
    mine.RELEASED.set()


def toolset(name: str, *tools: str):
    declare_code([f"example_environments:{one}" for one in (name, *tools)])
    return build_toolset(
        Component(name=f"example_environments:{name}"),
        [Component(name=f"example_environments:{one}") for one in tools],
    )


def begun(opened: Session) -> Session:
    opened.begin(EXAMPLE, 98)
    opened.opening()
    return opened


def use(session: Session, name: str, given_arguments="", arguments=None):
    tool = session.toolset.tools[name]
    job = session.call(tool, tool.read(arguments if arguments is not None else given_arguments))
    assert job is not None
    return session.answer(tool, given_arguments, job)


def test_a_class_written_for_trl_runs_as_it_is(pool: Pool) -> None:
    built = toolset("Echo")
    assert list(built.tools) == ["echo", "fail"]
    session = Session(built, pool, LONG)
    session.begin(EXAMPLE, 98)
    assert session.opening() == "Echo 1."
    row = session.environment.row
    assert (row["seed"], row["answer"], row["level"], row["id"]) == (98, "7", 3, "row/1")
    assert row["prompt"] == [{"role": "user", "content": "Question?"}]
    assert use(session, "echo", "{}", {"message": "ab", "times": 2}).result == "abab"
    failed = use(session, "fail", "no luck")
    assert (failed.result, failed.outcome) == ("ValueError: no luck", "failed")
    assert (session.reward(), session.failure, session.done) == (4.0, "", False)


def test_async_methods_share_a_loop(pool: Pool) -> None:
    session = begun(Session(toolset("Waiting"), pool, LONG))
    assert use(session, "wait", "0.001").result == "True"
    assert session.failure == ""


def test_tools_without_state(pool: Pool) -> None:
    session = begun(Session(toolset("Echo", "add"), pool, LONG))
    assert use(session, "add", "{}", {"a": 2, "b": 3}).result == "5"
    with refuses(RecipeError, "tools.0", "'add'"):
        build_toolset(None, [Component(name="add")])
    declare_code("example_environments:add")
    with refuses(RecipeError, "tools.1", "'add'"):
        build_toolset(None, [Component(name="example_environments:add")] * 2)


def test_a_tool_that_hangs_is_answered_and_its_environment_is_broken_when_it_is_needed_again(pool: Pool) -> None:
    session = begun(Session(toolset("Hanging"), pool, LONG))
    session.seconds = SHORT
    call = use(session, "hang")
    assert (call.outcome, call.result) == ("timeout", "hang took longer than 0.05 seconds and was given up")
    assert session.failure == ""
    assert session.call(session.toolset.tools["answer"], {}) is None
    assert session.failure == "tool 'answer' is needed while a call still runs after 0.05 seconds"


def test_a_reset_that_returns_no_text_is_a_failure_that_states_what_to_return(pool: Pool) -> None:
    session = begun(Session(toolset("ShowsNoText"), pool, LONG))
    assert session.failure == "reset returned dict, not a string; return text for the model, or None"
    silent = begun(Session(toolset("Waiting"), pool, LONG))
    assert (silent.opening(), silent.failure) == ("", ""), "None opens with nothing"


def test_the_pool_is_not_blocked_by_what_hangs() -> None:
    stop = threading.Event()
    with Pool(num_threads=2) as small:
        hanging = [small.submit(lambda: stop.wait(60), SHORT) for _ in range(6)]
        quick = [small.submit(lambda n=n: n * n, LONG) for n in range(20)]
        assert [small.wait(job).result for job in reversed(quick)] == [n * n for n in reversed(range(20))]
        assert all(small.wait(job).late for job in hanging)
        assert not any(job.done for job in hanging)
        stop.set()


def test_at_most_so_many_run_at_a_time() -> None:
    lock, running, most = threading.Lock(), [0], [0]
    gate = threading.Event()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 3:
                gate.set()
        gate.wait(60)
        with lock:
            running[0] -= 1

    with Pool(num_threads=3) as small:
        jobs = [small.submit(work, LONG) for _ in range(12)]
        for job in jobs:
            small.wait(job)
    assert most == [3]


def test_what_cannot_be_used_is_refused_at_the_start() -> None:
    for name, message in (
        (
            "Untyped",
            "'example_environments:Untyped'",
        ),
        ("Undescribed", "'guess'"),
        ("NoReset", "reset is missing"),
    ):
        with refuses(UsageError, message):
            toolset(name)
    with refuses(UnknownComponent, "'calculater'", "'calculator'"):
        build_toolset(Component(name="calculater"))
    with refuses(RecipeError, "'number_guess'", "'hihg'", "'high'"):
        build_toolset(Component(name="number_guess", hihg=5))
    toolset("Echo")
    with refuses(RecipeError, "'size'"):
        build_toolset(Component(name="example_environments:Echo", size=1))


def test_a_stored_recipe_imports_no_environment() -> None:
    with refuses(UnallowedCode, "'unheard:Of'"):
        build_toolset(Component(name="unheard:Of"))
    with refuses(UnallowedCode, "tools.0", "'unheard:of'"):
        build_toolset(None, [Component(name="unheard:of")])


def test_the_class_of_the_guide_is_an_environment(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = (docs / "how-to" / "tools-and-environments.md").read_text(encoding="utf-8")
    block = next(one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Counter" in one)
    (tmp_path / "guide_mine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    declare_code("guide_mine:Counter")
    session = Session(build_toolset(Component(name="guide_mine:Counter")), pool, LONG)
    session.begin(EXAMPLE, 11)
    assert session.opening() == "Count down from 2."
    assert use(session, "say", "2").result == "ValueError: that was not the next number"
    assert [use(session, "say", message).outcome for message in ("1", "0")] == ["ok", "ok"]
    assert (session.done, session.reward()) == (True, 1.0)
