"""Activations that several dictionaries share: told by what decides them, and never used when they are not whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import RunConflict, UsageError
from posttrain.interpret.activations.record import Recorder
from posttrain.interpret.activations.shards import ActivationStore, StoreWriter
from posttrain.interpret.dictionaries import recording
from posttrain.interpret.dictionaries.recipe import ActivationsSection
from posttrain.interpret.dictionaries.recording import open_or_record, recorded_for
from posttrain.models.sources import resolve_model_name
from posttrain.store.locks import hold

STORIES = {"name": "stories", "split": "train", "seed": 1, "size": 30}


def section(**changes: Any) -> ActivationsSection:
    content = {"model": {"name": "tiny"}, "site": "resid.1", "task": STORIES, "dtype": "fp32"}
    return ActivationsSection.model_validate(content | changes)


def made(root: Path, run: str, asked: ActivationsSection) -> tuple[ActivationStore, list[str]]:
    (root / run).mkdir(exist_ok=True)
    notices: list[str] = []
    return open_or_record(asked, root / run, notices.append), notices


@pytest.fixture
def count_batches(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """What is computed from here on, shard by shard."""
    computed: list[range] = []
    compute: Callable[..., Any] = Recorder.compute

    def counted(self: Recorder, number: int) -> Any:
        computed.append(self.plan[number])
        return compute(self, number)

    monkeypatch.setattr(Recorder, "compute", counted)
    return computed


def test_the_same_activations_are_recorded_once(tmp_path: Path, count_batches: list[range]) -> None:
    first, notices = made(tmp_path, "one", section())
    assert len(count_batches) == 1
    assert "recording" in notices[0]
    again, notices = made(tmp_path, "two", section())
    assert len(count_batches) == 1
    assert notices == [f"using the {first.num_rows:,} rows of activations recorded before, in {first.folder}"]
    rows = torch.arange(first.num_rows)
    assert torch.equal(first.gather(rows), again.gather(rows))
    assert recorded_for(tmp_path / "one") == recorded_for(tmp_path / "two") == first.folder
    assert first.folder.parent == tmp_path / "activations"


OTHERS: list[dict[str, Any]] = [
    {"site": "resid.2"},
    {"dtype": "bf16"},
    {"outliers": 0},
    {"batch": 3},
    {"max_rows": 500},
    {"context_tokens": 40},
    {"task": STORIES | {"seed": 2}},
    {"template": {"name": "plain"}},
    {"model": {"name": "tiny", "dtype": "bfloat16"}},
    {"paired": "tiny"},
]


def test_whatever_decides_the_rows_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def note(place: Path, _: Any) -> None:
        places.append(place)
        raise UsageError("nothing is recorded")

    monkeypatch.setattr(recording, "_usable", note)
    for changes in [{}, *OTHERS, {}]:
        with pytest.raises(UsageError, match="nothing is recorded"):
            made(tmp_path, "one", section(**changes))
    assert places[0] == places[-1]
    assert len(set(places)) == 1 + len(OTHERS)


def test_other_weights_under_the_same_name_are_other_activations(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model_name("tiny"), tmp_path / "model"))
    asked = section(model={"name": str(folder)})
    before, _ = made(tmp_path, "one", asked)
    (weights,) = folder.glob("model*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    after, _ = made(tmp_path, "two", asked)
    assert before.folder != after.folder
    with pytest.raises(UsageError, match=r"this run was begun on the activations resid\.1-"):
        made(tmp_path, "one", asked)


def test_a_damaged_recording_is_made_again_and_said_so(tmp_path: Path, count_batches: list[range]) -> None:
    first, _ = made(tmp_path, "one", section())
    shard = first.folder / "shard-00000.safetensors"
    whole = shard.read_bytes()
    for damaged, what in ((whole[:-4] + b"\0\0\1\0", "was changed after"), (None, "is missing")):
        shard.unlink()
        if damaged is not None:
            shard.write_bytes(damaged)
        count_batches.clear()
        _, notices = made(tmp_path, "two", section())
        assert what in notices[0]
        assert notices[0].endswith("Activations are recorded again")
        assert len(count_batches) == 1
        assert shard.read_bytes() == whole
    (first.folder / "index.json").write_text("{}")
    _, notices = made(tmp_path, "two", section())
    assert "no index of activations that can be read" in notices[0]
    assert shard.read_bytes() == whole


def test_an_interrupted_recording_goes_on_and_said_so(
    tmp_path: Path, count_batches: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.interpret.activations.record.MIN_SHARD_ROWS", 600)
    monkeypatch.setattr("posttrain.interpret.activations.record.SHARD_BYTES", 1)
    (tmp_path / "whole").mkdir()
    whole, _ = made(tmp_path / "whole", "one", section())
    shards = len(count_batches)
    assert shards > 2

    add = StoreWriter.add

    def stop(self: Any, tensors: Any, dropped: Any) -> None:
        if self.next_shard == 2:
            raise KeyboardInterrupt
        add(self, tensors, dropped)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, "one", section())
    count_batches.clear()
    again, notices = made(tmp_path, "one", section())
    assert notices[0].startswith("going on with the recording of activations that was interrupted")
    assert len(count_batches) == shards - 2
    assert [shard.sha256 for shard in again.index.shards] == [shard.sha256 for shard in whole.index.shards]


def test_what_another_process_records_is_waited_for(tmp_path: Path) -> None:
    place = made(tmp_path, "one", section())[0].folder
    with hold(place.parent / f".lock-{place.name}"), pytest.raises(RunConflict, match="another process is recording"):
        made(tmp_path, "two", section())


def test_what_a_run_names_is_looked_for_beside_the_runs_alone(tmp_path: Path) -> None:
    store, _ = made(tmp_path, "one", section())
    elsewhere = tmp_path / "elsewhere"
    store.folder.rename(elsewhere)
    (tmp_path / "one" / "activations.txt").write_text("../elsewhere\n")
    assert recorded_for(tmp_path / "one") is None
