"""Recomputed activations: the same gradients, less memory, and only while learning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from small_models import SHAPE, gradients, ragged_batch, random_model, relative_difference
from transformers import AutoModelForCausalLM, Qwen3Config

from closeness import approx
from posttrain.models.forward import linear
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.linear import ONEDNN_LEAST
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection, TrainSection
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Loss, Outputs


@contextmanager
def counting_saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes of each tensor that autograd keeps, by its storage."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def nll(outputs: Outputs, batch: Batch) -> Loss:
    return Loss(-outputs.logprobs, {})


def mean_over_tokens(mask: torch.Tensor) -> torch.Tensor:
    return mask / mask.sum()


def learn(model: torch.nn.Module, path: str, on: bool) -> tuple[float, torch.Tensor, int]:
    """(loss, gradients, bytes kept for the backward pass) of one batch."""
    forward = Forward(model)
    forward.path = path
    options = TrainSection(gradient_checkpointing=on)
    torch.manual_seed(0)
    with counting_saved_bytes() as saved:
        loss, _ = accumulate(Method(forward, nll, mean_over_tokens), ragged_batch(), options)
    found = gradients(model)
    model.zero_grad()
    return loss, found, sum(saved.values())


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_are_the_same_and_less_is_kept(family: str, path: str):
    model = random_model(family)
    loss, expected, kept = learn(model, path, on=False)
    again, found, less = learn(model, path, on=True)
    assert again == loss
    assert relative_difference(found, expected) == approx(0.0, abs=1e-6)
    assert less < 0.75 * kept


def test_an_adapters_dropout_is_drawn_alike_both_times():
    model = apply_adapter(random_model("qwen3"), AdapterSection(kind="lora", rank=4, dropout=0.5), 3)
    for name, parameter in model.named_parameters():  # B begins at 0, where dropout would not be seen
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    model.eval()
    loss, expected, _ = learn(model, "packed", on=False)
    again, found, _ = learn(model, "packed", on=True)
    assert again == loss
    assert relative_difference(found, expected) == approx(0.0, abs=1e-6)
    without, _ = accumulate(Method(Forward(model), nll, mean_over_tokens), ragged_batch(), TrainSection(), learns=False)
    assert abs(without - loss) > 1e-4, "dropout acts where gradients are computed"


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_layers_that_are_wide_enough_for_onednn_are_computed_alike_both_times(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    """The faster product begins at some size, and keeps other tensors than torch's own."""
    monkeypatch.setattr(linear, "IS_FASTER", True)
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 96, "intermediate_size": 320, "head_dim": 24}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape)).eval()
    assert ONEDNN_LEAST < 128 * 96 * 320
    loss, expected, kept = learn(model, path, on=False)
    again, recomputed, less = learn(model, path, on=True)
    assert again == loss
    assert relative_difference(recomputed, expected) == approx(0.0, abs=1e-6)
    assert less < 0.5 * kept
