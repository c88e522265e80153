"""Rows are the hidden states of the whole model, bit for bit; sites are replaced and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import DOCUMENTS, FAMILIES, NUM_LAYERS, build, naive
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from closeness import allclose, assert_close, rounding
from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import backbone_of, blocks_of, check_layers, layer_of, read_rows, replaced
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection
from refusing import refuses


@pytest.mark.parametrize("family", FAMILIES)
def test_read_rows_every_layer_is_bit_equal_to_the_hidden_states(family: str) -> None:
    model = build(family)
    expected = naive(model, DOCUMENTS)
    names = [f"resid.{layer}" for layer in range(1, NUM_LAYERS)]
    found = read_rows(model, names, DOCUMENTS)
    for layer, name in enumerate(names, 1):
        assert torch.equal(found[name], expected[layer]), name
        assert torch.equal(read_rows(model, [name], DOCUMENTS)[name], expected[layer]), name


def test_read_rows_last_layer_is_before_the_final_norm() -> None:
    model = build("qwen3")
    last = read_rows(model, [f"resid.{NUM_LAYERS}"], DOCUMENTS)[f"resid.{NUM_LAYERS}"]
    with torch.no_grad():
        assert_close(model.model.norm(last), naive(model, DOCUMENTS)[-1])
    assert not allclose(last, naive(model, DOCUMENTS)[-1], rtol=0.1)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "gpt_neox"])
def test_read_rows_padding_and_later_tokens_do_not_matter(family: str) -> None:
    model = build(family)
    together = read_rows(model, ["resid.4"], DOCUMENTS)["resid.4"]
    alone = torch.cat([read_rows(model, ["resid.4"], [ids])["resid.4"] for ids in DOCUMENTS])
    largest = float(alone.abs().max())
    sharpest = math.sqrt(8) * 1.2**2  # scores of normed heads of 8 numbers
    bound = rounding(torch.float32, size=largest, terms=10 * 4, condition=sharpest)
    assert_close(together, alone, rtol=0, atol=bound)
    changed = [[*ids[:-1], 77] for ids in DOCUMENTS]
    same = torch.ones(len(together), dtype=torch.bool)
    same[torch.tensor([len(ids) for ids in DOCUMENTS]).cumsum(0) - 1] = False
    assert torch.equal(read_rows(model, ["resid.4"], changed)["resid.4"][same], together[same])


def test_read_rows_adapters_count_and_are_switched_off_with_the_model() -> None:
    plain = naive(build("qwen3"), DOCUMENTS)[3]
    model = apply_adapter(build("qwen3"), AdapterSection(rank=4, targets=["q_proj", "down_proj"]), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    adapted = naive(model, DOCUMENTS)[3]
    assert (adapted - plain).norm() > 0.05 * plain.norm()
    assert torch.equal(read_rows(model, ["resid.3"], DOCUMENTS)["resid.3"], adapted)
    with model.disable_adapter():
        assert torch.equal(read_rows(model, ["resid.3"], DOCUMENTS)["resid.3"], plain)


def test_read_rows_nothing_above_the_layer_is_computed_and_hooks_are_gone_after_an_error() -> None:
    model = build("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("computed")

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    read_rows(model, ["resid.1", "resid.2"], DOCUMENTS)
    with refuses(RuntimeError, "computed"):
        read_rows(model, ["resid.2", "resid.3"], DOCUMENTS)
    hook.remove()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return found


def test_read_rows_long_contexts_need_memory_in_proportion_to_their_length() -> None:
    """8192 tokens x batch 4: no matrix of scores (8192² elements a head), no logits (vocabulary), no cache."""
    tokens, batch = 8192, 4
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build("qwen3", **shape, num_hidden_layers=2, vocab_size=2000, max_position_embeddings=tokens)
    documents = [[(row + place) % 2000 for place in range(tokens)] for row in range(batch)]
    with LargestTensor() as largest:
        found = read_rows(model, ["resid.2"], documents)
    assert found["resid.2"].shape == (tokens * batch, 16)
    assert largest.num_elements <= tokens * batch * 32  # the MLP's inner states


@pytest.mark.parametrize("site", ["resid.1", "resid.6"])
def test_replaced_changes_a_site_and_nothing_else(site: str) -> None:
    model, ids = build("qwen3"), torch.tensor([DOCUMENTS[0]])
    clean = model(input_ids=ids).logits
    seen: list[Tensor] = []

    def look(values: Tensor) -> Tensor:
        seen.append(values.clone())
        return values

    with replaced(model, site, look):
        assert torch.equal(model(input_ids=ids).logits, clean)
    assert_close(seen[0][0], read_rows(model, [site], [DOCUMENTS[0]])[site])
    with replaced(model, site, torch.zeros_like):
        assert not torch.equal(model(input_ids=ids).logits, clean)
    assert torch.equal(model(input_ids=ids).logits, clean)


@pytest.mark.parametrize("name", ["resid", "resid.0", "resid.-1", "resid.x", "resid.01", "mlp.2", "resid.1.2"])
def test_layer_of_another_name_is_refused(name: str) -> None:
    with refuses(UsageError, "resid.20"):
        layer_of(name)


def test_sites_and_models_that_do_not_fit_are_refused() -> None:
    model = build("llama")
    with refuses(UsageError, "resid.7"):
        read_rows(model, ["resid.7"], DOCUMENTS)
    with refuses(UsageError, "resid.5"):
        check_layers("tiny", ["resid.5"])
    model.model.others = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(NUM_LAYERS))
    with refuses(UsageError, "list of 6"):
        blocks_of(backbone_of(model))
