"""One damaged or hostile run is listed as damaged, with the reason; the others are listed as before."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest
import yaml
from untrusted_sources import plain_recipe

from posttrain.cli import main
from posttrain.errors import DataError
from posttrain.reports.summary import write_summary
from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.runs.listing import summarize_run
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses

RECIPE = "model: {name: tiny}\ntask: {name: stories}\nobjective: {name: grpo}\ntrain: {steps: 4}\n"


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    start = {"versions": {"posttrain": "0.1.0"}, "hardware": {"cpus": 2, "gpus": []}, "git": {}}
    content = {"recipe": "tiny/grpo", "created": "2026-01-01T00:00:00+00:00", "starts": [start]}
    (folder / "env.json").write_text(json.dumps(content))
    RunDirectory(folder).write_status(
        RunStatus("finished", 4, 4, 1, "here", 5.0, None, "accuracy", {"accuracy": 0.5}, "stories/validation")
    )
    log = MetricsLog(folder / "metrics.jsonl")
    log.append(1, {"loss": 0.5})
    log.close()
    (folder / "checkpoints").mkdir()
    with RolloutStore(folder / "rollouts.db") as store:
        example = Example("e", (Message("user", "?"),), "1")
        completion = Completion((1,), (-0.5,), "stop")
        store.record([Rollout(example, (2,), completion, "1", {"correct": 1.0}, 1.0, 1, 0, 0, 0)])
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs folder with ``good`` and ``bad``; the working directory is its home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("bad", "good"):
        make_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def status(**changes: object) -> bytes:
    good = {"state": "finished", "step": 4, "steps": 4, "pid": 1, "host": "h", "updated": 5.0}
    good |= {"primary_metric": "accuracy", "held_out": {"accuracy": 0.5}}
    return json.dumps(good | changes).encode()


DEEP = b"[" * 200_000 + b"]" * 200_000
BOMB = b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 10)}]\n".encode() for i in range(12)
)
CONTENTS: list[tuple[str, bytes, str]] = [
    ("env.json", b"[]", "all of it"),
    ("env.json", DEEP, "RecursionError"),
    ("env.json", b'{"starts": [{"versions": 3}]}', "starts.0.versions"),
    ("env.json", b'{"recipe": "\\ud800"}', "surrogates not allowed"),
    ("env.json", b"\xff\xfe", "UnicodeDecodeError"),
    ("status.json", status(step="four"), "step"),
    ("status.json", status(state="splendid"), "splendid"),
    ("status.json", status(held_out={"accuracy": float("nan")}), "nan instead of a finite number"),
    ("status.json", status(primary_metric=["nothing"]), "primary_metric"),
    ("status.json", status(step=10**400), "a whole number above"),
    ("status.json", b'{"step": ' + b"1" * 5000 + b"}", "4300 digits"),
    ("recipe.yaml", b"train: {steps: 1}\ntrain: {}\n", "recipe.yaml:2: train: this key stands twice"),
    ("recipe.yaml", b"train: {steps: many}\n", "train.steps is not a whole number"),
    ("recipe.yaml", BOMB, "more than 50,000 values, aliases written out"),
    ("recipe.yaml", b"x: !!python/object/apply:os.system [ls]\n", "the tag !!python/object/apply:os.system is not"),
    ("recipe.yaml", b"x: .nan\n", "nan instead of a finite number"),
    ("recipe.yaml", b"x: " + b"9" * 5000, "a number of 5,000 characters"),
    ("recipe.yaml", b"#" * (1 << 21), "at most 1,048,576 are read"),
    ("metrics.jsonl", b"[1]\n", "not a line of metrics"),
    ("metrics.jsonl", b'{"step": 1, "metrics": {"a": ' + b"9" * 400 + b"}}\n", "OverflowError"),
    ("metrics.jsonl", b'{"step": 1, "metrics": {}, "timing": {"a": 1e300}}\n', "timing: a is 1e+300"),
    ("metrics.jsonl", b'{"step": 1, "metrics": {"\\ud800": 1}}\n', "surrogates not allowed"),
]
COMMANDS = [["runs", "--sort", "metric"], ["runs", "show", "good"], ["runs", "prune", "--all", "--yes"]]


def check_listed(root: Path, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main(command) == 0, command
        capsys.readouterr()
    assert main(["runs", "--format", "json"]) == 0
    by_name = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert by_name["good"]["state"] == "finished"
    assert by_name["bad"]["state"] == "damaged"
    assert reason in by_name["bad"]["problem"]
    assert main(["runs", "show", "bad"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "state damaged" in shown
    assert "problem" in shown
    assert main(["runs", "compare", "good", "bad"]) in (0, 2)
    assert main(["runs", "export", "bad", "--to", "exported", "--weights", "none"]) in (0, 2)
    capsys.readouterr()
    assert main(["runs", "delete", "bad", "--yes"]) == 0
    assert sorted(path.name for path in root.iterdir()) == ["good"]


def test_summarize_run_damaged_file_names_the_reason(root: Path) -> None:
    for name, content, reason in CONTENTS:
        good = (root / "bad" / name).read_bytes()
        (root / "bad" / name).write_bytes(content)
        summary = summarize_run(root / "bad")
        assert summary.state == "damaged", reason
        assert reason in (summary.problem or "")
        (root / "bad" / name).write_bytes(good)
    assert summarize_run(root / "bad").state == "finished"


FILES = ["recipe.yaml", "env.json", "status.json", "metrics.jsonl"]


@pytest.mark.parametrize("name", FILES)
def test_commands_with_a_damaged_run_list_the_others(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "bad" / name
    path.unlink()
    path.mkdir()
    assert "not a regular file" in (summarize_run(root / "bad").problem or "")
    path.rmdir()
    os.mkfifo(path)  # opening one would wait for a writer
    check_listed(root, "not a regular file", capsys)


@pytest.mark.parametrize("name", [".lock", "rollouts.db", "checkpoints", "log.txt"])
def test_a_pipe_is_not_waited_for(root: Path, name: str) -> None:
    path = root / "bad" / name
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert [main(command) for command in [*COMMANDS, ["runs", "show", "bad"]]] == [0] * 4


def test_a_folder_that_is_nested_a_thousand_times(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = os.open(root / "bad", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    try:
        for command in COMMANDS[:2]:
            assert main(command) == 0, command
    finally:  # Python's own removal does not reach so deep
        subprocess.run(["rm", "-rf", str(root / "bad" / "d")], check=True)
    capsys.readouterr()


def test_checkpoints_with_odd_names_are_none(root: Path) -> None:
    for name in ("step-0000001", "step-" + "9" * 200, "step-\u0661\u0662\u0663\u0661\u0662\u0663", "step-000003"):
        (root / "bad" / "checkpoints" / name).mkdir()
    assert [main(command) for command in [*COMMANDS, ["runs", "show", "bad"]]] == [0] * 4


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 25_001):
        log.append(step, {"loss": step / 8})
    log.append(25_000, {"eval/a/accuracy": 0.5})
    log.close()
    assert log.path.stat().st_size > 1 << 20
    with log.path.open("ab") as file:
        file.write(b'{"step": 25001, "met')
    assert log.last() == log.read()[-1]
    row = log.last(lambda row: "loss" in row.metrics)
    assert row is not None
    assert (row.step, row.metrics) == (25_000, {"loss": 3125.0})
    assert log.last(lambda row: False) is None
    log.path.write_bytes(b"x" * (1 << 17))  # no line at all
    assert log.last() is None
    assert log.read() == []


RECURSIVE = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x"
SCRIPTS: dict[str, tuple[str, str]] = {
    "a view in place of a table": (
        f"DROP TABLE rollouts; CREATE VIEW rollouts AS {RECURSIVE} AS step FROM c;",
        "it holds view 'rollouts'",
    ),
    "a trigger": ("CREATE TRIGGER t AFTER DELETE ON rollouts BEGIN DELETE FROM about; END;", "it holds trigger 't'"),
    "a generated column": ("ALTER TABLE rollouts ADD COLUMN g INTEGER AS (step + 1);", "it holds table 'rollouts'"),
    "a table less": ("DROP TABLE evaluation_rollouts;", "something is missing"),
    "an older version that it is not": ("PRAGMA user_version = 1;", "an earlier posttrain wrote this file"),
    "a step of text": ("UPDATE rollouts SET step = 'one';", "a step is not an integer"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_strangers_database_is_refused_before_anything_in_it_runs(
    root: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "bad" / "rollouts.db"
    db = sqlite3.connect(path)
    db.executescript(f"PRAGMA journal_mode = DELETE; {SCRIPTS[script][0]}")
    db.close()
    before = path.read_bytes()
    for command in [*COMMANDS, ["runs", "show", "bad"]]:
        assert main(command) == 0, command
    shown = " ".join(capsys.readouterr().out.split())
    assert SCRIPTS[script][1] in shown
    if script != "a step of text":
        with pytest.raises(DataError, match=r"not a rollout database|an earlier posttrain wrote"):
            RolloutStore(path)  # nor is it written to: a trigger would run
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("reward = 'much'", "1 is str"),
        (f"parts = '{'[' * 100_000}'", "row 1"),
        ("token_ids = x'0000'", "row 1"),
        ("prompt = x'ff'", "1 is bytes"),
        ("completion = zeroblob(200000000)", "damaged"),
    ],
)
def test_a_strangers_rows_are_checked_as_they_are_read(root: Path, change: str, reason: str) -> None:
    path = root / "bad" / "rollouts.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute(f"UPDATE rollouts SET {change}")
    db.commit()
    db.close()
    with RolloutStore(path, read_only=True) as store, refuses(DataError, reason):
        store.training()


def test_reading_ends_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.store import database

    path = root / "bad" / "rollouts.db"
    monkeypatch.setattr(database, "READ_SECONDS", 0.2)
    with (
        refuses(DataError, "interrupted"),
        database.sqlite_errors(path),
        database.connect(path, read_only=True) as db,
    ):
        db.execute(f"SELECT COUNT(*) FROM ({RECURSIVE} FROM c)").fetchall()


def test_an_own_database_that_was_analyzed_and_vacuumed_is_read(root: Path) -> None:
    path = root / "bad" / "rollouts.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("ANALYZE")
    db.execute("VACUUM")
    db.close()
    with RolloutStore(path, read_only=True) as store:
        assert store.count_training() == {1: 1}
        assert store.num_rows(1) == {"rollouts": 1, "evaluation_rollouts": 0}


def no_number(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize(
    "results",
    [
        {"accuracy": 0.5, "accuracy_low": "-inf", "accuracy_high": "nan", "n": "inf"},
        {"accuracy": 0.5, "step": "nan", "name": 3.0, "loss": "inf"},
        {"<script>\u202e": 1.0, "accuracy": 1e300},
    ],
)
def test_results_that_no_evaluation_has(
    root: Path, results: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages, lists and the card of a run whose evaluations say other things than ours do."""
    bad = root / "bad"
    (bad / "recipe.yaml").write_text(yaml.safe_dump(plain_recipe()))
    output = "accuracy" if "loss" in results else "<script>\u202e"
    RunDirectory(bad).write_status(RunStatus("finished", 1, 1, 1, "h", 5.0, primary_metric=output))
    metrics = {f"eval/stories/validation/{name}": value for name, value in results.items()}
    (bad / "metrics.jsonl").write_text(json.dumps({"step": 0, "metrics": metrics}) + "\n")
    page = write_summary(bad).read_text()
    assert "<script>" not in page.replace("<script></script>", "")
    assert "\u202e" not in page
    stored = json.loads((bad / "results.json").read_text(), parse_constant=no_number)
    of_task = stored["evaluations"].get("stories/validation")
    assert of_task is None or of_task["first"] == {
        **{name: value if isinstance(value, float | int) else None for name, value in results.items()},
        "step": 0,
    }
    assert main(["runs", "show", "bad", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=no_number)["evaluations"]
    assert [(item["name"], item["step"]) for item in shown] == [("stories/validation", 0)] * bool(results)
    assert main(["runs", "compare", "good", "bad"]) == 0
    assert main(["runs", "export", "bad", "--to", "exported", "--weights", "none"]) == 0
    assert "\u202e" not in (root.parent / "exported" / "README.md").read_text()


@pytest.mark.parametrize("name", [*FILES, "rollouts.db"])
def test_no_text_of_another_file_is_shown(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = make_run(root.parent / "elsewhere" / "secret")
    for file, content in {"recipe.yaml": "token: hunter2\n", "env.json": '{"hunter2": 1}'}.items():
        (elsewhere / file).write_text(content)
    (root / "bad" / name).unlink(missing_ok=True)
    (root / "bad" / name).symlink_to(elsewhere / name)
    compared = ["runs", "compare", "good", "bad"]
    needed = name in ("recipe.yaml", "metrics.jsonl", "status.json")
    for command in (["runs", "show", "bad", "--format", "json"], ["runs", "show", "bad"], compared):
        assert main(command) == (2 if command == compared and needed else 0)
        shown = capsys.readouterr()
        assert "hunter2" not in shown.out + shown.err
        assert "elsewhere" not in shown.out + shown.err
        output = " ".join((shown.out + shown.err).split())
        if "show" in command:
            assert f"{name}: this is a link to another folder; replace the link with a copy (cp -L)" in output


def test_the_table_of_a_sweep_is_its_own(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root.parent / "secret").write_text("hunter2\n")
    (root / "compared").mkdir()
    (root / "compared" / "sweep.yaml").write_text("rows: {a: {}}\nseeds: 1\n")
    (root / "compared" / "table.md").symlink_to(root.parent / "secret")
    assert main(["runs", "show", "compared"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "hunter2" not in shown
    assert "table.md: this is a link to another folder" in shown
    assert "0 of 0 runs finished" in shown
