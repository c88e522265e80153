"""Tools of a Model Context Protocol server on this machine: a command that is started here, or a loopback address.

Source: https://modelcontextprotocol.io, through the package ``mcp``. Names, descriptions, schemas and results are
untrusted text: bounded, and never more than text to the model.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from posttrain.errors import MissingExtra, UsageError
from posttrain.option_types import key_for
from posttrain.recipes.tool_servers import KEY_VARIABLE, McpServer
from posttrain.registry import suggest
from posttrain.sampling.environments.tools import EnvironmentFailed, Tool, properties_of, shortened
from posttrain.sampling.http import open_client
from posttrain.untrusted import cut_end, harmless, prepare_command

MAX_TOOLS = 128
MAX_PAGES = 100  # of a server's list of tools
MAX_DESCRIPTION_CHARS = 4_096
MAX_SCHEMA_CHARS = 16_384
MAX_ERROR_CHARS = 1_000  # of an error while its tools are listed
MAX_WRITTEN_BYTES = 2_048  # of what a command writes on standard error, its end
CLOSE_SECONDS = 10.0  # until a command that does not end is left to the package, which kills it
_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_CLOSED = "Connection closed"  # the package's words for the end of a session

Result = TypeVar("Result")


class ServerToolError(Exception):
    """Error that a server reports of a call; the model reads it."""


class WrittenEnd:
    """End of what a command writes on its standard error, which nothing else shows."""

    def __init__(self) -> None:
        self._bytes = b""

    def open(self) -> TextIO:
        """Return a file to write to, and read what arrives in a thread until the last writer has closed it."""
        reading, writing = os.pipe()
        threading.Thread(target=self._read, args=(reading,), name="server errors", daemon=True).start()
        return os.fdopen(writing, "w")

    @property
    def line(self) -> str:
        """Its last line that is not empty; of a traceback that is the error."""
        lines = self._bytes.decode(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if not written:
            return ""
        return cut_end(written[-1], 500)

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as stream:
            while written := stream.read(65_536):
                self._bytes = (self._bytes + written)[-MAX_WRITTEN_BYTES:]


class _Session:
    """A session that is open or being opened.

    ``holder``: the task in which the package opens and closes it. ``limit``: of the time to open it.
    """

    def __init__(self, hold: Callable[[_Session], Coroutine[Any, Any, None]], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Any] = loop.create_future()
        self.closing = asyncio.Event()
        self.limit = asyncio.timeout(seconds)
        self.holder = loop.create_task(hold(self))
        self.holder.add_done_callback(_note_error)

    def end(self) -> None:
        """Begin to close it. What is not open yet is given up, once: a second time would break off the closing."""
        self.closing.set()
        if not self.opened.done():
            with suppress(RuntimeError):  # its time is over, or has not begun
                self.limit.reschedule(asyncio.get_running_loop().time())


class McpConnection:
    """A session with one server, for all rollouts of this process, in an event loop and a thread of its own.

    Calls run at the same time. The call after a session's end begins a new one, for which a command is started anew.
    """

    def __init__(self, server: McpServer, where: str) -> None:
        self.server = server
        self.where = where
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: _Session | None = None
        self._sessions: list[_Session] = []  # that one, and earlier ones that may not be closed yet
        self._written = WrittenEnd()
        self._shown = cut_end(server.shown, 200)

    def list_tools(self) -> list[Tool]:
        """Return the server's tools in the order of their names, which does not depend on the server.

        Raises:
            UsageError: the server cannot be started or reached, or lists what no model can be given.
        """
        listed = asyncio.run_coroutine_threadsafe(self._list(), self._running_loop())
        try:
            tools = listed.result()
        except (EnvironmentFailed, ServerToolError) as error:
            self.close()
            raise UsageError(f"{self.where}: {cut_end(' '.join(str(error).split()), MAX_ERROR_CHARS)}") from None
        try:
            return [self._make_tool(tool) for tool in self._chosen(tools)]
        except UsageError:
            self.close()
            raise

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the text of a tool's result; called in this connection's loop.

        Raises:
            ServerToolError: the tool or the server refuses the call.
            EnvironmentFailed: the server is gone.
        """
        result = await self._ask(lambda client: client.call_tool(name, dict(arguments)))
        text = _text_of(result.content, result.structured_content)
        if result.is_error:
            raise ServerToolError(text)
        return text

    def close(self) -> None:
        """End the session, and with it a command that was started; a later call begins another."""
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is None:
            return
        atexit.unregister(self.close)
        ended = asyncio.run_coroutine_threadsafe(self._end(), loop)
        with suppress(TimeoutError):
            ended.result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="tool server", daemon=True).start()
                atexit.register(self.close)
            return self._loop

    async def _end(self) -> None:
        self._session = None
        for session in self._sessions:
            session.end()
        if self._sessions:
            await asyncio.wait({session.holder for session in self._sessions})
        self._sessions = []

    async def _ask(self, request: Callable[[Any], Awaitable[Result]]) -> Result:
        """Return what the server answers to a request."""
        from mcp import MCPError

        session = await self._connected()
        asked = asyncio.ensure_future(request(session.opened.result()))
        try:
            await asyncio.wait({asked, session.holder}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise self._failure(session, None)
            return asked.result()
        except MCPError as error:
            if error.message == _CLOSED:
                raise self._failure(session, error) from None
            raise ServerToolError(harmless(error.message)) from None
        except OSError as error:
            raise self._failure(session, error) from None
        except (RuntimeError, ValueError) as error:  # a result that is not as its schema says
            raise ServerToolError(harmless(str(error))) from None
        finally:
            asked.cancel()

    async def _connected(self) -> _Session:
        """Return the open session, or open one; a call that is given up leaves the opening to others."""
        session = self._session
        if session is None:
            session = _Session(self._hold, self.server.start_seconds)
            self._session = session
            self._sessions = [one for one in self._sessions if not one.holder.done()]
            self._sessions.append(session)
        await asyncio.wait({session.opened, session.holder}, return_when=asyncio.FIRST_COMPLETED)
        if session.holder.done():
            raise self._failure(session, None)
        return session

    async def _hold(self, session: _Session) -> None:
        """Open the session, keep it open, and close it, in one task as the package wants it."""
        async with AsyncExitStack() as stack:
            async with session.limit:
                client = await stack.enter_async_context(await self._client(stack))
            session.opened.set_result(client)
            await session.closing.wait()

    async def _client(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)  # it prints what a server writes, raw
        if self.server.command is None:
            url = self.server.shown
            key = key_for(url, f"{self.where}.url", KEY_VARIABLE)
            headers = {}
            if key:
                headers["Authorization"] = f"Bearer {key}"
            http = await stack.enter_async_context(open_client(headers))
            return Client(streamable_http_client(url, http_client=http))
        command, *arguments = self.server.command
        variables = {name: os.environ[name] for name in self.server.env}
        parameters = StdioServerParameters(command=command, args=arguments, env=variables)
        errors = stack.enter_context(self._written.open())
        return Client(stdio_client(parameters, errlog=errors))

    def _failure(self, session: _Session, error: BaseException | None) -> EnvironmentFailed:
        """Give the session up, and return what happened to it; ``error``: None where its task says it."""
        if self._session is session:
            self._session = None
        session.end()
        if error is None and session.holder.done() and not session.holder.cancelled():
            error = session.holder.exception()
        reason = _reason(error, self.server.start_seconds)
        if self._written.line:
            reason += f"; it wrote: {self._written.line}"
        return EnvironmentFailed(f"the server {self._shown!r}: {harmless(reason)}")

    async def _list(self) -> list[Any]:
        seconds = self.server.start_seconds
        try:
            async with asyncio.timeout(2 * seconds):  # to open the session, and to list them
                return await self._ask(_all_tools)
        except TimeoutError:
            raise EnvironmentFailed(
                f"the server {self._shown!r}: it lists no tools within {seconds:g} seconds ({self.where}.start_seconds)"
            ) from None

    def _chosen(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools that the model gets, by name.

        Raises:
            UsageError: none, too many, or one that the server does not have.
        """
        by_name = {str(tool.name): tool for tool in tools}
        for name in self.server.only or ():
            if name not in by_name:
                known = ", ".join(sorted(by_name)[:MAX_TOOLS])
                raise UsageError(
                    harmless(
                        f"{self.where}.only: the server has no tool {name!r}.{suggest(name, by_name)} It has: {known}"
                    )
                )
        chosen = sorted(self.server.only or by_name)
        if not chosen:
            raise UsageError(f"{self.where}: the server {self._shown!r} has no tools; give one that has")
        if len(chosen) > MAX_TOOLS:
            raise UsageError(
                f"{self.where}: the server has {len(chosen)} tools, and a model gets at most {MAX_TOOLS}; name those "
                f"that it needs: {self.where}.only"
            )
        return [by_name[name] for name in chosen]

    def _make_tool(self, listed: Any) -> Tool:
        name = listed.name
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{self.where}: no model can be given a tool named {harmless(name)!r:.80}; name the others: "
                f"{self.where}.only"
            )
        text = listed.description or listed.title or name
        function = {
            "name": name,
            "description": shortened(_encodable(text.strip()), MAX_DESCRIPTION_CHARS),
            "parameters": self._parameters(name, listed.input_schema),
        }

        async def call(**arguments: object) -> str:
            answer = asyncio.run_coroutine_threadsafe(self.call(name, arguments), self._running_loop())
            return await asyncio.wrap_future(answer)

        return Tool(name, {"type": "function", "function": function}, call)

    def _parameters(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of a tool's arguments, without titles, which repeat their names."""
        try:
            written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            written = ""
        if not 0 < len(written) <= MAX_SCHEMA_CHARS:
            raise UsageError(
                f"{self.where}: the schema of the tool {name!r} has more than {MAX_SCHEMA_CHARS} characters, or no "
                f"JSON; name the others: {self.where}.only"
            )
        plain: dict[str, Any] = json.loads(_encodable(written))
        for key in ("title", "$schema"):
            plain.pop(key, None)
        properties = properties_of({"function": {"parameters": plain}})
        required = plain.get("required", [])
        is_named = isinstance(required, list) and all(one in properties for one in required)
        if not is_named or not all(isinstance(one, dict) for one in properties.values()):
            raise UsageError(
                f"{self.where}: the schema of the tool {name!r} describes no arguments by name; name the others: "
                f"{self.where}.only"
            )
        kept = {}
        for key, one in properties.items():
            kept[key] = {part: value for part, value in one.items() if part != "title"}
        return {"type": "object", **plain, "properties": kept}


@dataclass(frozen=True)
class ServedTools:
    """The tools of a server, and its connection, which is to be closed."""

    tools: Sequence[Tool]
    connection: McpConnection


def serve_tools(server: McpServer, where: str) -> ServedTools:
    """Connect with a server of tools, starting it if it is a command; ``where``: its key in the recipe.

    Raises:
        UnallowedCode: a stored recipe names the command, and nobody allowed it.
        UsageError: ``mcp`` is not installed, or the server cannot be used.
    """
    if server.command is not None:
        prepare_command(server.command, f"{where}.command")
    for name in server.env:
        if name not in os.environ:
            raise UsageError(f"{where}.env: there is no environment variable {name!r:.80}; set it, or leave it out")
    try:
        import mcp.client.stdio
    except ImportError:
        raise MissingExtra("mcp", "mcp", f"{where}: a server of the Model Context Protocol") from None
    del mcp
    connection = McpConnection(server, where)
    return ServedTools(connection.list_tools(), connection)


def _note_error(task: asyncio.Task[None]) -> None:
    """Take note of a task's error, which asyncio prints otherwise: a call has said it, or nobody needs the session."""
    if not task.cancelled():
        task.exception()


async def _all_tools(client: Any) -> list[Any]:
    """Return what a server lists, page by page."""
    tools: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _reason(error: BaseException | None, start_seconds: float) -> str:
    """Return the innermost of an error in groups, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None or str(error) == _CLOSED:
        return "it has ended"
    if isinstance(error, TimeoutError):
        return f"no answer within {start_seconds:g} seconds"
    if isinstance(error, FileNotFoundError):
        return "there is no such command"
    return str(error) or type(error).__name__


def _text_of(blocks: Sequence[Any], structured: object) -> str:
    """Return a result for the model; what is no text is named in its place."""
    if not blocks and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(_block_text(block) for block in blocks)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[link: {block.uri}]"
    held = block
    if block.type == "resource":
        held = block.resource
        text = getattr(held, "text", None)
        if isinstance(text, str):
            return text
    return f"[{block.type} ({held.mime_type or 'of unknown kind'}), which is no text]"


def _encodable(text: str) -> str:
    """Return text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()
