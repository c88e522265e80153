"""Two layers of the embedded model, a server that follows it, and no waiting between attempts to reach one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fake_follower import FakeFollower
from posttrain.models.load import LoadedModel, load_model
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.sampling import http
from small_runs import shallow


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def tiny() -> LoadedModel:
    return load_model(ModelSection(name=shallow(2)), seed=0)


@pytest.fixture
def server(tiny: LoadedModel) -> Iterator[FakeFollower]:
    with FakeFollower(tiny.model) as fake:
        yield fake


@pytest.fixture
def wrapped(tiny: LoadedModel) -> Any:
    """``tiny`` with an adapter that does something."""
    model = apply_adapter(tiny.model, AdapterSection(rank=2, alpha=8.0), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return model
