"""Tools of a recipe: functions, and servers that offer tools."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from posttrain.errors import RecipeError
from posttrain.option_types import LOOPBACK, Options, server_address
from posttrain.recipes.sections import Component
from posttrain.registry import explain_validation

MCP = "mcp"
KEY_VARIABLE = "MCP_API_KEY"
_Word = Annotated[str, Field(min_length=1, max_length=4096)]


class McpServer(Options):
    """A server of the Model Context Protocol on this machine, whose tools a completion may call.

    Args:
        command: words of the command that starts it; it speaks over its standard input and output.
        url: of one that runs already and speaks streamable HTTP; a key for it belongs into ``MCP_API_KEY``.
        only: the tools that the model gets, by name; by default all.
        env: names of environment variables that the command gets, next to ``PATH``, ``HOME`` and ``USER``.
        start_seconds: how long it may take to start and list its tools.
    """

    name: Literal["mcp"] = "mcp"
    command: Annotated[list[_Word], Field(min_length=1, max_length=256)] | None = None
    url: str | None = None
    only: Annotated[list[_Word], Field(min_length=1)] | None = None
    env: list[_Word] = Field(default_factory=list)
    start_seconds: float = Field(default=30.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("mcp", "give exactly one of command (words that start it) and url")
        if self.env and self.command is None:
            raise PydanticCustomError("mcp", "env is for a command; one that runs already has its own, so leave it out")
        return self

    @property
    def shown(self) -> str:
        """Its command as a shell reads it, or its address."""
        if self.command is not None:
            return shlex.join(self.command)
        return str(self.url)


def read_server(component: Component, where: str) -> McpServer:
    """Return the options of a server of tools; ``where``: its key, such as ``tools.0``.

    Raises:
        RecipeError: no such kind of server, or options that cannot be.
        UsageError: a URL that is none, or leads to another machine.
    """
    if component.name != MCP:
        raise RecipeError(
            f"{where}: a tool is a function of your own, named as module:function, or a server of tools, "
            f"as {{name: mcp, command: [python, server.py]}}; got {component.name!r:.80}"
        )
    try:
        server = McpServer.model_validate(component.options)
    except ValidationError as error:
        known = list(McpServer.model_fields)
        raise RecipeError(explain_validation(error, known, where, "a server of tools")) from None
    if server.url is not None and server_address(server.url, f"{where}.url", KEY_VARIABLE)[1] not in LOOPBACK:
        raise RecipeError(
            f"{where}.url: {server.url} is another machine, which would read what the model writes; give one of this "
            "machine, as http://127.0.0.1:8000/mcp"
        )
    return server


def is_function(tool: Component, where: str) -> bool:
    """Return True for a function of one's own.

    Raises:
        RecipeError: one with options, which belong to servers.
    """
    if ":" not in tool.name:
        return False
    if tool.options:
        key = next(iter(tool.options))
        raise RecipeError(f"{where}.{key}: the function {tool.name!r} has no options in a recipe; leave {key!r} out")
    return True


def plain_tools(tools: Sequence[Component]) -> list[str | Mapping[str, object]]:
    """Return tools as a recipe writes them: a function by its name, a server with its options."""
    plain: list[str | Mapping[str, object]] = []
    for tool in tools:
        if tool.options:
            plain.append({"name": tool.name, **tool.options})
        else:
            plain.append(tool.name)
    return plain
