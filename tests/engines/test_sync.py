"""An engine that follows the policy: versions, and the weights that engines elsewhere are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.small_models import random_model
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm.weights import checkpoint_weights
from posttrain.models.load import LoadedModel
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection
from small_runs import make_recipe, recorded, run

SAMPLING = Sampling(max_tokens=6)


def update(model: Any, seed: int = 0) -> None:
    """What an optimizer step does: every trained weight moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


def test_a_completion_carries_the_version_of_its_weights(tiny: LoadedModel) -> None:
    engine = NativeEngine(tiny.model)
    for version in (0, 7):
        engine.sync(version)
        (group,) = engine.generate([[9, 10]], [[1, 2]], SAMPLING)
        assert [completion.version for completion in group] == [version, version]


def test_every_record_says_which_weights_sampled(tmp_path: Path) -> None:
    """Of two updates a batch, those before the first of them."""
    evaluation = {"every": 3, "n": 2, "max_tokens": 4}
    run(tmp_path / "own", make_recipe("grpo", eval=evaluation, train={"epochs": 2, "steps": 4}))
    training, evaluations = recorded(tmp_path / "own")
    assert {(row.step, row.version) for row in training} == {(1, 0), (3, 2)}
    assert {(row.step, row.version) for row in evaluations} == {(0, 0), (3, 3), (4, 4)}


def named(model: Any) -> dict[str, torch.Tensor]:
    return dict(checkpoint_weights(model))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_weights_have_the_names_and_order_of_a_checkpoint(family: str) -> None:
    """An adapter is merged: a plain model that is given these weights computes what the wrapped one does."""
    plain = random_model(family)
    assert list(named(plain)) == [name for name, _ in plain.named_parameters()]
    wrapped = apply_adapter(random_model(family), AdapterSection(rank=2, alpha=8.0), 0)
    update(wrapped)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    weights = named(wrapped)
    assert list(weights) == list(named(plain))
    ids = torch.tensor([[3, 5, 7, 9]])
    before = plain(input_ids=ids).logits
    missing = plain.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        difference = (plain(input_ids=ids).logits - wrapped(input_ids=ids).logits).abs().max()
        assert difference < 1e-5 < (plain(input_ids=ids).logits - before).abs().max()
