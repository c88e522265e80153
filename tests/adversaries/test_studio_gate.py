"""Who the studio's server answers: hostile requests against its gate, as pure ASGI and over a real socket."""

from __future__ import annotations

import asyncio
import hmac
import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.commands.chat.studio import Gate
from posttrain.commands.serve.doorway import choose_token, is_loopback, show_address
from posttrain.errors import UsageError
from serving import free_port

PORT = 7860
HERE = f"127.0.0.1:{PORT}"
JOIN = "/gradio_api/queue/join"
TOKEN = "a-token-that-nobody-guesses"


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-page", b"yes")]})
    await send({"type": "http.response.body", "body": b"the page"})


def ask(
    gate: Gate,
    path: str = "/",
    method: str = "GET",
    headers: list[tuple[str, str]] | None = None,
    query: str = "",
    kind: str = "http",
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; a closed websocket gives its code."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers or [("host", HERE)]]
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    asyncio.run(gate(scope, receive, send))
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], {}, b""
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[1]["body"]


def status(gate: Gate, *headers: tuple[str, str], path: str = "/", method: str = "GET") -> int:
    return ask(gate, path, method, list(headers))[0]


@pytest.mark.parametrize("host", [HERE, f"localhost:{PORT}", f"LOCALHOST:{PORT}", f"[::1]:{PORT}"])
def test_loopback_names_with_the_right_port_are_answered(host: str) -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    assert status(gate, ("host", host)) == 200
    assert status(gate, ("host", host), ("origin", f"http://{host}"), path=JOIN, method="POST") == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        f"evil.example:{PORT}",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:7861",
        f"127.0.0.1.:{PORT}",
        f"127.0.0.1.evil.example:{PORT}",
        f"evil@127.0.0.1:{PORT}",
        f"127.0.0.1:{PORT}@evil",
        f"::1:{PORT}",
        f"127.1:{PORT}",
        f"2130706433:{PORT}",
        f"0.0.0.0:{PORT}",
        f"localhost.evil:{PORT}",
        f"127.0.0.1:0{PORT}0",
        f"127.0.0.1:{PORT},evil",
        f"127.0.0.1:{PORT}\x00",
        f" 127.0.0.1:{PORT}",
        "127.0.0.1:²",
        f"192.168.0.9:{PORT}",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    found = ask(Gate(page, "127.0.0.1", PORT), headers=[("host", host)])
    assert found[0] == 403
    assert b"Host" in found[2]


def test_no_host_and_two_hosts_are_refused() -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    assert ask(gate, headers=[("accept", "*/*")])[0] == 403
    assert status(gate, ("host", HERE), ("host", "evil.example")) == 403
    assert status(gate, ("Host", HERE), ("hOST", HERE)) == 403
    assert status(gate, ("host", HERE), ("origin", f"http://{HERE}"), ("origin", "http://evil")) == 403


def test_without_a_port_only_where_it_is_80() -> None:
    assert status(Gate(page, "127.0.0.1", 80), ("host", "localhost")) == 200
    assert status(Gate(page, "127.0.0.1", 80), ("host", "localhost:80")) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        f"http://evil.example:{PORT}",
        "http://127.0.0.1",
        "http://127.0.0.1:3000",
        f"https://{HERE}",
        f"http://localhost:{PORT}",
        f"http://{HERE}.evil.example",
        f"http://{HERE}/",
        "file://",
    ],
)
@pytest.mark.parametrize(("path", "method"), [("/", "GET"), ("/config", "GET"), (JOIN, "POST")])
def test_other_origins_are_refused(origin: str, path: str, method: str) -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    assert status(gate, ("host", HERE), ("origin", origin), path=path, method=method) == 403
    assert status(gate, ("host", HERE), ("origin", f"http://{HERE}"), path=path, method=method) == 200


def test_what_changes_something_needs_an_origin() -> None:
    assert status(Gate(page, "127.0.0.1", PORT), ("host", HERE), path=JOIN, method="POST") == 403


def test_another_page_may_link_to_the_page_and_nothing_else() -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    for site in ("cross-site", "same-site"):  # same-site: another port of this machine
        sent = ("host", HERE), ("sec-fetch-site", site)
        assert status(gate, *sent, ("sec-fetch-mode", "navigate")) == 200
        assert status(gate, *sent, ("sec-fetch-mode", "no-cors")) == 403
        for path in ("/config", "/gradio_api/queue/data", "/assets/index.js"):
            assert status(gate, *sent, ("sec-fetch-mode", "navigate"), path=path) == 403
    assert status(gate, ("host", HERE), ("sec-fetch-site", "same-origin"), path="/config") == 200
    assert status(gate, ("host", HERE), ("sec-fetch-site", "none")) == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_other_methods_are_refused(method: str) -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    for path in ("/", JOIN):
        assert status(gate, ("host", HERE), ("origin", f"http://{HERE}"), path=path, method=method) == 403


def test_websockets_are_refused() -> None:
    gate = Gate(page, "127.0.0.1", PORT)
    assert ask(gate, JOIN, headers=[("host", HERE), ("origin", f"http://{HERE}")], kind="websocket")[0] == 1008


def test_the_page_cannot_be_framed_or_sniffed() -> None:
    _, headers, body = ask(Gate(page, "127.0.0.1", PORT))
    assert body == b"the page"
    assert headers["x-page"] == "yes"
    assert headers["x-frame-options"] == "DENY"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"


def test_the_token_is_taken_from_the_link_once_and_from_a_cookie_after_that() -> None:
    gate = Gate(page, "0.0.0.0", PORT, TOKEN)
    assert ask(gate)[0] == 403
    close = f"token={TOKEN}x", f"token={TOKEN[:-1]}", f"token={TOKEN}&token={TOKEN}"
    for wrong in ("token=", "token=x", "token=é", *close):
        assert ask(gate, query=wrong)[0] == 403
    assert ask(gate, "/config", query=f"token={TOKEN}")[0] == 403
    code, headers, body = ask(gate, query=f"token={TOKEN}")
    assert (code, headers["location"], body) == (303, "/", b"")
    assert headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
    assert TOKEN not in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert status(gate, ("host", HERE), ("cookie", cookie)) == 200
    assert status(gate, ("host", HERE), ("cookie", "a=b"), ("cookie", f"c=d; {cookie}")) == 200
    assert status(gate, ("host", HERE), ("cookie", cookie), path="/config") == 200
    assert status(gate, ("host", HERE), ("cookie", cookie + "0")) == 403
    assert status(gate, ("host", HERE), ("cookie", f"{cookie.partition('=')[0]}={TOKEN}")) == 403
    evil = ("origin", "http://evil.example")
    assert status(gate, ("host", HERE), ("cookie", cookie), evil, path=JOIN, method="POST") == 403
    assert status(gate, ("host", f"evil.example:{PORT}"), ("cookie", cookie)) == 403


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    gate = Gate(page, "0.0.0.0", PORT, TOKEN)
    ask(gate, query=f"token={TOKEN}")
    status(gate, ("host", HERE), ("cookie", f"{gate.cookie}=x; {gate.cookie}=y"))
    assert compared == [
        (TOKEN.encode(), TOKEN.encode()),
        (b"x", gate.pass_word.encode()),
        (b"y", gate.pass_word.encode()),
    ]


def test_a_wildcard_is_called_by_addresses_and_by_the_name_of_the_machine() -> None:
    gate = Gate(page, "0.0.0.0", PORT, TOKEN)
    link = f"token={TOKEN}"
    for host in ("192.168.0.9", "10.0.0.1", "[fe80::1]", "localhost", socket.gethostname()):
        assert ask(gate, headers=[("host", f"{host}:{PORT}")], query=link)[0] == 303, host
    for host in ("rebound.evil.example", "192.168.0.9.evil.example", ""):
        assert ask(gate, headers=[("host", f"{host}:{PORT}")], query=link)[0] == 403, host
    named = Gate(page, "my-server", PORT, TOKEN)
    assert ask(named, headers=[("host", f"my-server:{PORT}")], query=link)[0] == 303
    assert ask(named, headers=[("host", f"192.168.0.9:{PORT}")], query=link)[0] == 403
    assert show_address("::1", PORT) == f"http://[::1]:{PORT}/"
    assert show_address("0.0.0.0", PORT) == f"http://{socket.gethostname()}:{PORT}/"


def test_tokens() -> None:
    assert choose_token(None) is None
    assert len(choose_token("") or "") == 43
    assert choose_token("") != choose_token("")
    assert choose_token(TOKEN) == TOKEN
    for bad in ("tiny", "x" * 15, "with blanks in it, many", "a/b?c#d&e=f-0123456789", "é" * 20, "x" * 257):
        with pytest.raises(UsageError, match="16 to 256 letters"):
            choose_token(bad)


def test_other_hosts_need_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.9", "my-server", "127.0.0.1.evil.example", "0"):
        assert main(["studio", "--host", host]) == 2
        assert "add --token" in capsys.readouterr().err
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4


# The rest is a real server: Gradio's own routes, each asked as a hostile page would.


def serve(root: Path, *options: str) -> Iterator[tuple[int, str]]:
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    port = free_port()
    command = [sys.executable, "-m", "posttrain.cli", "studio", "--port", str(port), *options]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert f"127.0.0.1:{port}/" in line, line + server.stdout.read()
        yield port, line
        server.terminate()
        assert "token" not in server.stdout.read()  # the one link is the only place


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run below ``runs``, and another run and a secret beside it."""
    root = tmp_path_factory.mktemp("studio")
    for place in ("runs/known", "elsewhere/secret"):
        folder = root / place
        folder.mkdir(parents=True)
        recipe = "objective: grpo\ntask: stories\nrewards: [correct]\nrollout: {prompts: 2, group: 2}\n"
        (folder / "recipe.yaml").write_text(f"{recipe}description: told by {place}\n", encoding="utf-8")
    (root / "secret.txt").write_text("told by a file", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def port(root: Path) -> Iterator[int]:
    for found, _ in serve(root):
        yield found


def fetch(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request, with the headers as given (``host`` too); of an answer without end, the head alone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"host": f"127.0.0.1:{port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("content-length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    found = {name.lower(): value for name, value in answer.getheaders()}
    is_endless = found.get("content-type", "").startswith("text/event-stream")
    content = b"" if is_endless else answer.read()
    connection.close()
    return answer.status, found, content


def test_the_page_and_its_parts_are_served(port: int) -> None:
    code, headers, body = fetch(port, "/")
    assert code == 200
    assert b"posttrain studio" in body
    assert "access-control-allow-origin" not in headers
    assert headers["x-frame-options"] == "DENY"
    for path in set(re.findall(rb'(?:src|href)="\./((?:assets|static)/[^"]+)"', body)):
        assert fetch(port, f"/{path.decode()}")[0] == 200
    assert fetch(port, "/config")[0] == 200
    assert fetch(port, "/gradio_api/heartbeat/abc")[0] == 200


def test_every_route_of_gradio_is_refused_to_others_and_most_to_all(port: int) -> None:
    from posttrain.commands.chat.studio import build_studio, mount

    gradio = pytest.importorskip("gradio")
    routes: set[tuple[str, str]] = set()

    def walk(application: Any, prefix: str = "") -> None:
        for route in application.routes:
            included = getattr(route, "original_router", None)  # its routes know the whole path
            below = included or getattr(route, "app", None)
            if hasattr(below, "routes"):
                walk(below, prefix if included else prefix + route.path.rstrip("/"))
            if hasattr(route, "path"):
                routes.update((method, prefix + route.path) for method in getattr(route, "methods", None) or {"GET"})

    walk(mount(gradio, build_studio([], "nowhere")))
    paths = {(method, re.sub(r"\{[^}]*\}", "x", path) or "/") for method, path in routes}
    assert len(paths) > 60
    origin = f"http://127.0.0.1:{port}"
    passed = set()
    for method, path in sorted(paths):
        assert fetch(port, path, method, b"{}", host=f"evil.example:{port}")[0] == 403, path
        assert fetch(port, path, method, b"{}", origin="http://evil.example")[0] == 403, path
        if fetch(port, path, method, b"{}", origin=origin)[0] != 403:
            passed.add((method, path))
    assert passed == {
        *(("GET", path) for path in ("/", "/config", "/theme.css", "/favicon.ico", "/static/x", "/assets/x")),
        *(("GET", f"/gradio_api/{path}") for path in ("queue/data", "heartbeat/x", "app_id")),
        ("HEAD", "/"),
        ("POST", JOIN),
    }


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/upload",
        "/gradio_api/run/predict",
        "/gradio_api/api/answer",
        "/gradio_api/call/answer",
        "/gradio_api/call/v2/answer",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit",
        "/gradio_api/cancel",
        "/gradio_api/component_server",
        "/gradio_api/stream/x",
        "/login",
        "/gradio_api/run-history/connect",
    ],
)
def test_the_api_and_uploads_are_closed_to_the_page_itself(port: int, path: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\na\r\n--x--\r\n'
    for body, kind in ((b'{"data": [], "fn_index": 0}', "application/json"), (form, "multipart/form-data; boundary=x")):
        sent = fetch(port, path, "POST", body, origin=f"http://127.0.0.1:{port}", content_type=kind)
        assert sent[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file={root}/secret.txt",
        "/gradio_api/file/{root}/secret.txt",
        "/file={root}/secret.txt",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/static/../../secret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/static/..%2f..%2fsecret.txt",
        "/static/{root}/secret.txt",
        "/assets/{root}/secret.txt",
        "//{root}/secret.txt",
    ],
)
def test_no_file_leaves_the_machine(port: int, root: Path, path: str) -> None:
    code, _, body = fetch(port, path.format(root=root))
    assert code in (403, 404)
    assert b"told by" not in body


def ask_page(port: int, function: int, values: list[Any]) -> tuple[bool, str]:
    """What a function of the page answers to a request that the page itself would not send: (success, all messages)."""
    visit = f"visit{function}x{abs(hash(json.dumps(values)))}"
    asked = {"data": values, "fn_index": function, "session_hash": visit, "event_data": None, "trigger_id": None}
    origin = f"http://127.0.0.1:{port}"
    sent = fetch(port, JOIN, "POST", json.dumps(asked).encode(), origin=origin, content_type="application/json")
    assert sent[0] == 200, sent
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/gradio_api/queue/data?session_hash={visit}", headers={"host": f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    told = []
    for raw in answer:
        if raw.startswith(b"data:"):
            message = json.loads(raw.removeprefix(b"data:"))
            told.append(message)
            if message["msg"] == "process_completed":
                connection.close()
                return message["success"], json.dumps(told)
    raise AssertionError(told)


def functions(port: int) -> dict[str, dict[str, Any]]:
    """The page's functions by name, the first of each."""
    config = json.loads(fetch(port, "/config")[2])
    found: dict[str, dict[str, Any]] = {}
    for dependency in config["dependencies"]:
        assert dependency["api_visibility"] == "private"
        found.setdefault(dependency["api_name"], dependency)
    return found


def test_only_runs_that_are_offered_are_opened_whatever_is_asked(port: int, root: Path) -> None:
    choose = functions(port)["choose"]["id"]
    success, told = ask_page(port, choose, [["known"], []])
    assert success
    assert "told by runs/known" in told
    other = root / "elsewhere" / "secret"
    for name in (str(other), "../elsewhere/secret", "known/../../elsewhere/secret", ".", "../runs/known", "tiny"):
        success, told = ask_page(port, choose, [[name], []])
        assert not success, name
        assert "told by" not in told


@pytest.mark.parametrize("name", ["elsewhere/secret", "gpt2", "../x", "runs/known", "", None, 7, ["tiny"], {"a": 1}])
def test_only_models_that_are_offered_are_loaded_whatever_is_asked(port: int, name: Any) -> None:
    answer = functions(port)["answer"]["id"]

    def is_refused() -> bool:
        """By Gradio, which knows its menus, or by our own check, whose message is shown on the page."""
        success, told = ask_page(port, answer, values)
        return "mean log-probability" not in told and (not success or "this page offers no" in told)

    values = [None, "Hello", name, "(nobody)", "(nobody)", "nothing", "", 0.7, 1.0, 0, 2, 0, "(nobody)", "", "left"]
    assert is_refused()
    values[2], values[12] = "tiny", name  # and as a dictionary to steer by
    values[13] = "1=2"
    assert is_refused()
    values[12:14] = "(nobody)", ""
    success, told = ask_page(port, answer, values)
    assert success
    assert "mean log-probability" in told


def test_a_server_with_a_token_answers_nothing_without_it(root: Path) -> None:
    for port, line in serve(root, "--token"):
        link = re.search(r"\?token=([\w-]+)", line)
        assert link is not None
        assert fetch(port, "/")[0] == 403
        assert fetch(port, "/config")[0] == 403
        assert fetch(port, "/assets/x")[0] == 403
        code, headers, _ = fetch(port, f"/?token={link[1]}")
        assert code == 303
        cookie = headers["set-cookie"].partition(";")[0]
        assert fetch(port, "/config", cookie=cookie)[0] == 200
        assert fetch(port, "/config", cookie=cookie, host=f"evil.example:{port}")[0] == 403
