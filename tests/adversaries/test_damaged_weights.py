"""Damaged weights are refused by whoever reads them, and a second look does not hash again."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posttrain.cli import main
from posttrain.errors import DataError
from posttrain.models.sources import TINY, resolve_model_name
from posttrain.store import checkpoint_files
from posttrain.store.checkpoint_files import seal, verify
from refusing import refuses


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the embedded model with checkpoints of the steps 1 and 2; the working directory is its home."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    for step in (1, 2):
        shutil.copytree(TINY, folder / "checkpoints" / f"step-{step:06d}")
        seal(folder / "checkpoints" / f"step-{step:06d}", step)
    recipe = {"task": {"name": "stories"}, "data": {}, "objective": {"name": "cross_entropy"}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def flip_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


READERS = {
    "generate": ["generate", "runs/a"],
    "evaluate": ["evaluate", "runs/a", "--task", "stories", "--limit", "2"],
    "activations": ["activations", "runs/a", "--task", "stories", "--layer", "1", "--yes"],
    "train": ["train", "tiny/sft", "--model.name", "runs/a"],
    "teacher": ["train", "distillation/on-policy-distillation", "--model.name", "tiny", "--teacher.name", "runs/a"],
    "chat": ["chat", "runs/a"],
    "serve": ["serve", "runs/a", "--port", "8713"],
    "serve-command": ["serve-command", "runs/a/checkpoints/step-000002"],
    "data": ["data", "show", "stories", "--limit", "2", "--model", "runs/a"],
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_damaged_weights_and_names_a_checkpoint_that_verifies(
    run: Path, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_byte(run / "checkpoints" / "step-000002" / "model.safetensors", -100)
    before = sorted(path.name for path in run.parent.iterdir())
    assert main(READERS[reader]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "step-000002/model.safetensors" in message
    assert "verifies: name runs/a/checkpoints/step-000001" in message
    assert sorted(path.name for path in run.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "manifest.json"])
def test_every_file_of_a_checkpoint_counts(run: Path, name: str) -> None:
    flip_byte(run / "checkpoints" / "step-000002" / name, 5)
    with pytest.raises(DataError, match=rf"step-000002/{name}: .* damaged"):
        resolve_model_name("runs/a")
    (run / "checkpoints" / "step-000002" / name).unlink()
    with pytest.raises(DataError, match=rf"step-000002/{name}: is missing"):
        resolve_model_name("runs/a")


@pytest.mark.parametrize("name", ["adapter_config.json", "model-2.safetensors", "model.safetensors.index.json"])
def test_a_file_that_would_be_loaded_and_came_later_is_refused(run: Path, name: str) -> None:
    (run / "checkpoints" / "step-000002" / name).write_text("{}")
    with pytest.raises(DataError, match=rf"step-000002/{name}: is not in the manifest; it came later"):
        resolve_model_name("runs/a")


def test_a_manifest_that_leads_out_is_refused(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    (tmp_path / "secret").write_text("x")
    name = os.path.relpath(tmp_path / "secret", folder)
    files = {name: {"bytes": 1, "sha256": "0" * 64}}
    (folder / "manifest.json").write_bytes(checkpoint_files._manifest_bytes(2, files))
    with refuses(DataError, "of the checkpoint"):
        resolve_model_name("runs/a")


def test_a_copied_checkpoint_is_still_verified_and_a_plain_model_is_not(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "mine")
    assert resolve_model_name(str(tmp_path / "mine")) == str(tmp_path / "mine")
    flip_byte(tmp_path / "mine" / "model.safetensors", -100)
    with refuses(DataError, "model.safetensors: differs"):
        resolve_model_name(str(tmp_path / "mine"))
    for content in ('{"files": []}', "not JSON", None):  # another program's manifest, or none at all
        if content is None:
            (tmp_path / "mine" / "manifest.json").unlink()
        else:
            (tmp_path / "mine" / "manifest.json").write_text(content)
        assert resolve_model_name(str(tmp_path / "mine")) == str(tmp_path / "mine")


def test_steps_above_six_digits_are_ordered_as_numbers(run: Path) -> None:
    for step in (999_999, 1_000_000):
        shutil.copytree(TINY, run / "checkpoints" / f"step-{step:06d}")
        seal(run / "checkpoints" / f"step-{step:06d}", step)
    assert resolve_model_name(str(run)).endswith("step-1000000")


def make_sealed(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w" * 100)
    seal(folder, 1)
    time.sleep(0.02)  # longer than the clock of the file system ticks
    return folder


def test_same_size_and_time_but_another_content_is_hashed_again(tmp_path: Path) -> None:
    folder = make_sealed(tmp_path / "m")
    verify(folder, 1)
    file = folder / "model.safetensors"
    times = os.stat(file)
    flip_byte(file, 50)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    verify(folder, 1, by_size=True)
    with refuses(checkpoint_files.Unverified, "from its SHA-256"):
        verify(folder, 1)
    aside = tmp_path / "other"  # another file of the same size and time under the name
    aside.write_bytes(b"v" * 100)
    os.utime(aside, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(aside, file)
    with refuses(checkpoint_files.Unverified, "from its SHA-256"):
        verify(folder, 1)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "../outside.safetensors"}, "'../outside.safetensors' is not in the same folder"),
        ({"a": "/tmp/outside.safetensors"}, "'/tmp/outside.safetensors' is not in the same folder"),
        ([], "an object is needed; got []"),
    ],
)
def test_an_index_that_leads_out_of_a_model_is_refused(
    places: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "m")
    Path("m/model.safetensors").rename("outside.safetensors")
    if places == {"a": "../outside.safetensors"}:  # which would be read
        places = dict.fromkeys(load_file("outside.safetensors"), "../outside.safetensors")
    index = Path("m/model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert main(["generate", "./m", "1+1"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"model.safetensors.index.json: weight_map: {message}" in text
    parted = dict.fromkeys(load_file("outside.safetensors"), "model-00001-of-00001.safetensors")
    Path("outside.safetensors").rename("m/model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": parted}))
    assert main(["generate", "./m", "1+1", "--max-tokens", "2"]) == 0
