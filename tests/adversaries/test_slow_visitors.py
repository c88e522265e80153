"""Visitors of our own servers who hold a connection: they lose it, and the others are answered meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from posttrain.commands.serve import patience
from posttrain.commands.serve.doorway import open_door, serve

HEAD = b"GET /%s HTTP/1.1\r\nHost: here\r\n"
LIMIT = 0.5


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers ``/slow`` after more than the limits, ``/large`` with what no buffer holds, all else at once."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * LIMIT)
    pieces = 400 if scope["path"] == "/large" else 1
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(pieces):
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    ended.append(scope["path"])


ended: list[str] = []


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(patience, "HEAD_SECONDS", LIMIT)
    monkeypatch.setattr(patience, "STUCK_SECONDS", LIMIT)
    ended.clear()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    door = open_door("127.0.0.1", 0)
    task = loop.create_task(serve(application, door, ready.set))

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.wait([task]))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    yield door.getsockname()[1]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(20)
    loop.close()
    door.close()


def visit(port: int, content: bytes) -> socket.socket:
    visitor = socket.create_connection(("127.0.0.1", port), timeout=20)
    visitor.sendall(content)
    return visitor


def is_hung_up(visitor: socket.socket) -> bool:
    try:
        while visitor.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def ask(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HT",
        HEAD % b"",
        HEAD % b"" + b"Content-Length: 9\r\n\r\n",  # answered, and its body is awaited
        HEAD % b"" + b"\r\nGET / HT",  # answered, and another one has begun
    ],
)
def test_who_asks_nothing(begun: bytes, port: int) -> None:
    started = time.monotonic()
    with visit(port, begun) as visitor:
        assert ask(port, "/") == 200, "others are answered meanwhile"
        assert is_hung_up(visitor)
    assert LIMIT * 0.9 < time.monotonic() - started < 15


def drip(visitor: socket.socket) -> int:
    """How many header lines could be sent, a tenth of the limit between each."""
    for sent in range(200):
        time.sleep(LIMIT / 10)
        try:
            visitor.sendall(b"A: b\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return sent
    return 200


def test_a_byte_now_and_then_is_no_request(port: int) -> None:
    with visit(port, HEAD % b"") as visitor:
        assert 5 < drip(visitor) < 100


def test_who_reads_nothing(port: int) -> None:
    with visit(port, HEAD % b"large" + b"\r\n") as visitor:
        deadline = time.monotonic() + 20
        while "/large" not in ended and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ended == ["/large"], "what answers it is let go"
        assert is_hung_up(visitor)


def test_what_takes_its_time_is_answered(port: int) -> None:
    """The limits are those of visitors; answers and pipelined requests take as long as they take."""
    assert ask(port, "/slow") == 200
    with visit(port, (HEAD % b"slow" + b"\r\n") * 2) as visitor:
        content = b""
        while content.count(b"HTTP/1.1 200") < 2 or not content.endswith(b"0\r\n\r\n"):
            piece = visitor.recv(1 << 16)
            assert piece, "it is not hung up"
            content += piece


def test_more_connections_than_files(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "most_connections", lambda: 5)
    visitors = [visit(port, b"GET") for _ in range(10)]
    time.sleep(LIMIT * 0.5)
    for visitor in visitors:
        visitor.settimeout(0.01)
    assert sum(map(is_hung_up, visitors)) == 5
    time.sleep(LIMIT * 2)
    assert ask(port, "/") == 200
    for visitor in visitors:
        visitor.close()
