"""The names under which a server has a model: a fingerprint of its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from posttrain.sampling.vllm.server import fingerprint, served_names
from posttrain.store.checkpoint_files import seal


def test_a_run_is_its_checkpoint(tiny_random, tmp_path):
    run = tmp_path / "runs" / "first"
    for step in (10, 20):
        tiny_random("qwen3").save_pretrained(run / "checkpoints" / f"step-{step:06d}")
        seal(run / "checkpoints" / f"step-{step:06d}", step)
    (run / "recipe.yaml").write_text("{}")
    (run / "checkpoints" / "best").symlink_to("step-000010")
    name, place = served_names(str(run))
    assert name.startswith("first-step-000010-")
    assert place == str(run / "checkpoints" / "step-000010")


def test_the_fingerprint_is_that_of_the_weights(tiny_random, tmp_path):
    folder, copied = tmp_path / "model", tmp_path / "copy"
    tiny_random("qwen3").save_pretrained(folder)
    before = fingerprint(folder)
    shutil.copytree(folder, copied)
    (copied / "README.md").write_text("not a weight")
    assert fingerprint(copied) == before
    weights = load_file(copied / "model.safetensors")
    save_file({name: tensor * 1.0001 for name, tensor in weights.items()}, copied / "model.safetensors")
    assert fingerprint(copied) != before


@pytest.mark.parametrize("size", [0, 3_000_000])
def test_files_of_any_size_have_a_fingerprint(tmp_path, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    zeros = fingerprint(tmp_path)
    file.write_bytes(bytes(size) + b"\1")
    assert fingerprint(tmp_path) != zeros
    if size:
        for place in (0, size - 1):  # the first block and the last are read whole
            content = bytearray(size)
            content[place] = 1
            file.write_bytes(content)
            assert fingerprint(tmp_path) != zeros


def test_a_checkpoint_has_the_digests_of_its_manifest(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    read = fingerprint(tmp_path)

    def manifest(digest: str) -> None:
        files = {"model.safetensors": {"bytes": 100, "sha256": digest}}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "files": files}))

    manifest("aa")
    first = fingerprint(tmp_path)
    manifest("bb")
    assert len({read, first, fingerprint(tmp_path)}) == 3
    for damaged in ("", "[]", '{"files": {"model.safetensors": 1}}'):
        Path(tmp_path / "manifest.json").write_text(damaged)
        assert fingerprint(tmp_path) == read
