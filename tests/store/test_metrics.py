from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from posttrain.errors import DataError, StorageError
from posttrain.store.metrics import MetricsLog, MetricsRow
from refusing import refuses


def test_lines_come_back_exactly(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"reward": 0.1 + 0.2, "loss": -5e-324}, {"step_seconds": 0.25})
    log.append(2, {"reward": 1 / 3})
    log.close()
    assert log.read() == [
        MetricsRow(1, {"reward": 0.30000000000000004, "loss": -5e-324}, {"step_seconds": 0.25}),
        MetricsRow(2, {"reward": 1 / 3}),
    ]
    assert log.last() == MetricsRow(2, {"reward": 1 / 3})
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {
        "step": 1,
        "metrics": {"reward": 0.30000000000000004, "loss": -5e-324},
        "timing": {"step_seconds": 0.25},
    }


def test_numbers_that_are_not_finite_stay_strict_json_and_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    metrics = log.read()[0].metrics
    assert math.isnan(metrics["a"])
    assert metrics["b"] == math.inf
    assert metrics["c"] == -math.inf


def test_no_file_reads_as_no_rows_and_reading_makes_none(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    assert log.read() == []
    assert log.last() is None
    assert log.trim(5) == 0
    assert os.listdir(tmp_path) == []


def test_trimmed_and_repeated_equals_uninterrupted(tmp_path: Path) -> None:
    whole, cut = MetricsLog(tmp_path / "whole.jsonl"), MetricsLog(tmp_path / "cut.jsonl")
    for step in range(1, 8):
        whole.append(step, {"reward": step / 7})
    for step in range(1, 6):
        cut.append(step, {"reward": step / 7})
    with cut.path.open("ab") as file:
        file.write(b'{"step": 6, "metr')  # a kill in the middle of a line
    assert cut.trim(after_step=3) == 2
    assert [row.step for row in cut.read()] == [1, 2, 3]
    for step in range(4, 8):
        cut.append(step, {"reward": step / 7})
    assert cut.path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize("before", [[], [1]])
@pytest.mark.parametrize("torn", [b'{"step": 3', b"x" * 10_000])
def test_appending_after_a_torn_line_does_not_continue_it(tmp_path: Path, before: list[int], torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "metrics": {"a": 1.0}, "timing": {}}\n' * len(before) + torn)
    log = MetricsLog(path)
    assert [row.step for row in log.read()] == before  # reading alone changes nothing
    assert path.read_bytes().endswith(torn)
    log.append(2, {"a": 2.0})
    assert [row.step for row in log.read()] == [*before, 2]
    assert log.num_rows() == len(before) + 1


@pytest.mark.parametrize("line", ["not json", '{"step": 2}', '{"step": 2, "metrics": {"a": "much"}}', "[]"])
def test_a_malformed_line_is_named_and_nothing_is_changed(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    content = (
        f'{{"step": 1, "metrics": {{}}, "timing": {{}}}}\n{line}\n{{"step": 3, "metrics": {{}}, "timing": {{}}}}\n'
    )
    path.write_text(content)
    with refuses(DataError, "m.jsonl:2"):
        MetricsLog(path).read()
    with pytest.raises(DataError):
        MetricsLog(path).trim(1)
    assert path.read_text() == content


def test_a_full_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append(1, {"a": 1.0})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with refuses(StorageError, "disk is full", "free"):
            log.append(2, {"a": 2.0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError):
            log.trim(0)
    assert [row.step for row in log.read()] == [1]
    assert os.listdir(tmp_path) == ["m.jsonl"]
