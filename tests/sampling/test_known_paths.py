"""What was compared once is not compared again: for the same model, numbers, device and code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models import load
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import ModelSource, open_model
from posttrain.sampling.native import engine as engines
from posttrain.sampling.native import known_paths
from posttrain.sampling.native.engine import NativeEngine
from small_runs import save_perturbed

PROMPT = [[1, 2, 3]]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The paths that are compared; the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[str] = []
    original = NativeEngine._probe

    def watch(self: NativeEngine, path: Any, *arguments: Any) -> Any:
        seen.append(path)
        return original(self, path, *arguments)

    monkeypatch.setattr(NativeEngine, "_probe", watch)
    return seen


def sample(model: Any, *, uses_cache: bool = True, prompt: list[list[int]] = PROMPT) -> Any:
    engine = NativeEngine(model)
    engine.uses_cache = uses_cache
    completions = engine.generate(prompt, [[7]], Sampling(max_tokens=4, temperature=1.0))
    return engine.path, completions[0][0]


def test_second_engine_compares_nothing_and_samples_the_same(
    tiny_random: Callable[..., Any], probes: list[str]
) -> None:
    first = sample(tiny_random("qwen3"))
    second = sample(tiny_random("qwen3"))
    assert first == second
    assert first[0] == "lean"
    assert probes == ["lean"]
    sample(tiny_random("qwen3"), prompt=[[1] * 20])  # the length of a prompt changes nothing
    assert probes == ["lean"]


def test_engine_of_a_run_compares_always(tiny_random: Callable[..., Any], probes: list[str], tmp_path: Path) -> None:
    sample(tiny_random("qwen3"), uses_cache=False)
    sample(tiny_random("qwen3"), uses_cache=False)
    assert probes == ["lean", "lean"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["weights", "dtype", "configuration", "code", "torch", "threads", "damaged file"])
def test_another_model_or_machine_is_compared(
    change: str, tiny_random: Callable[..., Any], probes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sample(tiny_random("qwen3"))
    model = tiny_random("qwen3")
    if change == "weights":
        with torch.no_grad():
            model.get_input_embeddings().weight[0, 0] += 1.0
    elif change == "dtype":
        model = model.bfloat16()
    elif change == "configuration":
        model.config.rope_parameters = dict(model.config.rope_parameters) | {"note": 1}
    elif change == "code":
        monkeypatch.setattr(known_paths, "_digest_of_code", lambda: "other")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    else:
        for file in (tmp_path / "posttrain" / known_paths.FOLDER).iterdir():
            file.write_bytes(b"")
    sample(model)
    assert len(probes) == 2


def test_path_that_fails_is_not_remembered(
    tiny_random: Callable[..., Any], probes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engines, "probe", lambda *arguments: (1.0, 0.0) if len(probes) == 1 else (0.0, 1.0))
        assert sample(tiny_random("qwen3"))[0] == "modules"
    assert sample(tiny_random("qwen3"))[0] == "lean"
    assert probes == ["lean", "modules", "lean"]


def test_model_with_hooks_does_not_take_what_is_known(tiny_random: Callable[..., Any], probes: list[str]) -> None:
    sample(tiny_random("qwen3"))
    model = tiny_random("qwen3")
    model.register_forward_hook(lambda *arguments: None)
    assert sample(model)[0] != "lean"


def test_remember_keeps_a_bounded_number_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known_paths, "MAX_FILES", 3)
    for name in "abcde":
        known_paths.remember(name)
    assert len(list((tmp_path / "posttrain" / known_paths.FOLDER).iterdir())) == 3
    assert known_paths.is_known("e")


def test_cache_that_cannot_be_written_ends_nothing(
    tiny_random: Callable[..., Any], probes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert sample(tiny_random("qwen3"))[0] == "lean"
    assert not known_paths.is_known("x")


def test_open_model_loads_the_tokenizer_once(
    monkeypatch: pytest.MonkeyPatch, probes: list[str], tmp_path: Path
) -> None:
    """The template of a model without a run is its tokenizer's."""
    folder, loaded = save_perturbed(tmp_path / "model"), list[str]()
    original = load._load_tokenizer

    def watch(source: str, *arguments: Any) -> Any:
        loaded.append(source)
        return original(source, *arguments)

    monkeypatch.setattr(load, "_load_tokenizer", watch)
    source = ModelSource(folder, "model", folder)
    assert source.describe_template() is not None
    opened = open_model(source)
    assert loaded == [folder]
    assert opened.tokenizer is source.tokenizer
    assert opened.engine.uses_cache
