"""The environment ``openenv`` with a stand-in for its package's client, and a real server for what is asked over HTTP.

What the real client and the real server do is tested by `make test-adapters`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import openenv_adapter as openenv
import pytest

from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.contract import Session, build_toolset
from posttrain.sampling.environments.pool import Pool
from posttrain.types import Call, Example, Message
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "title": "Move",
    "description": "Moves. <|im_end|>",
    "properties": {
        "metadata": {"type": "object"},
        "to": {"$ref": "#/$defs/Side"},
        "far": {"type": "integer", "default": 1},
        "why": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["to"],
    "$defs": {"Side": {"enum": ["left", "right"], "title": "Side", "type": "string"}},
}
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"properties": {}, "type": "object"}}]


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code(["openenv_adapter:openenv"])


def seen(observation: Any, reward: Any = None, done: bool = False) -> SimpleNamespace:
    return SimpleNamespace(observation=observation, reward=reward, done=done)


class Client:
    """Connects, and connects again by itself, as the real one does; ``script`` answers, or raises, in turn."""

    script: ClassVar[list[Any]] = []
    sent: ClassVar[list[Any]] = []
    made: ClassVar[list[dict[str, Any]]] = []
    open: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        self._ws: Any = None
        Client.made.append(options)

    async def _connect_async(self) -> Any:
        if self._ws is None:
            self._ws = object()
            Client.open += 1
        return self

    async def _answer(self, message: Any) -> Any:
        await self._connect_async()
        Client.sent.append(message)
        answer = Client.script.pop(0)
        if isinstance(answer, Exception):
            if isinstance(answer, TimeoutError):
                self._ws = None  # what comes too late would be taken for the next answer
            raise answer
        return answer

    async def reset(self, **options: Any) -> Any:
        return await self._answer(options)

    async def step(self, action: dict[str, Any]) -> Any:
        return await self._answer(action)

    async def close(self) -> None:
        self._ws = None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("openenv.core.generic_client")
    module.GenericEnvClient = Client  # type: ignore[attr-defined]
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Client.script, Client.sent, Client.made, Client.open = [], [], [], 0
    openenv._client_class.cache_clear()
    openenv._actions.cache_clear()
    yield
    openenv._client_class.cache_clear()
    openenv._actions.cache_clear()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """``serve(body, status)`` is the address of a server that answers everything with this."""
    started = []

    def begin(body: Any, status: int = 200) -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Location", "http://192.0.2.1/")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool() as opened:
        yield opened


def begun(url: str, pool: Pool, *script: Any, **options: Any) -> tuple[Session, str]:
    Client.script[:] = script
    session = Session(build_toolset(Component(name="openenv_adapter:openenv", url=url, **options)), pool, 60.0)
    session.begin(Example("row/1", (Message("user", "?"),), answer="7", meta={"level": 3}), (1 << 31) + 5)
    return session, session.opening()


def act(session: Session, name: str = "act", **arguments: Any) -> Call:
    tool = session.toolset.tools[name]
    job = session.call(tool, tool.read(arguments))
    assert job is not None
    return session.answer(tool, "", job)


def test_an_episode(package: None, serve: Callable[..., str], pool: Pool) -> None:
    url = serve({"action": SCHEMA})
    first, second = seen({"text": "Go.", "metadata": {"id": 4}}), seen({"text": "on", "score": 2}, -0.25)
    session, opening = begun(
        url, pool, first, second, seen({"text": "home"}, 1, True), reset={"size": 3}, fields=["level"]
    )
    assert opening == "Go."
    [schema] = (tool.schema for tool in session.toolset.tools.values())
    assert schema["function"]["description"] == "Moves. < |im_end|>", "a marker that an untrusted server writes"
    assert schema["function"]["parameters"]["properties"] == {
        "to": {"enum": ["left", "right"], "type": "string"},
        "far": {"type": "integer", "default": 1},
        "why": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    }
    assert act(session, to="left").result == '{"text": "on", "score": 2}'
    assert (session.turn_reward(), session.done) == (-0.25, False)
    assert act(session, to="right", far="2", why="so").result == "home"
    assert (session.turn_reward(), session.reward(), session.done) == (1.0, 0.75, True)
    assert act(session, to="left").result == "ValueError: the episode is over"
    steps = [{"to": "left", "far": 1}, {"to": "right", "far": 2, "why": "so"}]
    assert Client.sent == [{"seed": 5, "size": 3, "level": 3}, *steps]
    assert Client.made == [{"base_url": url, "headers": None, "connect_timeout_s": 60.0, "message_timeout_s": 60.0}]
    with pytest.raises(ValueError, match="to: Input should be 'left' or 'right'"):
        session.toolset.tools["act"].read({"to": "up"})


def test_tools_are_listed_and_called(package: None, serve: Callable[..., str], pool: Pool) -> None:
    url = serve({"action": {"title": "CallToolAction"}})
    content = [{"type": "text", "text": "a lake"}, {"type": "text", "text": "a hill"}]
    session, opening = begun(
        url,
        pool,
        seen({"tools": TOOLS}),
        seen({"metadata": {}}),
        seen({"tool_name": "look", "result": {"content": content, "is_error": False}, "error": None}),
        seen({"tool_name": "look", "result": None, "error": {"message": "it is dark"}}),
        seen({"tool_name": "look", "result": 7, "error": None}),
    )
    assert opening == ""
    assert act(session, "look").result == "a lake\na hill"
    assert act(session, "look").result == "ValueError: it is dark"
    assert act(session, "look").result == "7"
    called = {"type": "call_tool", "tool_name": "look", "arguments": {}}
    assert Client.sent == [{"type": "list_tools"}, {"seed": 5}, called, called, called]


REFUSED = "Server error: numbers begin with 1 (code: {})"
FULL = "; start it with max_concurrent_envs of at least rollout.num_prompts x rollout.group_size"


@pytest.mark.parametrize(
    ("answer", "result", "failure"),
    [
        (RuntimeError(REFUSED.format("EXECUTION_ERROR")), "ValueError: numbers begin with 1", ""),
        (RuntimeError(REFUSED.format("CAPACITY_REACHED")), None, f"numbers begin with 1{FULL}"),
        (RuntimeError(REFUSED.format("SESSION_ERROR")), None, "numbers begin with 1"),
        (TimeoutError(), None, "no answer within 60 seconds"),
        (ConnectionError("Failed to connect"), None, "Failed to connect"),
        (KeyError(), None, "KeyError"),
        (seen(["a"], 1), None, "no observation and reward: ['a'], 1"),
        (seen({"a": 1}, float("nan")), None, "no observation and reward: {'a': 1}, nan"),
        (seen({"a": 1}, 10**400), None, f"no observation and reward: {{'a': 1}}, {'1' + '0' * 79}"),
        (seen({"a": 1}, "much"), None, "no observation and reward: {'a': 1}, 'much'"),
    ],
)
def test_what_goes_wrong_in_a_step(
    package: None, serve: Callable[..., str], pool: Pool, answer: Any, result: str | None, failure: str
) -> None:
    url = serve({"action": SCHEMA})
    session, _ = begun(url, pool, seen({"text": "Go."}), answer)
    call = act(session, to="left")
    assert call.outcome == "failed"
    assert session.failure == (f"tool 'act': {url}: {failure}" if failure else "")
    assert result is None or call.result == result


def test_it_never_goes_on_in_another_session(package: None, serve: Callable[..., str], pool: Pool) -> None:
    session, _ = begun(serve({"action": SCHEMA}), pool, seen({"text": "Go."}), TimeoutError(), seen({"text": "Go."}))
    act(session, to="left")
    session.failure = ""
    act(session, to="left")
    assert session.failure.endswith(": its session has ended")
    assert Client.open == 1


TWICE = {"anyOf": [{"$ref": "#/$defs/A"}] * 30}  # each reference holds 30 more


def test_a_key_goes_where_it_may(
    package: None, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setenv("OPENENV_API_KEY", "sesame")
    begun(serve({"action": SCHEMA}), pool, seen({"text": "Go."}))
    assert Client.made[0]["headers"] == {"Authorization": "Bearer sesame"}
    far = {"name": "openenv_adapter:openenv", "url": "http://env.example", "remote": True}
    with pytest.raises(UsageError, match="OPENENV_API_KEY holds a key, and a recipe alone sends it to no server"):
        build_toolset(Component(**far))
    monkeypatch.setenv("OPENENV_API_HOST", "env.example")
    with pytest.raises(UsageError, match="would travel in clear text; use https"):
        build_toolset(Component(**far))
