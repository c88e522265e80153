"""A real `posttrain serve` on a free port, for tests."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.sampling.vllm.server import free_port as unused_port


def free_port() -> int:
    """Return a port where nobody listens, and from which no connection of other tests goes out."""
    return unused_port()


@dataclass(frozen=True)
class Served:
    """A server that answers: its port, its process and the lines that it printed at first."""

    port: int
    process: subprocess.Popen[str] | None  # none: a thread of this process
    first_line: str
    lines: list[str] = field(default_factory=list)  # all that a thread printed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of an answer; a ``bytes`` body is sent as it is."""
        status, content = self.fetch(path, body, **headers)
        return status, json.loads(content)

    def fetch(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """(status, content) of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if content is None else "POST", path, content, headers)
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        return answer.status, read

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, all but the last, which says that it is done."""
        status, content = self.fetch(path, body | {"stream": True})
        assert status == 200, content
        events = content.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@contextmanager
def serving(folder: Path, *arguments: str, command: str = "serve") -> Iterator[Served]:
    """Serve while the context is open; ``command``: or ``studio``."""
    port = free_port()
    words = [sys.executable, "-m", "posttrain.cli", command, *arguments, "--port", str(port)]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert f"127.0.0.1:{port}" in line, line + process.stdout.read()
            yield Served(port, process, line)
        finally:
            process.terminate()


@contextmanager
def serving_here(*arguments: str, command: str = "serve") -> Iterator[Served]:
    """The same in a thread of this process, which has imported everything already; ``command``: or ``studio``."""
    import uvicorn

    port, lines, began = free_port(), list[str](), threading.Event()
    servers: list[uvicorn.Server] = []
    codes: list[int] = []

    class Server(uvicorn.Server):
        def run(self, sockets: Any = None) -> None:
            servers.append(self)
            began.set()
            super().run(sockets)

    def serve() -> None:
        codes.append(main([command, *arguments, "--port", str(port)]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Server)
        for module in ("serve.command", "chat.studio"):
            printed = f"posttrain.commands.{module}.print"
            patch.setattr(printed, lambda line, **how: lines.append(line), raising=False)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        while not began.wait(0.2):
            assert thread.is_alive(), f"it ended before it began: {codes}"
        try:
            yield Served(port, None, lines[0], lines)
        finally:
            servers[0].should_exit = True
            thread.join(60)
        assert codes == [0]
