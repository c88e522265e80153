"""Trackers show what ``metrics.jsonl`` holds, no more and no less, however often a run is killed and resumed."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
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


class Recorder(list):
    """A tracker that keeps what it is given."""

    def start(self, kept: Any) -> None:
        self.append(("start", list(kept)))

    def log(self, row: MetricsRow) -> None:
        self.append(row)

    def close(self) -> None:
        self.append("close")


def write(log: TrackedMetrics, rows: list[MetricsRow]) -> None:
    for row in rows:
        log.append(row.step, row.metrics, row.timing)


def open_log(folder: Path, *words: Any, warnings: list[str] | None = None) -> TrackedMetrics:
    output: list[str] = [] if warnings is None else warnings
    run = TrackedRun(folder, {"train": {"lr": 0.1}}, output.append)
    made = build_trackers([Component.model_validate(word) for word in words], run)
    return TrackedMetrics(folder / "metrics.jsonl", made)


def test_trackers_receive_every_line_once_it_is_written(tmp_path: Path) -> None:
    first = Recorder()
    log = TrackedMetrics(tmp_path / "metrics.jsonl", [first])
    log.close()
    assert first == []  # a run that writes nothing opens nothing
    write(log, ROWS[:2])
    assert log.read() == ROWS[:2]
    log.close()
    assert first == [("start", []), *ROWS[:2], "close"]
    second = Recorder()
    log = TrackedMetrics(tmp_path / "metrics.jsonl", [second])
    log.trim(0)  # as a resumed run does
    write(log, ROWS[1:3])
    log.close()
    assert second == [("start", ROWS[:1]), ROWS[1], ROWS[2], "close"]


@pytest.mark.parametrize(("word", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_reported_at_once(tmp_path: Path, monkeypatch, word: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"track: {word} needs the package '{word}'.*pip install .*\[track\]"):
        open_log(tmp_path, word)
    assert list(tmp_path.iterdir()) == []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a run's folder, by name: (step, value) in the order of the files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def expected_scalars(rows: list[MetricsRow]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        numbers = row.metrics | {f"timing/{name}": value for name, value in row.timing.items()}
        for name, value in numbers.items():
            single = (
                math.copysign(math.inf, value)
                if abs(value) > 3.5e38
                else struct.unpack("f", struct.pack("f", value))[0]
            )
            found.setdefault(name, []).append((row.step, single))
    return found


def test_tensorboard_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    """The first process wrote up to step 3 and was killed (never closed); the checkpoint is that of step 1."""
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    killed = open_log(tmp_path, "tensorboard")
    write(killed, ROWS)
    assert str(scalars(tmp_path)) == str(expected_scalars(ROWS))  # there is a nan; it was flushed line by line
    repeated = [
        ROWS[0],
        ROWS[1],
        MetricsRow(2, {"loss": 7.0}),
        MetricsRow(3, {"loss": 8.0}),
        MetricsRow(4, {"loss": 9.0}),
    ]
    log = open_log(tmp_path, "tensorboard")
    log.trim(1)
    write(log, repeated[2:])
    log.close()
    assert log.read() == repeated
    assert {k: v for k, v in scalars(tmp_path).items() if v} == expected_scalars(repeated)


def records(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format behind a header of seven bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole = (whole if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole


def offline_runs(folder: Path) -> list[tuple[Any, list[dict[str, float]]]]:
    """Return description and rows of history of each offline run in a folder."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits until its process has written everything
    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        about, history = None, []
        for content in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                about = record.run
            if record.HasField("history"):
                row = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                history.append({k: v for k, v in row.items() if k not in ("_runtime", "_timestamp")})
        found.append((about, history))
    return found


def expected_history(rows: list[MetricsRow]) -> list[dict[str, float]]:
    return [
        {"_step": i, "step": r.step} | r.metrics | {f"timing/{k}": v for k, v in r.timing.items()}
        for i, r in enumerate(rows)
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra 'track' is not installed")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("offline")
def test_wandb_keeps_the_lines_offline_and_through_a_resume(tmp_path: Path) -> None:
    rows = [row for row in ROWS if not any(map(math.isnan, row.metrics.values()))]
    folder = tmp_path / "a-run"
    folder.mkdir()
    word = {"name": "wandb", "project": "stories", "group": "seeds"}
    warnings: list[str] = []
    log = open_log(folder, word, warnings=warnings)
    write(log, rows)
    log.close()
    ((about, history),) = offline_runs(folder)
    assert history == expected_history(rows)  # doubles, bit for bit
    assert (about.project, about.run_group, about.display_name) == ("stories", "seeds", "a-run")
    assert {i.key: json.loads(i.value_json) for i in about.config.update}["train"] == {"lr": 0.1}
    identity = (folder / "wandb" / "run-id.txt").read_text()
    assert about.run_id == identity
    log = open_log(folder, word, warnings=warnings)
    log.trim(1)
    repeated = [*rows[:2], MetricsRow(2, {"loss": 7.0}), MetricsRow(3, {"loss": 8.0})]
    write(log, repeated[2:])
    log.close()
    ((about, history),) = offline_runs(folder)  # one, whole: uploading two of an id replaces the first
    assert history == expected_history(repeated)
    assert about.run_id == identity
    assert warnings == []


@pytest.mark.parametrize(
    ("environment", "word", "expected"),
    [
        ({"API_KEY": "k"}, {}, ("posttrain", None, "online")),
        ({"API_KEY": "k", "MODE": "offline"}, {}, ("posttrain", None, "offline")),
        ({"PROJECT": "theirs", "ENTITY": "lab", "MODE": "disabled"}, {}, ("theirs", "lab", "disabled")),
        (
            {"PROJECT": "x", "ENTITY": "y", "MODE": "online"},
            {"project": "a", "entity": "b", "mode": "offline"},
            ("a", "b", "offline"),
        ),
    ],
)
@pytest.mark.usefixtures("offline")
def test_wandb_obeys_its_environment_where_the_recipe_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], word: dict[str, str], expected: tuple
) -> None:
    for name, value in (environment | {"DIR": str(tmp_path / "elsewhere")}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    library = Broken("init", OSError("that is all"))
    monkeypatch.setitem(sys.modules, "wandb", library)
    write(open_log(tmp_path, {"name": "wandb", **word}), ROWS[:1])
    assert tuple(library.options[name] for name in ("project", "entity", "mode")) == expected
    assert library.options["dir"] == str(tmp_path / "elsewhere")
    assert library.options["id"] == (tmp_path / "wandb" / "run-id.txt").read_text()
    monkeypatch.setenv("WANDB_MODE", "of\x1bline")
    with refuses(UsageError, "WANDB_MODE is 'of"):
        open_log(tmp_path, "wandb")


class ServerError(Exception):
    """As W&B's own, which have no class in common."""


ServerError.__module__ = "wandb.sdk.mailbox"


class Broken:
    """A W&B that raises ``error`` at the call of the name ``breaks``, for ``log`` at the third row."""

    class Settings:
        mode = "online"

        def __init__(self, **_: Any) -> None: ...

    settings = Settings()

    def __init__(self, breaks: str, error: Exception) -> None:
        self.breaks, self.error = breaks, error
        self.logged: list[dict[str, float]] = []

    def init(self, **options: Any) -> Any:
        self.options = options
        if self.breaks == "init":
            raise self.error
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, line: dict[str, float], step: int) -> None:
        if self.breaks == "log" and len(self.logged) == 2:
            raise self.error
        assert step == len(self.logged)
        self.logged.append(line)

    def finish(self) -> None:
        if self.breaks == "finish":
            raise self.error


@pytest.mark.parametrize(
    ("breaks", "error", "num_logged", "notice"),
    [
        ("init", ServerError("no route to the server\nat all"), 0, "could not be started (no route to the server"),
        ("log", ConnectionResetError("Connection lost"), 2, "stopped taking metrics (Connection lost"),
        ("finish", ServerError("cannot upload"), 5, "could not be closed (cannot upload"),
    ],
)
def test_trouble_with_wandb_is_reported_and_never_stops_a_run(
    tmp_path: Path, monkeypatch, breaks: str, error: Exception, num_logged: int, notice: str
) -> None:
    library, warnings = Broken(breaks, error), []
    monkeypatch.setitem(sys.modules, "wandb", library)
    log = open_log(tmp_path, {"name": "wandb", "mode": "online"}, warnings=warnings)
    write(log, ROWS)
    log.close()
    assert [row.step for row in log.read()] == [0, 1, 2, 2, 3]
    assert len(library.logged) == num_logged
    assert len(warnings) == 1
    assert warnings[0].startswith(f"track: wandb {notice}")
    assert warnings[0].endswith("training continues, metrics.jsonl has everything")


def test_our_own_mistakes_are_not_taken_for_trouble_with_wandb(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Broken("log", TypeError("ours")))
    log = open_log(tmp_path, "wandb")
    with pytest.raises(TypeError):
        write(log, ROWS)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda: Recorder(), "must take one argument"),
        (lambda run, more: Recorder(), "must take one argument"),
        (lambda run: None, "returned NoneType, which has no start, log, close"),
        (lambda run: [], "returned list, which has no start, log, close"),
    ],
)
def test_tracker_of_a_session_that_cannot_be_one_is_refused_by_its_key(
    tmp_path: Path, function: Callable[..., Any], named: str
) -> None:
    with pytest.raises(RecipeError, match=rf"^track\.0: python_session:\w+ {named}"):
        open_log(tmp_path, registry.name_function(function))
    assert open_log(tmp_path, registry.name_function(lambda run: Recorder())).trackers == [Recorder()]
