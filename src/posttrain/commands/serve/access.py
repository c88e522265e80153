"""The check of Host, Origin and key that ``posttrain serve`` and ``posttrain studio`` share."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from posttrain.commands.serve.requests import BadRequest
from posttrain.errors import PosttrainError, UsageError

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Access:
    """ASGI layer that refuses pages of other sites, DNS rebinding and, with ``key``, clients without the key.

    A page in a browser can send requests to this machine: across origins, or under its own name, which it points to
    127.0.0.1. So ``Host`` must be a name of this server, and ``Origin``, if there is one, this server too. A wildcard
    address, which needs a key or a login, takes any ``Host``.

    Args:
        host: address that the server listens on.
        key: what a client must send as ``Authorization: Bearer KEY``, or as ``X-API-Key``.
        command: the command that serves, for messages.
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
            problem = "its Host is not this server"
        elif any(origin.lower() != f"http://{''.join(hosts)}" for origin in headers.getlist("origin")):
            problem = "its Origin is another page"
        elif _is_cross_site(headers) and not _is_followed_link(scope, headers):
            problem = "a page of another site sent it"
        if problem:
            return BadRequest(f"{self.command} refuses this request: {problem}", code="refused", status=403)
        if self.key is not None and not self._has_key(headers):
            return BadRequest("this server needs its key: Authorization: Bearer KEY", None, "invalid_api_key", 401)
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
    """Return whether a server at this address listens on every address of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_cross_site(headers: Headers) -> bool:
    return any(site not in ("none", "same-origin") for site in headers.getlist("sec-fetch-site"))


def _is_followed_link(scope: Scope, headers: Headers) -> bool:
    """Return whether somebody opened this address from a link: the page that has the link cannot read the answer."""
    how = (headers.getlist("sec-fetch-mode"), headers.getlist("sec-fetch-dest"))
    return scope.get("method") in ("GET", "HEAD") and how == (["navigate"], ["document"])


def error_body(error: PosttrainError) -> dict[str, object]:
    """Return an error in OpenAI's form."""
    kind = "server_error"
    code = None
    if isinstance(error, UsageError):
        kind = "invalid_request_error"
        code = "invalid_request"
    param = getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": getattr(error, "code", code)}}


def error_response(error: PosttrainError) -> Response:
    """Return the HTTP answer of an error."""
    status = 500
    if isinstance(error, UsageError):
        status = 400
    status = getattr(error, "status", status)
    content = json.dumps(error_body(error))  # in ASCII: a message may quote half of a surrogate pair
    return Response(content, status, media_type="application/json")
