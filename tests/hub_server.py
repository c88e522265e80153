"""A stand-in for the Hugging Face hub: repositories in memory, and every request that was made."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was asked of the server, and what it keeps."""

    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, authorization
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # of the commits
    objects: dict[str, bytes] = field(default_factory=dict)  # large files, by SHA-256
    refusal: int | None = None


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub on this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, content: object, status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def note(self) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Authorization") or ""))

        def do_GET(self) -> None:
            self.note()
            self.answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            self.note()
            hub.objects[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self) -> None:
            self.note()
            body = self.body()
            if hub.refusal is not None:
                self.answer({"error": "not allowed"}, hub.refusal)
            elif self.path == "/api/repos/create":
                made = json.loads(body)
                hub.created.append(made)
                owner = made.get("organization") or "me"
                self.answer({"url": f"{hub.url}/{owner}/{made['name']}", "name": f"{owner}/{made['name']}"})
            elif "/preupload/" in self.path:
                files = []
                for one in json.loads(body)["files"]:
                    mode = "lfs" if one["path"].endswith((".safetensors", ".gguf")) else "regular"
                    files.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False})
                self.answer({"files": files})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = []
                for one in json.loads(body)["objects"]:
                    action = {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}
                    objects.append({**one, "authenticated": True, "actions": action})
                self.answer({"transfer": "basic", "objects": objects})
            elif "/commit/" in self.path:
                self.commit(body)
            else:
                self.answer({})

        def commit(self, body: bytes) -> None:
            for line in body.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "header":
                    hub.commits.append(value)
                elif item["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            sha = "1" * 40
            self.answer({"commitOid": sha, "commitUrl": f"{hub.url}/me/mine/commit/{sha}", "hookOutput": ""})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
