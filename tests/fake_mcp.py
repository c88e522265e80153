"""A stand-in for the package `mcp`: sessions of this process, for tests that need no server.

`installed(monkeypatch, tools)` puts it in the place of the package and returns what it was asked to start.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class MCPError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def tool(name: str, description: str | None = "Does it.", **schema: Any) -> SimpleNamespace:
    """Return a tool as a server lists it."""
    whole = {"type": "object", "title": f"{name}Arguments", "properties": {"a": {"title": "A", "type": "integer"}}}
    return SimpleNamespace(name=name, description=description, title=None, input_schema=whole | schema)


def text(*texts: str, is_error: bool = False, structured: object = None) -> SimpleNamespace:
    """Return a result as a server gives it."""
    blocks = [SimpleNamespace(type="text", text=one) for one in texts]
    return SimpleNamespace(content=blocks, is_error=is_error, structured_content=structured)


@dataclass
class FakeServer:
    """``pages``: of its list of tools. ``answer``: what a call gives. ``opened`` and ``closed``: sessions."""

    pages: Sequence[Sequence[SimpleNamespace]]
    answer: Callable[[str, dict[str, Any]], Awaitable[Any]]
    started: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0
    listed: int = 0


class _Client:
    def __init__(self, server: FakeServer) -> None:
        self.server = server

    async def __aenter__(self) -> _Client:
        self.server.opened += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self.server.closed += 1

    async def list_tools(self, *, cursor: str | None) -> SimpleNamespace:
        self.server.listed += 1
        at = int(cursor or 0)
        following = str(at + 1) if at + 1 < len(self.server.pages) else None
        return SimpleNamespace(tools=self.server.pages[at], next_cursor=following)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self.server.answer(name, arguments)


async def add(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
    return text(str(arguments["a"] + 1))


def installed(
    monkeypatch: pytest.MonkeyPatch,
    *pages: Sequence[SimpleNamespace],
    answer: Callable[[str, dict[str, Any]], Awaitable[Any]] = add,
) -> FakeServer:
    server = FakeServer(pages or [[tool("add")]], answer)

    def parameters(command: str, args: list[str], env: dict[str, str]) -> list[str]:
        server.started.append([command, *args])
        server.variables = env
        return [command, *args]

    @asynccontextmanager
    async def transport(*given: Any, **options: Any) -> AsyncIterator[None]:
        yield

    modules = {
        name: ModuleType(name) for name in ("mcp", "mcp.client", "mcp.client.stdio", "mcp.client.streamable_http")
    }
    vars(modules["mcp"]).update(MCPError=MCPError, StdioServerParameters=parameters, Client=lambda _: _Client(server))
    vars(modules["mcp.client.stdio"])["stdio_client"] = transport
    vars(modules["mcp.client.streamable_http"])["streamable_http_client"] = transport
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return server
