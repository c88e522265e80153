"""Talking to a server that may be slow, busy, or gone: JSON over HTTP with time limits and retries.

The standard library alone; one connection per thread, kept open between its requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar
from urllib.parse import quote

from posttrain.addresses import server_address
from posttrain.engines.vllm.protocol import Interrupted, Unreadable, read_error, read_json

Result = TypeVar("Result")
# Answers that another attempt may change: time-outs, too many requests, a server that is ill or starting.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0
CONNECT_SECONDS = 10.0
LONGEST_SECONDS = 1e6  # what every clock of the operating system can count
MAX_ANSWER_BYTES = 64 << 20
# What a reader trips over where an answer is not of the form that it reads.
_MISFITS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class Unanswered(Exception):
    """No usable answer after all attempts; the text says what came instead."""


class Refused(Exception):
    """The server will not do it, however often it is asked. ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """A server at ``url``, for one piece of work; a context manager that hangs up at its end.

    ``call`` may be used by many threads. ``timeout_seconds`` is how long an attempt may wait for the
    whole answer, which has at most ``MAX_ANSWER_BYTES``; a request is sent at most ``retries + 1`` times, with growing
    pauses between. A redirection is not followed.
    """

    def __init__(self, url: str, *, timeout_seconds: float, retries: int, token: str | None = None) -> None:
        self.scheme, self.host, self.port, self.prefix = server_address(url)
        self.timeout_seconds = min(timeout_seconds, LONGEST_SECONDS)
        self.retries = retries
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        self._secrets = [token, quote(token, safe="")] if token else []  # as it may come back
        self._closed = threading.Event()
        self._mine = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; whatever thread waits for an answer fails now with ``Unanswered``."""
        with self._lock:
            self._closed.set()
            for connection in self._connections:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # the other side may have hung up first
                        connection.sock.shutdown(socket.SHUT_RDWR)
            self._connections.clear()

    def call(
        self, method: str, path: str, body: Any = None, *, read: Callable[[Any], Result], retries: int | None = None
    ) -> Result:
        """What ``read`` makes of the JSON that the server answers with.

        A request is repeated where it broke off, ran into the time limit, met a server that says it
        is ill or busy, or where ``read`` raises ``Interrupted``; so what is asked must be safe to
        ask twice.

        Raises:
            Unanswered: every attempt failed, or ``close`` was called.
            Unreadable: the answer is not of the form that ``read`` reads.
            Refused: any other HTTP error.
        """
        attempts = 1 + (self.retries if retries is None else retries)
        failure = "hung up"
        for attempt in range(attempts):
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS) if attempt else 0.0
            if self._closed.wait(pause):
                raise Unanswered(failure)
            try:
                status, content = self._exchange(method, path, body)
                if status == 200:
                    return _read(read, self._without_secrets(read_json(content)))
                said = self._without_secrets(read_error(content))
                failure = f"HTTP {status}: {said}"
                if status not in PASSING:
                    raise Refused(status, said)
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                failure = self._without_secrets(self._explain(error))
            except Interrupted as error:
                failure = str(error)
        raise Unanswered(failure if attempts == 1 else f"{attempts} attempts failed, the last one: {failure}")

    def _without_secrets(self, value: Any) -> Any:
        """What a server says, without the key that it was sent: some write it into their errors and answers."""
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, "***")
        elif isinstance(value, list):
            return [self._without_secrets(item) for item in value] if self._secrets else value
        elif isinstance(value, dict):
            pairs = value.items() if self._secrets else ()
            return {self._without_secrets(key): self._without_secrets(item) for key, item in pairs} or value
        return value

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connection = getattr(self._mine, "connection", None)
        if connection is None or connection.sock is None:  # the server closes after every answer
            connection = self._connect()
        data = None if body is None else json.dumps(body).encode()
        with _within(connection.sock, self.timeout_seconds):
            connection.request(method, self.prefix + path, body=data, headers=self.headers)
            response = connection.getresponse()
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
            if response.length:
                raise http.client.IncompleteRead(content, response.length)
        return response.status, content

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=min(CONNECT_SECONDS, self.timeout_seconds))
        self._mine.connection = connection
        connection.connect()
        connection.sock.settimeout(self.timeout_seconds)
        with self._lock:
            if self._closed.is_set():
                raise ConnectionAbortedError
            self._connections = {one for one in self._connections if one.sock is not None} | {connection}
        return connection

    def _hang_up(self) -> None:
        connection = self._mine.connection
        self._mine.connection = None
        connection.close()  # also what was never connected
        with self._lock:
            self._connections.discard(connection)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout_seconds:g} seconds"
        if isinstance(error, ConnectionRefusedError):
            return "connection refused"
        if isinstance(error, socket.gaierror):
            return f"the host name {self.host!r} is not known"
        if isinstance(error, ConnectionError | http.client.IncompleteRead):
            return "the connection broke off"
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _within(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Hangs up ``seconds`` from now: the socket's own limit is for a single piece, and pieces may come for ever.

    Raises:
        TimeoutError: it did.
        http.client.HTTPException: what came is no HTTP.
    """
    late = threading.Event()

    def hang_up() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    except ValueError as error:  # the length of a body, or of a piece of it, is no number
        raise http.client.HTTPException(str(error)) from None
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _read(read: Callable[[Any], Result], answer: Any) -> Result:
    try:
        return read(answer)
    except _MISFITS as error:
        raise Unreadable(f"an answer of another form ({type(error).__name__}: {error})") from None
