"""Limits of ``posttrain serve`` on connections: a request arrives within some seconds, or its connection is closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.commands.serve.requests import BadRequest

HEAD_SECONDS = 10.0  # to receive request headers, counted from the first byte or from connecting
SILENT_SECONDS = 10.0  # between two parts of a body
BODY_SECONDS = 60.0  # for a whole body, which may be many megabytes
MAX_CONNECTIONS = 512  # if exceeded, a connection without any request is closed


class HeadTimeoutProtocol(H11Protocol):
    """HTTP/1.1 that closes connections if a request takes too long to arrive.

    uvicorn has no such timeout, so a slow client could hold a connection forever.
    """

    _timer: asyncio.TimerHandle | None = None
    _began = 0.0

    @property
    def is_waiting(self) -> bool:
        """True if no request of this connection is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head; another connection that waits makes room if there are too many."""
        super().connection_made(transport)
        self._began = time.monotonic()
        self._watch()
        if len(self.connections) <= MAX_CONNECTIONS:
            return
        idle = [one for one in self.connections if isinstance(one, HeadTimeoutProtocol) and one.is_waiting]
        oldest = min(idle, key=lambda one: one._began, default=self)
        oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and go on waiting if they complete no head."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self.is_waiting:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self.is_waiting:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RequestLimit:
    """ASGI layer that answers at most ``max_requests`` at a time; others get 503 and may try again."""

    def __init__(self, application: ASGIApp, max_requests: int) -> None:
        self.application = application
        self.max_requests = max_requests
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        if self.num_requests >= self.max_requests:
            message = f"this server answers {self.max_requests} requests at a time (--max-requests); try again"
            error = {"message": message, "type": "server_error", "param": None, "code": "server_busy"}
            await JSONResponse({"error": error}, 503, {"Retry-After": "1"})(scope, receive, send)
            return
        self.num_requests += 1
        try:
            await self.application(scope, receive, send)
        finally:
            self.num_requests -= 1


async def read_content(request: Request, most: int) -> bytes:
    """Read a body of at most ``most`` bytes, as long as it keeps arriving.

    Raises:
        BadRequest: a body that is too large or too slow.
    """
    content = bytearray()
    parts = request.stream()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    part = await anext(parts, None)
                if part is None:
                    return bytes(content)
                content += part
                if len(content) > most:
                    message = f"the body has more than {most:,} bytes; send smaller requests"
                    raise BadRequest(message, code="too_large", status=413)
    except TimeoutError:
        message = f"the body did not arrive in time ({len(content):,} bytes did); send the request again"
        raise BadRequest(message, code="too_slow", status=408) from None
