"""Fixtures that several test files share: small models with random weights, a small tokenizer."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test asks the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tiny_random import build_tiny_random

# How fast examples are made says how loaded the machine is, and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

pytest_plugins = ("folder_seconds",)
ARCHITECTURES = ("qwen3", "qwen2", "llama", "olmo2", "gpt2")


@pytest.fixture
def tiny_random() -> Callable[..., Any]:
    """``tiny_random(architecture, seed=0, **config)`` builds a small model with random weights."""
    return build_tiny_random


@pytest.fixture(scope="session")
def small_tokenizer() -> Any:
    """A byte-level tokenizer of at most 300 tokens."""
    from posttrain.models.tokenizer import train_tokenizer

    texts = ["Eva starts with 19 shells. She finds 12 at the beach.", "Tom has 7 apples and eats 2 of them."] * 20
    return train_tokenizer(iter(texts), 300)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the embedded model."""
    from transformers import AutoTokenizer

    from posttrain.models.sources import TINY

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def template() -> Any:
    """``r1_zero`` with nothing in front."""
    from posttrain import registry

    return registry.find("template", "r1_zero").bind({"preamble": ""})()


@pytest.fixture(scope="module")
def quick_stories() -> Iterator[None]:
    """Compute the statistics of stories from few of them: counting thousands takes longer than a small run."""
    from posttrain.data.stories import task as stories

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stories, "_NUM_COUNTED", 100)
        stories.usual_results.cache_clear()
        yield
    stories.usual_results.cache_clear()


@pytest.fixture(scope="module")
def no_curves() -> Iterator[None]:
    """Runs end without pictures of their curves, in a file or their page, which take several times as long as a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.reports.summary.draw_png", lambda panels, title, path: path)
        patch.setattr("posttrain.reports.page.draw_svg", lambda panel: "")
        yield


@pytest.fixture
def no_code_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the code that tests before have allowed."""
    from posttrain import untrusted

    monkeypatch.setattr(untrusted, "_FOLDERS", {})
    monkeypatch.setattr(untrusted, "_IMPORTED", set())
    monkeypatch.setattr(untrusted, "_REMOTE_CODE", [False])


@pytest.fixture(autouse=True)
def allowed_code_kept() -> Iterator[None]:
    """Restore the allowed code (``untrusted``) after each test."""
    from posttrain import untrusted

    folders, imported, remote_code = dict(untrusted._FOLDERS), set(untrusted._IMPORTED), list(untrusted._REMOTE_CODE)
    yield
    untrusted._FOLDERS.clear()
    untrusted._FOLDERS.update(folders)
    untrusted._IMPORTED.intersection_update(imported)
    untrusted._REMOTE_CODE[:] = remote_code
