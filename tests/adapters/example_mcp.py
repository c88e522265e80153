"""A server of the Model Context Protocol for the tests: on standard input, or `python example_mcp.py PORT`."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("example")


@server.tool()
def add(a: int, b: int = 0) -> int:
    """Adds two whole numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


@server.tool()
def process() -> int:
    """Says which process this is."""
    return os.getpid()


@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    print("out of \x1b[31mmemory", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def draw() -> list[str | Image]:
    """Draws."""
    return ["a dot", Image(data=b"1234", format="png")]


@server.tool()
def much(characters: int) -> str:
    """Says much."""
    return "x" * characters


if __name__ == "__main__":
    print("example server", os.getpid(), file=sys.stderr, flush=True)
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
