"""Rows of a stranger's data file that no data set has: the file, the line and what would work, never a traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.data import reading
from posttrain.data.reading import read_file
from posttrain.errors import DataError
from refusing import refuses

MANY = "9" * 400
GOLD = {"problem": "What is 1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("jsonl", f'{{"prompt": "?", "answer": {MANY}}}', "a number of 400 digits; use shorter numbers"),
        ("jsonl", f'{{"prompt": "?", "answer": -{MANY}}}', "a number of 401 digits"),
        ("aime24", f'{{"problem": "?", "answer": {MANY}}}', "a number of 400 digits"),
        (
            "preferences",
            f'{{"prompt": "?", "chosen": "a", "rejected": "b", "score_chosen": {MANY}}}',
            "a number of 400 digits",
        ),
        ("jsonl", '{"prompt": "?", "answer": "2", "answer": "3"}', "duplicate key 'answer' in an object"),
        ("jsonl", '{"messages": [{"role": "user", "role": "system", "content": "?"}]}', "duplicate key 'role'"),
    ],
)
def test_a_row_that_cannot_be_used(
    task: str, line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    good = json.dumps(GOLD | {"prompt": "?", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 0})
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    assert main(["data", "show", task, "--task.path=rows.jsonl"]) == 2
    with pytest.raises(DataError, match=rf"^rows\.jsonl:2: not usable JSON: {message}"):
        list(read_file("rows.jsonl"))
    captured = capsys.readouterr()
    assert "rows.jsonl:2" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_without_an_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of gzip are gigabytes in one line: it is not read whole to find that out."""
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 20)
    row = b'{"a": "' + b"x" * ((1 << 20) - 10) + b'"}\n'  # just as long as allowed, its line end included
    content = row + b'{"a": 1}\n' + b" " * (3 << 20)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = read_file(tmp_path / name)
    assert [next(rows).line, next(rows).line] == [1, 2]
    with pytest.raises(DataError, match=rf"{name}:3: a line of more than 1 MiB; write one object per line"):
        next(rows)


@pytest.mark.parametrize("kind", ["seconds", "days", "duration", "zone", "text"])
def test_values_of_a_parquet_file_that_python_has_not(kind: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = {
        "seconds": lambda: pyarrow.array([1 << 50], pyarrow.timestamp("s")),
        "days": lambda: pyarrow.array([1 << 30], pyarrow.date32()),
        "duration": lambda: pyarrow.array([1 << 60], pyarrow.duration("s")),
        "zone": lambda: pyarrow.array([0], pyarrow.timestamp("s", tz="Mars/Phobos")),
        "text": lambda: pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff\xfe"]).buffers()),
    }[kind]()
    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "rows.parquet")
    with refuses(DataError, "rows.parquet"):
        list(read_file(tmp_path / "rows.parquet"))
