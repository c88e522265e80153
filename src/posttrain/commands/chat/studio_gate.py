"""Who may ask the studio's server: the doorway of its page.

Beyond what every server here checks (``serve/doorway.py``), the ``Gate`` lets a request pass if its path is one that
the page itself asks for, and it knows the token where there is one; a route that a later Gradio brings is closed until
it is named here.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import parse_qsl

from posttrain.commands.serve.doorway import TEXT, Application, Doorway, Headers, Scope, Send, is_same, reply

# What the page asks for by itself: no API by name, no upload, no file, no proxy, no recording.
_READ = re.compile(
    r"/|/config|/theme\.css|/favicon\.ico|/(static|assets)/[\w./@+-]+|/gradio_api/(queue/data|heartbeat/\w+|app_id)"
)
_WRITE = re.compile(r"/gradio_api/queue/join")


class Gate(Doorway):
    """The page behind its checks.

    Args:
        application, host, port: see ``Doorway``.
        token: what a visitor must know; the page's link brings it once (``/?token=``), a cookie after that.
    """

    def __init__(self, application: Application, host: str, port: int, token: str | None = None) -> None:
        super().__init__(application, host, port)
        self.token = token
        self.cookie = f"posttrain-studio-{port}"
        self.pass_word = hashlib.sha256(f"cookie {token}".encode()).hexdigest()

    def problem(self, scope: Scope, headers: Headers) -> str:
        """Why a request may not pass; empty if it may."""
        foreign = super().problem(scope, headers)
        if foreign:
            return foreign
        method, path = scope["method"], scope["path"]
        is_read = method in ("GET", "HEAD")
        if "origin" not in headers and not is_read:
            return "it would change something and has no Origin"
        sent_by = headers.get("sec-fetch-site", "none")
        is_opened = path == "/" and is_read and headers.get("sec-fetch-mode") == "navigate"
        if sent_by not in ("none", "same-origin") and not is_opened:
            return "another page sent it"
        known = _READ if is_read else _WRITE
        if method not in ("GET", "HEAD", "POST") or not known.fullmatch(path) or ".." in path:
            return "the page has no use for this path"
        return ""

    async def refuse(self, send: Send, problem: str) -> None:
        """Say that the request may not pass."""
        await reply(send, 403, f"posttrain studio refuses this request: {problem}\n".encode(), [TEXT])

    async def admit(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Whether the visitor knows the token; that of the link is taken into a cookie."""
        if self.token is None or self._is_known(headers):
            return True
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if scope["path"] != "/" or scope["method"] != "GET" or len(tokens) != 1 or not is_same(tokens[0], self.token):
            await reply(send, 403, b"posttrain studio: open the link that it printed, with its token\n", [TEXT])
            return False
        cookie = f"{self.cookie}={self.pass_word}; Path=/; HttpOnly; SameSite=Lax".encode()
        await reply(send, 303, b"", [(b"location", b"/"), (b"set-cookie", cookie), (b"cache-control", b"no-store")])
        return False

    def _is_known(self, headers: Headers) -> bool:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and is_same(value, self.pass_word) for name, _, value in pairs)
