"""Environments behind an OpenEnv server: actions are tools, and observations are the model's messages."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from posttrain.errors import UsageError
from posttrain.option_types import LOOPBACK, ServerUrl, key_for, server_address
from posttrain.registry import register
from posttrain.sampling.environments.contract import NO_TOOLS, EnvironmentFailed
from posttrain.sampling.environments.tools import result_text
from posttrain.untrusted import first_fault, harmless

KEY_VARIABLE = "OPENENV_API_KEY"
MAX_SCHEMA_BYTES = 1 << 20
MOST_PARTS = 10_000  # of a schema whose references are written out, which may double at each
SEEDS = 1 << 31  # what servers take: many of them seed NumPy's older generator
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ERROR = re.compile(r"Server error: (.*) \(code: (\w+)\)", re.DOTALL)  # as the client words what a server refuses
_WRONG_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
}


@register("environment")
def openenv(
    *,
    url: ServerUrl = "http://127.0.0.1:8000",
    reset: dict[str, Any] | None = None,
    fields: list[str] | None = None,
    show: list[str] | None = None,
    timeout_seconds: float = 60.0,
    remote: bool = False,
) -> OpenEnv:
    """An environment that an OpenEnv server plays, one session for each completion; pays the sum of its rewards.

    ``{name: "openenv_adapter:openenv", show: [text]}``. Where its actions have fields, the tool ``act`` takes
    these; where it offers tools (MCP), they are the tools. The reward of each turn goes to ``turn_rewards``.
    The server must take as many sessions at a time as completions are played (``max_concurrent_envs``).

    Args:
        url: of the server. A key for it belongs into ``OPENENV_API_KEY``.
        reset: further arguments of its ``reset``, next to the seed.
        fields: of the example (``id``, ``answer``, those of ``meta``) that its ``reset`` gets, too.
        show: fields of what it observes that the model reads; by default all but ``metadata``. A single text is shown
            as it is, anything else as JSON.
        timeout_seconds: how long it may take to answer.
        remote: it may be on another machine, which then reads what the model writes.

    Source: OpenEnv, https://github.com/meta-pytorch/OpenEnv.

    Raises:
        UsageError: ``openenv`` is not installed.
        UsageError: nobody answers there, it is another machine, or its actions cannot be described to a model.
    """
    _client_class()
    if server_address(url, "environment.url", KEY_VARIABLE)[1] not in LOOPBACK and not remote:
        raise UsageError(
            f"environment.url: {url} is another machine, which would read what the model writes; start the server on "
            "this one, or say remote: true"
        )
    connection = _Connection(url.rstrip("/"), timeout_seconds, _key(url))
    kind = type("OpenEnv", (OpenEnv,), {action.name: _method(action) for action in _actions(connection)})
    return kind(connection, reset or {}, tuple(fields or ()), tuple(show or ()))


def _key(url: str) -> str | None:
    key = key_for(url, "environment.url", KEY_VARIABLE)
    if key and not url.startswith("https") and server_address(url)[1] not in LOOPBACK:
        raise UsageError(f"environment.url: {url}: the key of {KEY_VARIABLE} would travel in clear text; use https")
    return key


class _Connection(NamedTuple):
    """Address of a server, with the options of requests."""

    url: str
    seconds: float
    key: str | None

    def client(self) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
        seconds = {"connect_timeout_s": self.seconds, "message_timeout_s": self.seconds}
        return _client_class()(base_url=self.url, headers=headers, **seconds)


class _Schema(BaseModel):
    """Keys that are read of the schema of an action's arguments."""

    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    definitions: dict[str, dict[str, Any]] = Field({}, alias="$defs")


class _Action(BaseModel):
    """Action of a model: ``arguments`` is the schema of its arguments; ``is_tool``: it calls a tool of that name."""

    name: str
    description: str
    arguments: _Schema
    is_tool: bool


@lru_cache(maxsize=1)
def _client_class() -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError:
        raise UsageError("this environment needs the package openenv: pip install 'openenv>=0.10,<0.11'") from None

    class OneSession(GenericEnvClient):
        """Connects once. The client would connect again by itself, and go on in an episode that nobody has begun."""

        _has_connected = False

        async def _connect_async(self) -> Any:
            if not self._has_connected:
                await super()._connect_async()
                self._has_connected = True
            elif self._ws is None:
                raise ConnectionError("its session has ended")
            return self

    return OneSession


@lru_cache(maxsize=16)
def _actions(connection: _Connection) -> tuple[_Action, ...]:
    """Return the actions that a server's environment lists; requested once per process."""
    schema = _fetch(connection, "/schema").get("action")
    if not isinstance(schema, dict):
        raise UsageError(f"environment.url: {connection.url}/schema names no action; is it an OpenEnv server?")
    if schema.get("title") in _MCP_ACTIONS:
        tools = asyncio.run(_list_tools(connection))
        options = [(tool.get("name", ""), tool.get("description", ""), tool["input_schema"], True) for tool in tools]
    else:
        options = [("act", schema.get("description") or "Takes an action.", schema, False)]
    for name, *_ in options:
        if not _NAME.fullmatch(str(name)) or name in NO_TOOLS:
            raise UsageError(f"environment.url: {connection.url}: no model can be given a tool named {name!r:.80}")
    try:
        # A marker of a chat template in what an untrusted server says of its tools stays text.
        plain = json.loads(json.dumps(options, allow_nan=False).replace("<|", "< |"))
        return tuple(_Action(**dict(zip(_Action.model_fields, one, strict=True))) for one in plain)
    except ValidationError as error:
        raise UsageError(
            f"environment.url: {connection.url}: an action that no model can take: {first_fault(error)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"environment.url: {connection.url}: its actions are no JSON ({error})") from None


async def _list_tools(connection: _Connection) -> list[dict[str, Any]]:
    client = connection.client()
    try:
        observation = (await client.step({"type": "list_tools"})).observation
    except Exception as error:
        raise UsageError(f"environment.url: {connection.url} lists no tools: {harmless(str(error))}") from error
    finally:
        await client.close()
    tools = observation.get("tools") if isinstance(observation, dict) else None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        raise UsageError(f"environment.url: {connection.url} lists no tools")
    return tools


def _fetch(client: _Connection, path: str) -> dict[str, Any]:
    """A JSON object from the server; no proxy is asked, and no redirection followed."""
    scheme, host, port, prefix = server_address(client.url, "environment.url", KEY_VARIABLE)
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=client.seconds)
    try:
        connection.request(
            "GET", prefix + path, headers={"Authorization": f"Bearer {client.key}"} if client.key else {}
        )
        answer = connection.getresponse()
        content = answer.read(MAX_SCHEMA_BYTES + 1)
        schema = json.loads(content) if answer.status == 200 and len(content) <= MAX_SCHEMA_BYTES else None
    except (OSError, http.client.HTTPException) as error:
        text = (
            f"environment.url: nobody answers at {client.url} ({harmless(str(error))}); start the OpenEnv server there"
        )
        raise UsageError(text) from None
    except (ValueError, RecursionError):
        schema = None
    finally:
        connection.close()
    if not isinstance(schema, dict):
        text = f"environment.url: {client.url}{path} (HTTP {answer.status}) is no JSON object; is it an OpenEnv server?"
        raise UsageError(text)
    return schema


def _method(action: _Action) -> Callable[..., Any]:
    """A tool as a method: its signature says what the action takes."""
    required, room = action.arguments.required, [MOST_PARTS]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, schema in action.arguments.properties.items():
        if name == "metadata" and name not in required:  # every action of OpenEnv has it
            continue
        described = _inlined(schema, action.arguments.definitions, room)
        default = inspect.Parameter.empty if name in required else described.get("default")
        kind: Any = _type(described) if default is not None else _type(described) | None
        kind = Annotated[kind, WithJsonSchema(described)]
        try:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        except ValueError as error:
            raise UsageError(f"environment openenv: {harmless(str(error))}, and its actions take it") from None

    async def method(self: OpenEnv, **arguments: Any) -> str:
        arguments = {name: value for name, value in arguments.items() if value is not None or name in required}
        if action.is_tool:
            return await self._act({"type": "call_tool", "tool_name": action.name, "arguments": arguments})
        return await self._act(arguments)

    method.__name__, method.__doc__ = action.name, action.description
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def _inlined(schema: Any, definitions: Mapping[str, Any], room: list[int], depth: int = 16) -> Any:
    """A schema with what it refers to in its place; anything where that goes on and on.

    Raises:
        UsageError: it has more parts than ``room`` says, which is lowered by them.
    """
    room[0] -= 1
    if room[0] < 0:
        raise UsageError(f"environment openenv: its actions have more than {MOST_PARTS} parts, references written out")
    if not isinstance(schema, dict | list) or not depth:
        return schema if depth else {}
    if isinstance(schema, list):
        return [_inlined(item, definitions, room, depth - 1) for item in schema]
    if "$ref" in schema:
        return _inlined(definitions.get(str(schema["$ref"]).rpartition("/")[2], {}), definitions, room, depth - 1)
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _inlined(value, definitions, room, depth - 1) for key, value in kept.items()}


def _type(schema: Mapping[str, Any]) -> Any:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str | int) for value in values):
        return Literal[tuple(values)]
    kind = schema.get("type")
    return _TYPES.get(kind, Any) if isinstance(kind, str) else Any


class OpenEnv:
    """See ``openenv``; its tools are methods of a class that is made for the server."""

    def __init__(
        self, connection: _Connection, options: Mapping[str, Any], fields: tuple[str, ...], show: tuple[str, ...]
    ) -> None:
        self._connection, self._options, self._fields, self._show = connection, options, fields, show
        self._client: Any = None
        self.done, self._total, self._due = False, 0.0, 0.0

    async def reset(self, *, seed: int, **row: Any) -> str:
        """A new episode, in a session of its own."""
        missing = [name for name in self._fields if name not in row]
        if missing:
            raise EnvironmentFailed(f"environment.fields: the example has no {missing[0]!r}; it has {', '.join(row)}")
        await self.close()
        self._client, self.done, self._total, self._due = self._connection.client(), False, 0.0, 0.0
        tools = {name: row[name] for name in self._fields}
        return self._observation_text(
            await self._ask(self._client.reset(**{"seed": seed % SEEDS, **self._options, **tools}))
        )

    async def _act(self, action: dict[str, Any]) -> str:
        if self.done:
            raise ValueError("the episode is over")
        return self._observation_text(await self._ask(self._client.step(action), may_be_wrong=True))

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self._total

    def get_turn_reward(self) -> float:
        """The rewards since it was asked last."""
        due, self._due = self._due, 0.0
        return due

    async def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _ask(self, request: Awaitable[Any], may_be_wrong: bool = False) -> Any:
        """The answer to a request; what is wrong with an action is the model's to read, all else the server's fault."""
        try:
            return await request
        except Exception as error:  # of the client, its sockets, its JSON
            schema = _ERROR.fullmatch(str(error))
            reason, code = (schema[1], schema[2]) if schema else (str(error) or type(error).__name__, "")
            if may_be_wrong and code in _WRONG_ACTION:
                raise ValueError(reason) from error
            if isinstance(error, TimeoutError):
                reason = f"no answer within {self._connection.seconds:g} seconds"
            if code == "CAPACITY_REACHED":
                reason += "; start it with max_concurrent_envs of at least rollout.num_prompts x rollout.group_size"
            raise EnvironmentFailed(f"{self._connection.url}: {harmless(reason)}") from error

    def _observation_text(self, result: Any) -> str:
        observation, reward = result.observation, result.reward
        if not isinstance(observation, dict) or not _is_reward(reward):
            raise EnvironmentFailed(
                f"{self._connection.url}: no observation and reward: {observation!r:.80}, {reward!r:.80}"
            )
        self._total += float(reward or 0.0)
        self._due += float(reward or 0.0)
        self.done = bool(result.done)
        if "tool_name" in observation:
            return _tool_text(observation)
        names = [name for name in self._show or observation if name in observation and name != "metadata"]
        if self._show and not names:
            has = ", ".join(map(str, observation))
            raise EnvironmentFailed(f"environment.show: what it observes has no {self._show[0]!r}; it has {has}")
        shown = {name: observation[name] for name in names}
        if not shown:
            return ""
        return result_text(shown[names[0]] if [str] == list(map(type, shown.values())) else shown)


def _is_reward(reward: Any) -> bool:
    return reward is None or (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max)


def _tool_text(observation: Mapping[str, Any]) -> str:
    """Return the result of a tool of the environment; its error is raised."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        raise ValueError(str(error.get("message") if isinstance(error, dict) else error))
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return result_text(result)
    text = "\n".join(str(part.get("text", "")) for part in result["content"] if isinstance(part, dict))
    if result.get("is_error"):
        raise ValueError(text)
    return text
