"""Activations are those of the whole model, bit for bit, however they are got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import DOCUMENTS, FAMILIES, NUM_LAYERS, activations_of, build, naive
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import Extractor
from posttrain.models.lora import apply_adapter, reference_mode
from posttrain.recipes.sections import AdapterSection


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_bit_equal_to_the_hidden_states(family: str) -> None:
    model = build(family)
    expected = naive(model, DOCUMENTS)
    names = [f"resid.{layer}" for layer in range(NUM_LAYERS)]
    found = activations_of(model, DOCUMENTS, names)
    for layer, name in enumerate(names):
        assert torch.equal(found[name], expected[layer]), name
        assert torch.equal(activations_of(model, DOCUMENTS, [name])[name], expected[layer]), name


def test_the_last_layer_is_read_before_the_final_norm() -> None:
    model = build("qwen3")
    last = activations_of(model, DOCUMENTS, [f"resid.{NUM_LAYERS}"])[f"resid.{NUM_LAYERS}"]
    with torch.no_grad():
        torch.testing.assert_close(model.model.norm(last), naive(model, DOCUMENTS)[-1])
    assert not torch.allclose(last, naive(model, DOCUMENTS)[-1], rtol=0.1)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "gpt_neox"])
def test_padding_and_neighbours_do_not_matter(family: str) -> None:
    model = build(family)
    together = activations_of(model, DOCUMENTS, ["resid.4"])["resid.4"]
    alone = torch.cat([activations_of(model, [ids], ["resid.4"])["resid.4"] for ids in DOCUMENTS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=2e-5)
    changed = [[*ids[:-1], 77] for ids in DOCUMENTS]  # a token sees nothing behind it
    ends = torch.tensor([len(ids) for ids in DOCUMENTS]).cumsum(0) - 1
    same = torch.ones(len(together), dtype=torch.bool)
    same[ends] = False
    assert torch.equal(activations_of(model, changed, ["resid.4"])["resid.4"][same], together[same])


def test_adapters_count_and_are_switched_off_with_the_model() -> None:
    plain = naive(build("qwen3"), DOCUMENTS)[3]
    model = apply_adapter(build("qwen3"), AdapterSection(rank=4, targets=["q_proj", "down_proj"]), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    adapted = naive(model, DOCUMENTS)[3]
    assert (adapted - plain).norm() > 0.05 * plain.norm()
    assert torch.equal(activations_of(model, DOCUMENTS, ["resid.3"])["resid.3"], adapted)
    with reference_mode(model):
        assert torch.equal(activations_of(model, DOCUMENTS, ["resid.3"])["resid.3"], plain)


def test_nothing_above_the_layer_is_computed_and_hooks_are_gone_after_an_error() -> None:
    model = build("llama")
    calls: list[int] = []
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    model.lm_head.register_forward_hook(lambda *_: calls.append(-1))
    extract = Extractor(model, ["resid.2", "resid.3"])
    extract(DOCUMENTS)
    assert calls in ([0, 1], [0, 1, 2])  # the hook that ends the pass may come before this one
    with pytest.raises(IndexError):
        extract([[10_000]])
    assert len(model.model.layers[2]._forward_hooks) == 1


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return found


def test_long_contexts_need_memory_in_proportion_to_their_length() -> None:
    """8192 tokens x batch 4: no matrix of scores (8192² elements a head), no logits (vocabulary), no cache."""
    tokens, batch = 8192, 4
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build("qwen3", **shape, num_hidden_layers=2, vocab_size=2000, max_position_embeddings=tokens)
    extract = Extractor(model, ["resid.2"])
    documents = [[(row + place) % 2000 for place in range(tokens)] for row in range(batch)]
    with LargestTensor() as largest:
        found = extract(documents)
    assert found["resid.2"].shape == (tokens * batch, 16)
    assert largest.num_elements <= tokens * batch * 32  # the MLP's inner states


def test_eager_attention_is_refused() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match="eager attention"):
        Extractor(model, ["resid.2"])
