"""Host, Origin and key checks shared by ``posttrain serve`` and ``posttrain studio``."""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from posttrain.commands.serve.endpoints import error_response
from posttrain.commands.serve.requests import BadRequest

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Access:
    """ASGI middleware that blocks cross-site requests, DNS rebinding and, with ``key``, clients without the key.

    Any web page in a browser can send requests to localhost, either cross-origin or with a domain name that resolves
    to 127.0.0.1. Therefore ``Host`` must name this server, and so must ``Origin`` if present. Wildcard addresses
    require a key or a login, and accept any ``Host``.

    Args:
        host: listening address.
        key: required as ``Authorization: Bearer KEY`` or ``X-API-Key``.
        command: command name, for error messages.
    """

    def __init__(
        self, application: ASGIApp, host: str, key: str | None = None, command: str = "posttrain serve"
    ) -> None:
        self.application = application
        self.key = key
        self.command = command
        self.is_wildcard = is_wildcard(host)
        own_name = host
        if ":" in host:
            own_name = f"[{host}]"
        self.names = {*LOCAL_NAMES, own_name.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":  # the server itself begins or ends
            await self.application(scope, receive, send)
            return
        error = self._problem(scope)
        if error is None:
            await self.application(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason=str(error))(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _problem(self, scope: Scope) -> BadRequest | None:
        headers = Headers(scope=scope)
        hosts = [host.lower() for host in headers.getlist("host")]
        problem = ""
        if len(hosts) > 1 or not (self.is_wildcard or self._is_own_name("".join(hosts))):
            problem = "Host does not match this server"
        elif any(origin.lower() != f"http://{''.join(hosts)}" for origin in headers.getlist("origin")):
            problem = "its Origin is another page"
        elif _is_cross_site(headers) and not _is_followed_link(scope, headers):
            problem = "sent by another site's page"
        if problem:
            return BadRequest(f"{self.command} refuses this request: {problem}", code="refused", status=403)
        if self.key is not None and not self._has_key(headers):
            return BadRequest("missing key: send Authorization: Bearer KEY", None, "invalid_api_key", 401)
        return None

    def _is_own_name(self, host: str) -> bool:
        return re.sub(r":\d*$", "", host) in self.names

    def _has_key(self, headers: Headers) -> bool:
        if self.key is None:
            return False
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")
        return hmac.compare_digest(given.strip().encode(), self.key.encode())


def is_wildcard(host: str) -> bool:
    """Check if an address is a wildcard address."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_cross_site(headers: Headers) -> bool:
    return any(site not in ("none", "same-origin") for site in headers.getlist("sec-fetch-site"))


def _is_followed_link(scope: Scope, headers: Headers) -> bool:
    """Check if a request is plain navigation from a link; the linking page cannot read the response."""
    how = (headers.getlist("sec-fetch-mode"), headers.getlist("sec-fetch-dest"))
    return scope.get("method") in ("GET", "HEAD") and how == (["navigate"], ["document"])
