"""Small files of rows, real files where there are some, and a hub that needs no network."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def real_file(name: str) -> str:
    """The path of a real data file, such as ``hh_rlhf/train``."""
    return str(Path(os.environ["POSTTRAIN_DATA"]) / f"{name}.jsonl.gz")


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Let single files of the hub (``name/file``) be rows that are written to ``folder`` as plain lines."""
    for number, rows in enumerate(files.values()):
        write_rows(folder / f"{number}.jsonl", rows)
    order = list(files)

    def hf_hub_download(repo_id: str, filename: str, repo_type: str) -> str:
        assert repo_type == "dataset"
        if f"{repo_id}/{filename}" not in order:
            raise FileNotFoundError(f"no {repo_id}/{filename} here")
        return str(folder / f"{order.index(f'{repo_id}/{filename}')}.jsonl")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)


def fake_datasets(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[], Sequence[Mapping[str, Any]]]
) -> list[tuple[str, str | None, str]]:
    """Let ``datasets`` give these rows, whatever is asked for; the list fills with what was (name, config, split)."""
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    request: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, split: str) -> Sequence[Mapping[str, Any]]:
        request.append((name, config, split))
        return rows()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return request
