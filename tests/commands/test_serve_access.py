"""Who may ask `posttrain serve` and `posttrain studio`: one check, over real sockets, header by header."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.commands.serve.access import Access, is_wildcard
from posttrain.commands.serve.listening import address_of
from serving import Served, serving, serving_here

KEY = "a-key-that-nobody-guesses"
PATHS = {"serve": "/v1/models", "studio": "/config"}


@pytest.fixture(scope="module", params=["serve", "studio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """Each of the two servers, and a path that it answers."""
    runs = tmp_path_factory.mktemp("runs")
    with serving_here("tiny", "--runs-dir", str(runs), command=request.param) as served:
        yield served, PATHS[request.param]


@pytest.fixture(scope="module", params=["serve", "studio"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """The same on every address of this machine, with a key or a login."""
    runs = tmp_path_factory.mktemp("runs")
    option = {"serve": "--api-key", "studio": "--token"}[request.param]
    words = ("tiny", "--runs-dir", str(runs), "--host", "0.0.0.0", option, KEY)
    with serving_here(*words, command=request.param) as served:
        yield served, PATHS[request.param]


def ask(port: int, path: str, headers: list[str], *, method: str = "GET", version: str = "1.1") -> tuple[int, str, str]:
    """(status, head, body) of an answer to exactly these lines; PORT in them is the server's."""
    lines = [f"{method} {path} HTTP/{version}", *headers, "Connection: close"]
    content = "".join(f"{line}\r\n" for line in lines) + "\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(content.replace("PORT", str(port)).encode("latin-1"))
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


HERE = "Host: 127.0.0.1:PORT"
FOLLOWED = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HERE], 200),
        (["Host: localhost:PORT"], 200),
        (["Host: [::1]:PORT"], 200),
        (["Host: localhost"], 200),
        ([HERE, "Origin: http://127.0.0.1:PORT"], 200),
        (["Host: [::1]:PORT", "Origin: http://[::1]:PORT"], 200),
        ([HERE, "Sec-Fetch-Site: same-origin"], 200),
        ([HERE, *FOLLOWED], 200),  # a link of another page is followed, by somebody who then looks at this one
        (["Host: evil.com:PORT"], 403),
        (["Host: 127.0.0.1.evil.com:PORT"], 403),
        (["Host: evil.localhost:PORT"], 403),
        (["Host: 127.0.0.1:PORT@evil.com"], 403),
        (["Host: evil.com:PORT", "X-Forwarded-Host: 127.0.0.1:PORT"], 403),
        ([HERE, "Origin: http://evil.com:PORT"], 403),
        ([HERE, "Origin: http://127.0.0.1:1"], 403),
        ([HERE, "Origin: https://127.0.0.1:PORT"], 403),
        ([HERE, "Origin: null"], 403),
        ([HERE, "Origin: "], 403),
        ([HERE, "Origin: http://127.0.0.1:PORT", "Origin: http://evil.com"], 403),
        ([HERE, "Origin: http://127.0.0.1:PORT, http://evil.com"], 403),
        ([HERE, "Sec-Fetch-Site: cross-site"], 403),
        ([HERE, "Sec-Fetch-Site: same-site"], 403),
        ([HERE, "Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"], 403),
        ([HERE, *FOLLOWED[:2], "Sec-Fetch-Dest: iframe"], 403),
        ([HERE, FOLLOWED[0], "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"], 403),
        ([HERE, *FOLLOWED, "Origin: http://evil.com"], 403),
    ],
)
def test_both_servers_answer_themselves_and_refuse_other_pages(
    server: tuple[Served, str], headers: list[str], status: int
) -> None:
    served, path = server
    output, head, body = ask(served.port, path, headers)
    assert output == status, body
    if status == 403:
        assert json.loads(body)["error"]["code"] == "refused"
        assert "access-control-allow-origin" not in head


def test_both_servers_refuse_a_request_that_names_no_or_two_hosts(server: tuple[Served, str]) -> None:
    served, path = server
    assert ask(served.port, path, [])[0] == 400
    assert ask(served.port, path, [], version="1.0")[0] == 403
    assert ask(served.port, path, [HERE, "Host: evil.com"])[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS", "HEAD"])
def test_both_servers_refuse_every_method_of_other_pages(server: tuple[Served, str], method: str) -> None:
    served, path = server
    preflight = [HERE, "Origin: http://evil.com", "Access-Control-Request-Method: POST", "Content-Length: 0"]
    status, head, _ = ask(served.port, path, preflight, method=method)
    assert (status, "access-control-allow-origin" in head) == (403, False)
    assert ask(served.port, path, [HERE, *FOLLOWED, "Content-Length: 0"], method=method)[0] != 200 or method == "HEAD"


def test_both_servers_behind_a_wildcard_take_any_name_and_no_other_page(opened: tuple[Served, str]) -> None:
    served, path = opened
    for host in ("my-machine:PORT", "192.168.1.5:PORT", "127.0.0.1:PORT"):
        assert ask(served.port, path, [f"Host: {host}"])[0] == 401, "who has no key or login"
        assert ask(served.port, path, [f"Host: {host}", f"Origin: http://{host}"])[0] == 401
        assert ask(served.port, path, [f"Host: {host}", "Origin: http://evil.com"])[0] == 403
        assert ask(served.port, path, [f"Host: {host}", f"Origin: https://{host}"])[0] == 403


def call(gate: Access, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What the gate sends."""
    sent: list[dict[str, Any]] = []
    coming = iter([{"type": "websocket.connect"}, {"type": "websocket.disconnect"}])

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    return sent


async def takes_all(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "taken"})


def test_websockets_are_checked_as_requests_are() -> None:
    def headers(**named: str) -> dict[str, Any]:
        return {"type": "websocket", "headers": [(k.encode(), v.encode()) for k, v in named.items()]}

    gate = Access(takes_all, "127.0.0.1")
    assert call(gate, headers(host="127.0.0.1:1", origin="http://127.0.0.1:1")) == [{"type": "taken"}]
    for refused in (headers(host="evil.com"), headers(host="127.0.0.1:1", origin="http://evil.com"), headers()):
        (message,) = call(gate, refused)
        assert (message["type"], message["code"]) == ("websocket.close", 1008)
    assert call(gate, {"type": "lifespan"}) == [{"type": "taken"}]


@pytest.mark.parametrize(("host", "expected"), [
    ("0.0.0.0", True), ("::", True), ("0:0:0:0:0:0:0:0", True), ("127.0.0.1", False), ("::1", False),
    ("localhost", False), ("my-machine", False), ("", False),
])  # fmt: skip
def test_wildcards_are_addresses_that_are_unspecified(host: str, expected: bool) -> None:
    assert is_wildcard(host) is expected


def test_address_of_writes_ipv6_in_brackets() -> None:
    assert address_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert address_of("::1", 80) == "http://[::1]:80"


def test_host_that_is_served_is_a_name_of_the_server() -> None:
    gate = Access(takes_all, "My-Machine", KEY)
    named = [(b"host", b"my-machine:80"), (b"authorization", f"Bearer {KEY}".encode())]
    assert call(gate, {"type": "http", "method": "GET", "headers": named}) == [{"type": "taken"}]


STREAM = {"prompt": "Eva", "stream": True, "max_tokens": 900, "temperature": 5.0, "ignore_eos": True, "n": 8}


@pytest.mark.parametrize(("command", "path", "body"), [
    ("serve", "/v1/completions", STREAM),
    ("studio", "/gradio_api/heartbeat/x", None),
])  # fmt: skip
def test_server_that_is_stopped_while_a_stream_is_open_ends_without_a_traceback(
    command: str, path: str, body: object, tmp_path: Path
) -> None:
    with serving(tmp_path, "tiny", command=command) as served:
        assert served.process is not None
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        content = None if body is None else json.dumps(body)
        connection.request("GET" if content is None else "POST", path, content)
        answer = connection.getresponse()
        assert (answer.status, len(answer.read(5))) == (200, 5)
        served.process.send_signal(signal.SIGINT)
        shown, _ = served.process.communicate(timeout=120)
        connection.close()
        assert (served.process.returncode, shown) == (0, "")
