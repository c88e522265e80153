"""Trackers of further packages: what they show after a kill and a resume, and how they fail.

The packages themselves are tried where they are installed; a stand-in of each library is tried everywhere.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from posttrain.errors import MissingExtra, RecipeError, UsageError
from posttrain.recipes.sections import Component
from posttrain.store.metrics import MetricsRow, TrackedMetrics, TrackedRun, build_trackers
from refusing import refuses

ROWS = [
    MetricsRow(0, {"eval/stories/test/accuracy": 0.25}, {"evaluation_seconds": 1.5}),
    MetricsRow(1, {"loss": 2.0 / 3.0, "reward/xml_format": 0.1}, {"step_seconds": 0.5}),
    MetricsRow(2, {"loss": math.nan, "reward/xml_format": -1e-30}, {"step_seconds": 0.25}),
    MetricsRow(2, {"eval/stories/test/accuracy": 0.5}, {"evaluation_seconds": 2.5}),
    MetricsRow(3, {"loss": 1e300, "reward/xml_format": 0.3}, {"step_seconds": 0.125}),
]
RECIPE = {"train": {"lr": 0.1}, "model": {"name": "tiny"}}
Points = list[tuple[int, str, float]]


def points_of(rows: list[MetricsRow]) -> Points:
    found = []
    for row in rows:
        found += [(row.step, name, value) for name, value in row.metrics.items()]
        found += [(row.step, f"timing/{name}", value) for name, value in row.timing.items()]
    return sorted(found, key=repr)


def open_log(folder: Path, word: Any, warnings: list[str]) -> TrackedMetrics:
    folder.mkdir(parents=True, exist_ok=True)
    made = build_trackers([Component.model_validate(word)], TrackedRun(folder, RECIPE, warnings.append))
    return TrackedMetrics(folder / "metrics.jsonl", made)


def write(log: TrackedMetrics, rows: list[MetricsRow]) -> None:
    for row in rows:
        log.append(row.step, row.metrics, row.timing)


def kill_and_resume(folder: Path, word: Any) -> list[str]:
    """Write up to step 3, go back to the checkpoint of step 1, and write the rest again; returns notices."""
    warnings: list[str] = []
    first = open_log(folder, word, warnings)
    write(first, ROWS)
    first.close()
    again = open_log(folder, word, warnings)
    again.trim(1)
    write(again, ROWS[2:])
    again.close()
    return warnings


class MLflowServer:
    """The part of MLflow's REST interface that a tracker uses, in memory."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.refuses = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                asked = urlparse(self.path)
                outer.answer(self, asked.path, {key: value[0] for key, value in parse_qs(asked.query).items()})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.answer(self, self.path, json.loads(body))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, asked: dict[str, Any]) -> None:
        status, content = self.respond(path.removeprefix("/api/2.0/mlflow/"), asked)
        data = json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def respond(self, action: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuses:
            return 403, {"error_code": "PERMISSION_DENIED", "message": "not allowed"}
        if action == "experiments/get-by-name":
            name = asked["experiment_name"]
            if name not in self.experiments:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            about = {"experiment_id": self.experiments[name], "name": name, "lifecycle_stage": "active"}
            return 200, {"experiment": about}
        if action == "experiments/create":
            self.experiments[asked["name"]] = "7"
            return 200, {"experiment_id": "7"}
        if action == "runs/create":
            run_id = f"{len(self.runs):032x}"
            about = {"run_id": run_id, "run_uuid": run_id, "run_name": asked.get("run_name", ""), "status": "RUNNING"}
            about |= {"experiment_id": asked["experiment_id"], "lifecycle_stage": "active", "artifact_uri": "x"}
            self.runs[run_id] = {"info": about, "metrics": [], "params": {}}
            return 200, {"run": {"info": about, "data": {}}}
        run = self.runs[asked.get("run_id") or asked["run_uuid"]]
        if action == "runs/log-batch":
            run["metrics"] += asked.get("metrics", [])
            run["params"] |= {one["key"]: one["value"] for one in asked.get("params", [])}
        elif action == "runs/update":
            run["info"]["status"] = asked.get("status", run["info"]["status"])
        elif action == "runs/delete":
            run["info"]["lifecycle_stage"] = "deleted"
        return 200, {"run_info": run["info"], "run": {"info": run["info"], "data": {}}}

    def active(self) -> list[dict[str, Any]]:
        return [run for run in self.runs.values() if run["info"]["lifecycle_stage"] == "active"]


@pytest.fixture
def mlflow_server() -> Iterator[MLflowServer]:
    server = MLflowServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_mlflow_server_has_each_row_once_after_a_resume(tmp_path: Path, mlflow_server: MLflowServer) -> None:
    pytest.importorskip("mlflow")
    word = {"name": "mlflow", "uri": mlflow_server.url, "experiment": "sums"}
    assert kill_and_resume(tmp_path / "mine", word) == []
    assert mlflow_server.experiments == {"sums": "7"}
    assert [run["info"]["lifecycle_stage"] for run in mlflow_server.runs.values()] == ["deleted", "active"]
    (run,) = mlflow_server.active()
    found = [(int(one.get("step", 0)), one["key"], float(one["value"])) for one in run["metrics"]]
    assert repr(sorted(found, key=repr)) == repr(points_of(ROWS))
    assert run["info"]["status"] == "FINISHED"
    assert run["info"]["run_name"] == "mine"
    assert run["params"] == {"train.lr": "0.1", "model.name": "tiny"}


def test_mlflow_server_that_refuses_or_is_absent_is_left_out_with_one_notice(
    tmp_path: Path, mlflow_server: MLflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow_server.refuses = True
    for number, uri in enumerate((mlflow_server.url, "http://name:secret@127.0.0.1:9")):
        warnings: list[str] = []
        log = open_log(tmp_path / str(number), {"name": "mlflow", "uri": uri}, warnings)
        write(log, ROWS)
        log.close()
        assert len(warnings) == 1
        assert warnings[0].startswith("track: mlflow could not be started")
        assert "secret" not in warnings[0]
        assert len(log.read()) == len(ROWS)


def test_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with refuses(UsageError, "track: mlflow", "MLFLOW_TRACKING_URI"):
        open_log(tmp_path, "mlflow", [])
    for uri in ("127.0.0.1:5000", "runs", "ftp://x", "http://"):
        with refuses(UsageError, "track: mlflow", uri):
            open_log(tmp_path, {"name": "mlflow", "uri": uri}, [])


def test_trackio_has_each_row_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    library = pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    if Path(utils.TRACKIO_DIR) != tmp_path / "trackio":
        pytest.skip("trackio was imported with another folder")
    assert kill_and_resume(tmp_path / "mine", {"name": "trackio", "project": "sums"}) == []
    (run,) = library.Api().runs("sums")
    assert run.name == "mine"
    found = []
    for line in SQLiteStorage.get_logs("sums", "mine"):
        about = {key: value for key, value in line.items() if key not in ("step", "timestamp")}
        found += [(int(line["step"]), key, float(value)) for key, value in about.items()]
    assert repr(sorted(found, key=repr)) == repr(points_of(ROWS))


def test_swanlab_has_each_row_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    assert kill_and_resume(tmp_path / "mine", "swanlab") == []
    (file,) = (tmp_path / "mine" / "swanlab").glob("run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    found = []
    while (content := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(content)
        if record.HasField("scalar"):
            scalar = record.scalar
            found.append((int(scalar.step), str(scalar.key), float(scalar.value.number)))
    reader.close()
    assert repr(sorted(found, key=repr)) == repr(points_of(ROWS))


class FakeRun:
    """A run of a stand-in library, which keeps what it is given."""

    def __init__(self, kept: list[Any], number: int, fails: bool) -> None:
        self.kept = kept
        self.id = f"id{number}"
        self.fails = fails

    def log(self, data: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.kept.append((step, data))

    def finish(self) -> None:
        self.kept.append("finish")

    def delete(self) -> None:
        self.kept.clear()


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_stand_in_library_is_given_each_row(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[FakeRun, dict[str, Any]]] = []
    fails = False

    def init(**options: Any) -> FakeRun:
        made.append((FakeRun([], len(made), fails), options))
        return made[-1][0]

    library = ModuleType(name)
    api = SimpleNamespace(runs=lambda project: [run for run, _ in made])
    library.__dict__.update(init=init, Api=lambda: api, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    assert kill_and_resume(tmp_path / "mine", name) == []
    (first, _), (second, options) = made
    assert (options["name"], options["config"], options["project"]) == ("mine", RECIPE, "posttrain")
    if name == "trackio":
        assert (first.kept, options["space_id"]) == ([], None)
    else:
        assert options["mode"] == "offline"
    expected = [(row.step, {**row.metrics, **{f"timing/{k}": v for k, v in row.timing.items()}}) for row in ROWS]
    assert repr(second.kept) == repr([*expected, "finish"])
    fails = True
    warnings: list[str] = []
    log = open_log(tmp_path / "other", name, warnings)
    write(log, ROWS)
    log.close()
    assert len(warnings) == 1
    assert f"track: {name} stopped taking metrics (the disk is full" in warnings[0]
    assert len(log.read()) == len(ROWS)


@pytest.mark.parametrize("name", ["trackio", "mlflow", "swanlab"])
def test_tracker_without_its_package_says_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with refuses(MissingExtra, f"track: {name}", "pip install", f"[{name}]"):
        open_log(tmp_path, name, [])


def test_unknown_options_and_names_of_trackers_are_refused(tmp_path: Path) -> None:
    with refuses(RecipeError, "track.0.mode", "offline"):
        open_log(tmp_path, {"name": "swanlab", "mode": "cloud"}, [])
    with refuses(RecipeError, "trackio", "space_id"):
        open_log(tmp_path, {"name": "trackio", "space_id": "a/b"}, [])
