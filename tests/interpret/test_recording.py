"""Activations that a recipe is trained on: recorded into the run once, used again, refused where they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import ActivationStore, StoreWriter
from posttrain.interpret.dictionaries.recipe import ActivationsSection
from posttrain.interpret.dictionaries.recording import open_or_record

STORIES = {"name": "stories", "split": "train", "seed": 1, "size": 30}


def section(**changes: Any) -> ActivationsSection:
    content = {"model": {"name": "tiny"}, "site": "resid.1", "task": STORIES, "dtype": "fp32"}
    return ActivationsSection.model_validate(content | changes)


def made(run: Path, asked: ActivationsSection) -> tuple[ActivationStore, list[str]]:
    run.mkdir(exist_ok=True)
    notices: list[str] = []
    return open_or_record(asked, run, notices.append), notices


def test_open_or_record_twice_records_once_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, notices = made(tmp_path / "one", section())
    assert first.folder == tmp_path / "one" / "activations"
    assert "recording activations: " in notices[0]
    monkeypatch.setattr(Recorder, "compute", None)
    again, notices = made(tmp_path / "one", section())
    assert notices == []
    rows = torch.arange(first.num_rows)
    assert torch.equal(first.gather(rows), again.gather(rows))
    named, _ = made(tmp_path / "two", ActivationsSection(folder=str(first.folder)))
    assert torch.equal(first.gather(rows), named.gather(rows))


def test_open_or_record_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    first, _ = made(tmp_path / "one", section())
    shard = first.folder / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\1\0")
    with pytest.raises(DataError, match="was changed after it was recorded"):
        made(tmp_path / "one", section())


def test_open_or_record_an_interrupted_recording_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.interpret.activations.record.MIN_SHARD_ROWS", 600)
    monkeypatch.setattr("posttrain.interpret.activations.record.SHARD_BYTES", 1)
    whole, _ = made(tmp_path / "whole", section())
    assert len(whole.index.shards) > 2
    add = StoreWriter.add

    def stop(self: Any, tensors: Any, dropped: Any) -> None:
        if self.next_shard == 2:
            raise KeyboardInterrupt
        add(self, tensors, dropped)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "one", section())
    with pytest.raises(UsageError, match="was recorded with another `outliers`"):
        made(tmp_path / "one", section(outliers=3))
    again, _ = made(tmp_path / "one", section())
    assert [shard.sha256 for shard in again.index.shards] == [shard.sha256 for shard in whole.index.shards]
