"""The embedded model, a server that follows it, and no waiting between attempts to reach one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_follower import FakeFollower

from posttrain.engines.vllm import http as vllm_http
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.sections import ModelSection


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def tiny() -> LoadedModel:
    return load_model(ModelSection(), seed=0)


@pytest.fixture
def server(tiny: LoadedModel) -> Iterator[FakeFollower]:
    with FakeFollower(tiny.model, tiny.tokenizer) as fake:
        yield fake
