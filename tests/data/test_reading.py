"""Reading rows: every way in which a file can be bad is one message with file and line."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.messages import read_messages
from posttrain.data.reading import Row, read_file
from posttrain.errors import DataError, DataNotThere, MissingExtra
from posttrain.types import Message
from refusing import refuses

ROWS = [{"a": "one"}, {"a": "zwei, ü", "b": 2}]


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\ufeff" + lines_of(ROWS) + "\n\n", encoding="utf-8")
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n" + lines_of(ROWS).replace("\n", "\r\n"))
    plain = list(read_file(tmp_path / "x.jsonl"))
    packed = list(read_file(str(tmp_path / "x.jsonl.gz")))
    assert [row.data for row in plain] == [row.data for row in packed] == ROWS
    assert [row.line for row in plain] == [1, 2]
    assert [row.line for row in packed] == [2, 3], "blank lines are no rows and yet count as lines"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist([{"a": "one", "b": None}, {"a": None, "b": 2}]), tmp_path / "x.parquet"
    )
    rows = list(read_file(tmp_path / "x.parquet"))
    assert [row.data for row in rows] == [{"a": "one", "b": None}, {"a": None, "b": 2}]
    with refuses(DataError, "x.parquet:2", "'a'"):
        rows[1].text("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "x"}\n{"a": \n', "bad.jsonl:2"),
        (b'{"a": "x"}\n[1, 2]\n', "bad.jsonl:2"),
        (b"\nplain text\n", "bad.jsonl:2: not JSON"),
        (b'{"a": "\xff"}\n', "bad.jsonl:1"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "bad.jsonl:1"),
        (b'{"a": ' + b"[" * 200_000 + b"\n", "bad.jsonl:1"),
        (b'{"a": "x"} {"a": "y"}\n', "bad.jsonl:1"),
    ],
)
def test_malformed_lines(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with refuses(DataError, message) as caught:
        list(read_file(tmp_path / "bad.jsonl"))
    assert caught.value.exit_code == 2
    assert caught.value.line is not None


def test_damaged_archives(tmp_path: Path) -> None:
    whole = gzip.compress(lines_of([{"a": str(i)} for i in range(500)]).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jsonl.gz").write_bytes(b'{"a": "x"}\n')
    (tmp_path / "flip.jsonl.gz").write_bytes(whole[:40] + bytes([whole[40] ^ 255]) + whole[41:])
    for name in ("cut", "text", "flip"):
        with pytest.raises(DataError, match=rf"{name}\.jsonl\.gz:\d+: (damaged or truncated gzip|not )"):
            list(read_file(tmp_path / f"{name}.jsonl.gz"))
    (tmp_path / "no.parquet").write_bytes(b"no parquet at all")
    with refuses(DataError, "no.parquet"):
        list(read_file(tmp_path / "no.parquet"))


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("a,b", encoding="utf-8")
    for name, message in (
        ("trian.jsonl", "'train.jsonl'"),
        ("nowhere/train.jsonl", "no such file"),
        ("", "this is a folder"),
        ("notes.txt", "jsonl.gz"),
    ):
        with refuses(DataError, message):
            list(read_file(tmp_path / name))


def test_files_without_an_end_and_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    (tmp_path / "circle.jsonl").symlink_to("circle.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, message in (("zeros", "this is a device"), ("circle", "no such file"), ("pipe", "this is a pipe")):
        with pytest.raises(DataError, match=rf"{name}\.jsonl: {message}"):
            list(read_file(tmp_path / f"{name}.jsonl"))


def test_missing_extras_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refuses(MissingExtra, "reading x.parquet needs", "'pyarrow'"):
        list(read_file(tmp_path / "x.parquet"))
    with refuses(MissingExtra, "'a/b'", "'datasets'"):
        list(read_file("hf:a/b"))


def test_messages_of_sharegpt_and_single_messages() -> None:
    message = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    row = Row(
        "f", 1, {"list": message, "one": {"role": "user", "content": "q"}, "mixed": [{"role": "human", "content": "q"}]}
    )
    assert read_messages(row, "list") == (Message("system", "s"), Message("user", "q"), Message("assistant", "a"))
    assert read_messages(row, "one") == (Message("user", "q"),)
    with refuses(DataError, "'mixed'", "'human'"):  # that name is ShareGPT's alone
        read_messages(row, "mixed")
    with refuses(DataError, "'half'", "'role'", "'content'"):
        read_messages(Row("f", 1, {"half": [{"role": "user", "value": "q"}]}), "half")


def test_read_messages_call_of_a_table_whose_function_is_a_text_is_refused() -> None:
    call = {"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "r"}]
    with refuses(DataError, "tool_calls"):
        read_messages(Row("f.parquet", 3, {"messages": messages}, is_arrow=True), "messages")


def test_a_file_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    (tmp_path / "part.jsonl").write_text(lines_of(ROWS), encoding="utf-8")
    request: list[tuple[str, str, str]] = []

    def hf_hub_download(repo_id: str, filename: str, repo_type: str) -> str:
        request.append((repo_id, filename, repo_type))
        if repo_id == "no/entry":
            raise EntryNotFoundError("404")
        if repo_id == "no/network":
            raise OSError("offline")
        return str(tmp_path / "part.jsonl")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    rows = list(read_file("hf:some/set/a/part.jsonl"))
    assert [(row.place, row.line, row.data) for row in rows] == [
        ("hub:some/set/a/part.jsonl", line, data) for line, data in enumerate(ROWS, start=1)
    ]
    assert request == [("some/set", "a/part.jsonl", "dataset")]
    for name in ("no/entry", "no/network"):
        with pytest.raises(DataError, match=rf"hub:{name}/x.jsonl: cannot be loaded .*to a local file"):
            list(read_file(f"hf:{name}/x.jsonl"))


def test_a_data_set_by_its_hub_name_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package on a local folder, whole and streamed."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split, n in (("train", 5), ("test", 2)):
        (folder / f"{split}.jsonl").write_text(lines_of([{"a": f"{split} {i}"} for i in range(n)]), encoding="utf-8")
    whole = list(read_file(f"hf:{folder}"))
    assert [row.data["a"] for row in whole] == [f"train {i}" for i in range(5)]
    assert (whole[1].place, whole[1].line) == (f"hub:{folder}/train", 2)
    assert [row.data["a"] for row in read_file(f"hf:{folder}:default@test")] == ["test 0", "test 1"]
    assert [row.data["a"] for row in read_file(f"hf:{folder}@train#3")] == ["train 0", "train 1", "train 2"]
    with refuses(DataNotThere, "/dev:"):
        list(read_file(f"hf:{folder}@dev"))


def test_streaming_reads_no_further_than_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    request: list[dict[str, Any]] = []

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        request.append({"name": name, "config": config, **options})
        return ({"a": str(read.append(i) or i)} for i in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(list(read_file("hf:big/set:en@train#4"))) == 4
    assert request == [{"name": "big/set", "config": "en", "split": "train", "streaming": True}]
    assert read == [0, 1, 2, 3]
    for wrong in ("hf:", "hf:a@", "hf:a#0", "hf:a#many", "hf:a@b@c"):
        with refuses(DataError, "hf:NAME:CONFIG@SPLIT or hf:NAME@SPLIT#1000"):
            list(read_file(wrong))
