"""Who may ask a server on this machine, and how one is run: an ASGI layer around its application.

A page in a browser can send requests to this machine: across origins, or under a name of its own that it points to
127.0.0.1 (DNS rebinding). The ``Doorway`` lets a request pass if its ``Host`` is a name of this server and its
``Origin``, where it has one, is this server too. All others are refused with 403 before the application sees them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from posttrain.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[str, str]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WILDCARDS = ("0.0.0.0", "::")
PROTECTED = [
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
TEXT = (b"content-type", b"text/plain; charset=utf-8")
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,256}")


def choose_token(asked: str | None, option: str = "--token") -> str | None:
    """The token of ``--token``: None without the option, a new one without a value.

    Raises:
        UsageError: too short to be none that is guessed, or with characters that a link cannot hold.
    """
    if asked == "":
        return secrets.token_urlsafe(32)
    if asked is not None and not _TOKEN.fullmatch(asked):
        raise UsageError(
            f"{option}: a token has 16 to 256 letters, digits, '_', '-', '.' or '~' (write MODEL_OR_RUN before "
            f"{option}; without a value a token is made up)"
        )
    return asked


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def show_address(host: str, port: int) -> str:
    """The address that a visitor opens; a wildcard is reached by the machine's name."""
    name = socket.gethostname() if host in WILDCARDS else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def open_door(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        UsageError: it is taken, not ours to take, or no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror.partition(" (while")[0] if isinstance(error, OSError) and error.strerror else error
        where = f"--host {host}, port {port}"
        raise UsageError(f"{where}: cannot be served ({reason}); give others with --host and --port") from error


async def serve(application: Application, door: socket.socket, announce: Callable[[], None]) -> None:
    """Answer at ``door`` until Ctrl-C; ``announce`` is called once it can be asked."""
    import uvicorn

    from posttrain.commands.serve.patience import BACKLOG, PatientProtocol

    # No proxy is asked who the visitor is, and no line of a log holds the token.
    kept: dict[str, Any] = {"log_level": "warning", "access_log": False, "proxy_headers": False, "ws": "none"}
    config = uvicorn.Config(application, http=PatientProtocol, backlog=BACKLOG, timeout_graceful_shutdown=1, **kept)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[door]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        announce()
    await serving


class Doorway(ABC):
    """An application behind the checks above.

    Args:
        application: what answers a request that passes.
        host, port: where it is served. A wildcard address is called by the machine's name or any of its addresses,
            never by another name: rebinding needs one.
    """

    def __init__(self, application: Application, host: str, port: int) -> None:
        self.application = application
        self.port = port
        self.is_wildcard = host in WILDCARDS
        own = f"[{host}]" if ":" in host else host
        names = {*LOOPBACK, *([socket.gethostname()] if self.is_wildcard else [own])}
        self.names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here opens a websocket
            await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
            return
        headers = _single(scope["headers"])
        problem = "two headers of one name" if headers is None else self.problem(scope, headers)
        if headers is None or problem:
            await self.refuse(send, problem)
            return

        async def protected(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *PROTECTED]}
            await send(message)

        if await self.admit(scope, headers, send):
            await self.application(scope, receive, protected)

    def problem(self, scope: Scope, headers: Headers) -> str:
        """Why a request may not pass; empty if it may."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return "its Host is not this server"
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return "its Origin is another page"
        return ""

    @abstractmethod
    async def refuse(self, send: Send, problem: str) -> None:
        """Answer a request that may not pass."""

    @abstractmethod
    async def admit(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Whether the visitor may come in; if not, this answers."""

    def _is_ours(self, host: str) -> bool:
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", host.lower())
        if match is None or int(match[2] or 80) != self.port:
            return False
        if match[1] in self.names:
            return True
        try:
            return self.is_wildcard and bool(ipaddress.ip_address(match[1].strip("[]")))
        except ValueError:
            return False


def _single(headers: list[tuple[bytes, bytes]]) -> Headers | None:
    """Headers by name; None if one that decides stands there twice. Cookies may be split over several."""
    read: Headers = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name in read and name in ("host", "origin", "sec-fetch-site", "sec-fetch-mode", "authorization"):
            return None
        read[name] = f"{read[name]}; {value}" if name == "cookie" and name in read else value
    return read


def is_same(text: str, secret: str | None) -> bool:
    """Whether a visitor knows the secret, in the same time whatever is wrong."""
    return hmac.compare_digest(text.encode(), (secret or "").encode())


async def reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length, *PROTECTED]})
    await send({"type": "http.response.body", "body": body})
