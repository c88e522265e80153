"""Who may ask the studio's server: an ASGI layer around its page, of the standard library alone.

A page in a browser can send requests to this machine: across origins, or under a name of its own that it points to
127.0.0.1 (DNS rebinding). The ``Gate`` lets a request pass if its ``Host`` is a name of this server, its ``Origin``
is this page, its path is one that the page itself asks for, and it knows the token where there is one. All others
are refused with 403 before the application sees them; a route that a later Gradio brings is closed until it is
named here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from posttrain.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WILDCARDS = ("0.0.0.0", "::")
# What the page asks for by itself: no API by name, no upload, no file, no proxy, no recording.
_READ = re.compile(
    r"/|/config|/theme\.css|/favicon\.ico|/(static|assets)/[\w./@+-]+|/gradio_api/(queue/data|heartbeat/\w+|app_id)"
)
_WRITE = re.compile(r"/gradio_api/queue/join")
_PROTECTED = [
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,256}")
_TEXT = (b"content-type", b"text/plain; charset=utf-8")


def choose_token(asked: str | None) -> str | None:
    """The token of ``--token``: None without the option, a new one without a value.

    Raises:
        UsageError: too short to be none that is guessed, or with characters that a link cannot hold.
    """
    if asked == "":
        return secrets.token_urlsafe(32)
    if asked is not None and not _TOKEN.fullmatch(asked):
        raise UsageError(
            "--token: a token has 16 to 256 letters, digits, '_', '-', '.' or '~' (write MODEL_OR_RUN before --token; "
            "without a value a token is made up)"
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


class Gate:
    """An application behind the checks above.

    Args:
        application: what answers a request that passes.
        host, port: where it is served. A wildcard address is called by the machine's name or any of its addresses,
            never by another name: rebinding needs one.
        token: what a visitor must know; the page's link brings it once (``/?token=``), a cookie after that.
    """

    def __init__(self, application: Application, host: str, port: int, token: str | None = None) -> None:
        self.application = application
        self.port = port
        self.is_wildcard = host in WILDCARDS
        own = f"[{host}]" if ":" in host else host
        self.names = {*LOOPBACK, *([socket.gethostname()] if self.is_wildcard else [own])}
        self.names = {name.lower() for name in self.names}
        self.token = token
        self.cookie = f"posttrain-studio-{port}"
        self.pass_word = hashlib.sha256(f"cookie {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":  # the page opens no websocket
            await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
            return
        headers = _single(scope["headers"])
        problem = "two headers of one name" if headers is None else self._problem(scope, headers)
        if headers is None or problem:
            await _answer(send, 403, f"posttrain studio refuses this request: {problem}\n".encode(), [_TEXT])
            return
        if self.token is not None and not self._is_known(headers):
            await self._admit(scope, send)
            return

        async def protected(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_PROTECTED]}
            await send(message)

        await self.application(scope, receive, protected)

    def _problem(self, scope: Scope, headers: dict[str, str]) -> str:
        """Why a request may not pass; empty if it may."""
        host, origin, method, path = headers.get("host", ""), headers.get("origin"), scope["method"], scope["path"]
        if not self._is_ours(host):
            return "its Host is not this server"
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return "its Origin is another page"
        is_read = method in ("GET", "HEAD")
        if origin is None and not is_read:
            return "it would change something and has no Origin"
        sent_by = headers.get("sec-fetch-site", "none")
        is_opened = path == "/" and is_read and headers.get("sec-fetch-mode") == "navigate"
        if sent_by not in ("none", "same-origin") and not is_opened:
            return "another page sent it"
        known = _READ if is_read else _WRITE
        if method not in ("GET", "HEAD", "POST") or not known.fullmatch(path) or ".." in path:
            return "the page has no use for this path"
        return ""

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

    def _is_known(self, headers: dict[str, str]) -> bool:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and _is_same(value, self.pass_word) for name, _, value in pairs)

    async def _admit(self, scope: Scope, send: Send) -> None:
        """Take the token out of the link and into a cookie, or refuse."""
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if scope["path"] != "/" or scope["method"] != "GET" or len(tokens) != 1 or not _is_same(tokens[0], self.token):
            await _answer(send, 403, b"posttrain studio: open the link that it printed, with its token\n", [_TEXT])
            return
        cookie = f"{self.cookie}={self.pass_word}; Path=/; HttpOnly; SameSite=Lax".encode()
        place = [(b"location", b"/"), (b"set-cookie", cookie), (b"cache-control", b"no-store")]
        await _answer(send, 303, b"", place)


def _single(headers: list[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Headers by name; None if one that decides stands there twice. Cookies may be split over several."""
    read: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name in read and name in ("host", "origin", "sec-fetch-site", "sec-fetch-mode"):
            return None
        read[name] = f"{read[name]}; {value}" if name == "cookie" and name in read else value
    return read


def _is_same(text: str, secret: str | None) -> bool:
    return hmac.compare_digest(text.encode(), (secret or "").encode())


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length, *_PROTECTED]})
    await send({"type": "http.response.body", "body": body})
