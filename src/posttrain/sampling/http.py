"""JSON over HTTP with retries, for vLLM servers and LLM judges that may be slow, busy or unavailable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import ValidationError

from posttrain.option_types import server_address
from posttrain.untrusted import describe_fault, harmless

ItemT = TypeVar("ItemT")
Result = TypeVar("Result")
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 64 << 20
HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


class ServerError(Exception):
    """Raised if a request failed permanently."""


class Unanswered(ServerError):
    """Raised if all attempts failed; describes the last failure."""


class RequestRefused(ServerError):
    """Raised if a server permanently refuses a request. ``status``: HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class Unreadable(ServerError):
    """Raised if a response does not match the endpoint's format."""


class Interrupted(Exception):
    """Raised for temporary failures; retrying may help."""


def open_client(headers: Mapping[str, str], num_idle: int | None = None) -> httpx2.AsyncClient:
    """Return a client that asks no proxy and waits for an answer without limit; it keeps ``num_idle`` connections."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=num_idle)
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
    return httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)


class HttpServer:
    """HTTP client for ``url``. Call ``ask`` only within ``session``.

    Args:
        timeout_seconds: timeout for one complete response, limited to ``MAX_ANSWER_BYTES``.
        retries: retries with increasing delays. Redirects are not followed.
        concurrency: maximum concurrent requests.
        token: bearer token, removed from all responses.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float, retries: int, concurrency: int = 1, token: str | None = None
    ) -> None:
        self.host = server_address(url)[1]
        self.base = url.strip().rstrip("/").removesuffix("/v1")
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.concurrency = concurrency
        self._headers = dict(HEADERS)
        self._secrets: list[bytes] = []
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
            self._secrets = [token.encode(), quote(token, safe="").encode()]  # also in its URL-quoted form

    def call(
        self, method: str, path: str, body: object = None, *, read: Callable[[Any], Result], retries: int | None = None
    ) -> Result:
        """Send one request from synchronous code, with a separate connection (see ``ask``)."""
        return self.session(lambda: self.ask(method, path, body, read=read, retries=retries))

    def session(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run ``work`` from synchronous code; ``work`` may call ``ask``.

        If an event loop is already running (notebooks), a separate thread is used.
        """

        async def connected() -> Result:
            self._places = asyncio.Semaphore(max(1, self.concurrency))
            async with open_client(self._headers, self.concurrency) as self._client:
                return await work()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(connected())
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, connected()).result()

    async def ask(
        self, method: str, path: str, body: object = None, *, read: Callable[[Any], Result], retries: int | None = None
    ) -> Result:
        """Send a request and pass its JSON response to ``read``.

        Requests are repeated after lost connections, timeouts, ``RETRIED_STATUSES`` and ``Interrupted``, so they must
        be safe to repeat.

        Raises:
            Unanswered: every attempt failed.
            Unreadable: ``read`` rejected the response.
            RequestRefused: any other HTTP error.
        """
        if retries is None:
            retries = self.retries
        attempts = 1 + retries
        data = None
        if body is not None:
            data = json.dumps(body).encode()
        failure = ""
        for attempt in range(attempts):
            if attempt:
                pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
                await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS))
            try:
                async with self._places, asyncio.timeout(self.timeout_seconds):
                    status, content = await self._exchange(method, path, data)
                if status == 200:
                    return _read_with(read, read_json(content))
                refusal = RequestRefused(status, read_error(content))
                if status not in RETRIED_STATUSES:
                    raise refusal
                failure = str(refusal)
            except (TimeoutError, OSError, ValueError, httpx2.HTTPError, httpx2.StreamError) as error:
                failure = self._explain(error)
            except Interrupted as error:
                failure = str(error)
        if attempts > 1:
            failure = f"{attempts} attempts failed, the last one: {failure}"
        raise Unanswered(failure)

    async def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        content = bytearray()
        async with self._client.stream(method, self.base + path, content=data) as response:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise ValueError(f"response larger than {MAX_ANSWER_BYTES >> 20} MiB")
        answer = bytes(content)
        for secret in self._secrets:
            answer = answer.replace(secret, b"***")
        return response.status_code, answer

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout_seconds:g} seconds"
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return f"no connection to {self.host}: {error}"
        if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError):
            return f"the connection broke off ({error})"
        return f"{type(error).__name__}: {error}"


def _read_with(read: Callable[[Any], Result], answer: object) -> Result:
    try:
        return read(answer)
    except ValidationError as error:
        raise Unreadable(describe_fault(error)) from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Unreadable(f"unexpected response format ({type(error).__name__}: {error})") from None


async def all_of(work: Callable[[ItemT], Awaitable[Result]], items: Iterable[ItemT]) -> list[Result]:
    """Run ``work`` on all items concurrently and keep their order. A failure cancels all remaining tasks."""
    tasks = [asyncio.ensure_future(work(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def read_json(content: bytes) -> Any:
    """Parse a JSON body.

    Raises:
        Interrupted: invalid JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        start = " ".join(content[:80].decode(errors="replace").split())
        shown = harmless(start) or "nothing"
        raise Interrupted(f"response is not JSON: {shown}") from None


def read_error(content: bytes) -> str:
    """Extract a one-line message from an error body."""
    text = content.decode("utf-8", errors="replace")
    try:
        body = read_json(content)
        body = body.get("error", body)
        text = str(body.get("message") or body.get("detail") or text)
    except (Interrupted, AttributeError):
        pass  # show a proxy's page unchanged
    shown = " ".join(text.split())[:500]
    return harmless(shown) or "no explanation"
