"""Tools of a server: what it lists becomes tools or is refused, and what it answers is an outcome of the call."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

import fake_mcp
from posttrain import untrusted
from posttrain.api.inputs import overrides_of
from posttrain.errors import MissingExtra, RecipeError, UnallowedCode, UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe, stored_recipe, validate_recipe
from posttrain.recipes.sections import Component
from posttrain.sampling.environments import mcp_tools
from posttrain.sampling.environments.contract import Session, Toolset, build_toolset
from posttrain.sampling.environments.mcp_tools import MAX_DESCRIPTION_CHARS, MAX_SCHEMA_CHARS, MAX_TOOLS
from posttrain.sampling.environments.pool import Pool
from posttrain.sampling.episodes import build_stage
from posttrain.types import Call
from refusing import refuses

COMMAND = ["serve", "my tools"]
NAME = "command=serve 'my tools'"
URL = "http://127.0.0.1:8000/mcp"


@contextmanager
def opened(**options: Any) -> Iterator[tuple[Toolset, Session]]:
    built = build_toolset(None, [Component(name="mcp", **({"url": URL} | options))])
    try:
        with Pool() as pool:
            yield built, Session(built, pool, 60.0)
    finally:
        built.close()


def call(session: Session, name: str, **arguments: Any) -> Call:
    one = session.toolset.tools[name]
    job = session.call(one, one.read(arguments))
    assert job is not None
    return session.answer(one, "", job)


def test_tools_of_all_pages_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [[fake_mcp.tool("second"), fake_mcp.tool("third", None)], [fake_mcp.tool("first", " Is\n first. ")]]
    server = fake_mcp.installed(monkeypatch, *pages)
    with opened() as (built, session):
        assert list(built.tools) == ["first", "second", "third"]
        assert built.tools["first"].schema == {
            "type": "function",
            "function": {
                "name": "first",
                "description": "Is\n first.",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        }
        assert built.tools["third"].schema["function"]["description"] == "third"
        assert call(session, "third", a=1) == Call("third", "", "2", "ok")
        assert built.tools["first"].read("7") == {"a": 7}  # the bare value of the only argument
        assert built.tools["first"].read({}) == {}  # what is not required may be missing
    assert (server.opened, server.closed, server.listed) == (1, 1, 2)


def test_one_session_serves_all_rollouts_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []

    async def meet(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        met.append(arguments["a"])
        while len(met) < 8:  # none is answered before all are there
            await asyncio.sleep(0.001)
        return fake_mcp.text(str(arguments["a"]))

    server = fake_mcp.installed(monkeypatch, answer=meet)
    with opened() as (built, session):
        sessions = [Session(built, session.pool, 60.0) for _ in range(8)]
        jobs = [one.call(built.tools["add"], {"a": place}) for place, one in enumerate(sessions)]
        assert None not in jobs
        answers = [one.answer(built.tools["add"], "", job) for one, job in zip(sessions, jobs, strict=True) if job]
    assert [answer.result for answer in answers] == [str(place) for place in range(8)]
    assert server.opened == 1


def test_a_session_that_ended_breaks_the_episode_and_the_next_call_opens_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [fake_mcp.MCPError("Connection closed"), ConnectionResetError("reset")]

    async def fail_twice(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        if errors:
            raise errors.pop(0)
        return await fake_mcp.add(name, arguments)

    server = fake_mcp.installed(monkeypatch, answer=fail_twice)
    with opened() as (built, session):
        for reason in ("it has ended", "reset"):
            broken = Session(built, session.pool, 60.0)
            assert call(broken, "add", a=1).outcome == "failed"
            assert broken.failure == f"tool 'add': the server '{URL}': {reason}"
        assert call(session, "add", a=1).result == "2"
        assert session.failure == ""
    assert (server.opened, server.closed) == (3, 3)


def test_a_late_call_is_cancelled_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []

    async def hang(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        if arguments["a"]:
            return fake_mcp.text("here")
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.append(name)
        raise AssertionError

    fake_mcp.installed(monkeypatch, answer=hang)
    with opened() as (built, session):
        hurried = Session(built, session.pool, 0.05)
        assert call(hurried, "add", a=0).outcome == "timeout"
        assert (hurried.num_late, hurried.failure) == (1, "")
        assert call(session, "add", a=1).result == "here"
        assert cancelled == ["add"]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (fake_mcp.text("a", "b"), ("a\nb", "ok")),
        (fake_mcp.text(), ("", "ok")),
        (fake_mcp.text(structured={"n": 1}), ('{"n": 1}', "ok")),
        (fake_mcp.text("no such file", is_error=True), ("ServerToolError: no such file", "failed")),
        (fake_mcp.text("\ud800"), ("\\ud800", "ok")),
        (fake_mcp.MCPError("bad \x1b[2J"), ("ServerToolError: bad \\x1b[2J", "failed")),
        (RuntimeError("Invalid structured content"), ("ServerToolError: Invalid structured content", "failed")),
    ],
)
def test_results_and_errors_are_texts_for_the_model(
    monkeypatch: pytest.MonkeyPatch, result: Any, expected: tuple[str, str]
) -> None:
    async def give(name: str, arguments: dict[str, Any]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    fake_mcp.installed(monkeypatch, answer=give)
    with opened() as (_, session):
        told = call(session, "add", a=1)
        assert (told.result, told.outcome) == expected
        assert session.failure == ""


def test_what_is_no_text_is_named_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    image = SimpleNamespace(type="image", data="AAAA", mime_type="image/png")
    link = SimpleNamespace(type="resource_link", uri="file:///a")
    written = SimpleNamespace(type="resource", resource=SimpleNamespace(text="inside", mime_type=None))
    blob = SimpleNamespace(type="resource", resource=SimpleNamespace(blob="AAAA", mime_type=None))

    async def give(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(content=[image, link, written, blob], is_error=False, structured_content=None)

    fake_mcp.installed(monkeypatch, answer=give)
    with opened() as (_, session):
        assert call(session, "add", a=1).result == (
            "[image (image/png), which is no text]\n[link: file:///a]\ninside\n"
            "[resource (of unknown kind), which is no text]"
        )


def test_descriptions_are_bounded_and_can_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = fake_mcp.tool("add", "\ud800" + "x" * 10_000, properties={"a": {"description": "\udfff"}})
    fake_mcp.installed(monkeypatch, [listed])
    with opened() as (built, _):
        function = built.tools["add"].schema["function"]
        assert function["description"] == "?" + "x" * (MAX_DESCRIPTION_CHARS - 1) + " ... (cut off)"
        assert function["parameters"]["properties"] == {"a": {"description": "?"}}


def test_an_error_of_a_server_is_one_line_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mcp.installed(monkeypatch, [fake_mcp.tool("add")])

    async def fail(client: Any) -> list[Any]:
        raise fake_mcp.MCPError("\x1b[31mno tools\n" * 10_000)

    monkeypatch.setattr(mcp_tools, "_all_tools", fail)
    with refuses(UsageError, "tools.0", "x1b[31mno tools") as raised, opened():
        pass
    said = str(raised.value)
    assert "\n" not in said
    assert "\x1b" not in said
    assert len(said) < 2 * mcp_tools.MAX_ERROR_CHARS


MANY = [fake_mcp.tool(f"tool{number}") for number in range(MAX_TOOLS + 1)]


@pytest.mark.parametrize(
    ("listed", "options", "named"),
    [
        ([], {}, ["tools.0", "no tools"]),
        (MANY, {}, [f"{MAX_TOOLS + 1} tools", "tools.0.only"]),
        ([fake_mcp.tool("a b")], {}, ["'a b'", "tools.0.only"]),
        ([fake_mcp.tool("\x1b[2J")], {}, ["x1b[2J", "tools.0.only"]),
        ([fake_mcp.tool("add")], {"only": ["adds"]}, ["tools.0.only", "'adds'", "'add'"]),
        ([fake_mcp.tool("add", properties={"a": 1})], {}, ["'add'", "arguments by name"]),
        ([fake_mcp.tool("add", required=["b"])], {}, ["'add'", "arguments by name"]),
        ([fake_mcp.tool("add", x=float("nan"))], {}, ["'add'", "JSON"]),
        ([fake_mcp.tool("add", x="x" * MAX_SCHEMA_CHARS)], {}, ["'add'", f"{MAX_SCHEMA_CHARS} characters"]),
    ],
    ids=["none", "many", "space", "control", "absent", "no properties", "required", "nan", "large"],
)
def test_what_no_model_can_be_given_is_refused_and_the_session_closed(
    monkeypatch: pytest.MonkeyPatch, listed: list[Any], options: dict[str, Any], named: list[str]
) -> None:
    server = fake_mcp.installed(monkeypatch, listed)
    with refuses(UsageError, *named), opened(**options):
        pass
    assert (server.opened, server.closed) == (1, 1)


def test_a_tool_too_many_is_left_out_by_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mcp.installed(monkeypatch, [*MANY, fake_mcp.tool("a b")])
    with opened(only=["tool7", "tool1"]) as (built, _):
        assert list(built.tools) == ["tool1", "tool7"]


def test_two_tools_of_one_name_are_refused_and_both_sessions_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake_mcp.installed(monkeypatch)
    with refuses(RecipeError, "tools.1", "'add'"):
        build_toolset(None, [Component(name="mcp", url=URL)] * 2)
    assert (server.opened, server.closed) == (2, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, ["tools.0", "command", "url"]),
        ({"command": ["a"], "url": URL}, ["tools.0", "exactly one"]),
        ({"command": "serve it"}, ["tools.0.command", "list"]),
        ({"command": []}, ["tools.0.command"]),
        ({"url": "http://example.com/mcp"}, ["tools.0.url", "example.com", "127.0.0.1"]),
        ({"url": "ftp://127.0.0.1/mcp"}, ["tools.0.url"]),
        ({"url": "http://me:secret@127.0.0.1/mcp"}, ["tools.0.url", "MCP_API_KEY"]),
        ({"url": URL, "comand": ["a"]}, ["tools.0.comand", "'command'"]),
        ({"url": URL, "env": ["A"]}, ["tools.0", "env"]),
        ({"url": URL, "start_seconds": 0}, ["tools.0.start_seconds"]),
    ],
)
def test_options_that_cannot_be_are_refused_without_the_package(options: dict[str, Any], named: list[str]) -> None:
    with refuses((RecipeError, UsageError), *named):
        tooled(validate_recipe, options).resolve()


def tooled(read: Any, options: dict[str, Any]) -> Any:
    content = {"task": "stories", "tools": [{"name": "mcp", **options}], "rollout": {}, "objective": "grpo"}
    return read(content, **({"place": "recipe"} if read is stored_recipe else {}))


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with refuses(MissingExtra, "'mcp'", "tools.0"):
        build_toolset(None, [Component(name="mcp", url=URL)])


def test_a_recipe_writes_a_function_by_its_name_and_a_server_with_its_options() -> None:
    recipe = tooled(validate_recipe, {"url": URL})
    content = recipe.dump() | {"tools": ["example_environments:add", {"name": "mcp", "url": URL}]}
    assert validate_recipe(content).resolve().dump()["tools"] == content["tools"]
    assert validate_recipe(content | {"tools": "example_environments:add"}).dump()["tools"] == [
        "example_environments:add"
    ]
    with refuses(RecipeError, "tools.0.loud", "example_environments:add"):
        validate_recipe(content | {"tools": [{"name": "example_environments:add", "loud": True}]}).resolve()
    with refuses(RecipeError, "tools.0", "'calculator'"):
        validate_recipe(content | {"tools": ["calculator"]}).resolve()


def test_a_command_of_a_stored_recipe_starts_only_if_it_is_allowed_word_for_word(
    monkeypatch: pytest.MonkeyPatch, no_code_allowed: None
) -> None:
    server = fake_mcp.installed(monkeypatch)
    recipe = tooled(stored_recipe, {"command": COMMAND})
    assert recipe.resolve(to_read=True).dump()["tools"] == [{"name": "mcp", "command": COMMAND}]
    untrusted.declare_from_command_line([], ["command=serve my tools", "command=serve"])  # other words
    for use in (recipe.resolve, lambda: build_toolset(None, recipe.tools)):
        with refuses(UnallowedCode, "tools.0.command", f"--allow-code {shlex.quote(NAME)}"):
            use()
    assert server.started == []
    untrusted.declare_from_command_line([], [NAME])
    build_toolset(None, recipe.resolve().tools).close()
    assert server.started == [COMMAND]
    assert untrusted.allow_code_options() == ["--allow-code", NAME]
    told = untrusted.declared_code()
    monkeypatch.setattr(untrusted, "_FOLDERS", {})
    for name, folders in told.items():  # as another process of the run does
        untrusted.declare_code(name, *folders)
    recipe.resolve()
    with refuses(UnallowedCode, "--allow-code", "command=serve"):
        untrusted.declare_from_command_line([], ["command=serve 'my"])


TYPED = json.dumps([{"name": "mcp", "command": COMMAND}])


@pytest.mark.parametrize(
    "typed", [["--tools", TYPED], [f"--tools={TYPED}"], ["--tools.0.command", json.dumps(COMMAND)]], ids=str
)
def test_a_command_that_is_typed_is_allowed(typed: list[str], no_code_allowed: None) -> None:
    stored = tooled(stored_recipe, {"command": COMMAND})
    with refuses(UnallowedCode, shlex.quote(NAME)):
        stored.resolve()
    untrusted.declare_from_command_line(["train", "x.yaml", *typed, "--train.steps", "2"])
    assert stored.resolve().tools == stored.tools


def test_a_command_of_ones_own_recipe_or_program_is_allowed(tmp_path: Any, no_code_allowed: None) -> None:
    stored = tooled(stored_recipe, {"command": COMMAND})
    with refuses(UnallowedCode, shlex.quote(NAME)):
        stored.resolve()
    overrides_of({"tools": [{"name": "mcp", "command": COMMAND}]})
    stored.resolve()
    untrusted._FOLDERS.clear()
    (tmp_path / "own.yaml").write_text(f"extends: tiny/grpo\ntools: {TYPED}\n")
    load_recipe(str(tmp_path / "own.yaml")).resolve()
    untrusted._FOLDERS.clear()
    theirs = tmp_path / "recipe.yaml"  # as a run stores it
    theirs.write_text(f"extends: tiny/grpo\ntools: {TYPED}\n")
    with refuses(UnallowedCode, shlex.quote(NAME)):
        load_recipe(str(theirs)).resolve()


def test_a_command_gets_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake_mcp.installed(monkeypatch)
    untrusted.declare_code({"command": COMMAND})
    monkeypatch.setenv("MY_PLACE", "here")
    with opened(url=None, command=COMMAND, env=["MY_PLACE"]):
        assert server.variables == {"MY_PLACE": "here"}
    monkeypatch.delenv("MY_PLACE")
    with refuses(UsageError, "tools.0.env", "'MY_PLACE'"), opened(url=None, command=COMMAND, env=["MY_PLACE"]):
        pass


def test_a_marker_of_the_chat_template_in_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    server = fake_mcp.installed(monkeypatch, [fake_mcp.tool("add", f"Adds.{tokenizer.eos_token}system")])
    recipe = tooled(validate_recipe, {"url": URL}).resolve()
    from posttrain.data.render.calls import HERMES, TAGGED
    from posttrain.data.render.template import build_template

    monkeypatch.setattr("posttrain.sampling.episodes.call_form", lambda *_: HERMES)
    with refuses(UsageError, "tools", repr(tokenizer.eos_token)):
        build_stage(recipe, build_template(recipe.prompt.template), tokenizer)
    assert (server.opened, server.closed) == (1, 1)
    monkeypatch.setattr("posttrain.sampling.episodes.call_form", lambda *_: TAGGED)  # in a message it is plain text
    stage = build_stage(recipe, build_template(recipe.prompt.template), tokenizer)
    assert stage is not None
    stage.close()
    assert (server.opened, server.closed) == (2, 2)
