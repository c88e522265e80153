"""Quantized weights against the published formats, worked out here; layers that multiply as what they stand for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from closeness import assert_close
from posttrain.errors import MissingExtra, UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.load import load_model, note_base_bits, num_parameters, quantized_bits
from posttrain.models.lora import apply_adapter, has_adapter
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.types import Sample, collate

pytest.importorskip("bitsandbytes", reason="the extra 'quantize' is not installed")

from posttrain.models.quantize import NF4Linear, dequantize
from refusing import refuses

ARCHITECTURES = ("qwen3", "gpt2")
BITS = (8, 4)
IDS = torch.randint(0, 300, (3, 17), generator=torch.Generator().manual_seed(2))
# Dettmers et al. (2023), appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]  # fmt: skip


KINDS = [("qwen3", 8), ("gpt2", 4)]


@pytest.fixture
def folders(tiny_random: Any, tmp_path: Path, small_tokenizer: Any) -> dict[str, Path]:
    """Small random models of each architecture in full precision, in the Hugging Face layout."""
    found = {architecture: tmp_path / "plain" / architecture for architecture in ARCHITECTURES}
    return {name: save(tiny_random(name), folder, small_tokenizer) for name, folder in found.items()}


def load(source: str | Path, **keys: Any) -> Any:
    return load_model(ModelSection(name=str(source), device="cpu", **keys), seed=0).model


def save(model: Any, folder: Path, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits.log_softmax(-1)


def rows_of(weight: Tensor, architecture: str) -> Tensor:
    """``[out, in]`` of a weight on disk; GPT-2's are transposed."""
    return weight.t().contiguous() if architecture == "gpt2" else weight


def is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not any(word in name for word in ("embed", "wte", "wpe", "lm_head"))


def slow_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers, largest magnitude of each row): LLM.int8() of weights that went through fp16."""
    half = weight.half().float()
    scale = half.abs().amax(1)
    return torch.round(half * (127.0 / scale[:, None])), scale


def slow_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the nearest value of the code book, largest magnitude of each 64 weights)."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1)
    code = torch.tensor(NF4)
    distance = (blocks / scale[:, None])[..., None] - code
    return distance.abs().argmin(-1).flatten(), scale


def unpack_nf4(stored: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """(code indices, scales of 64 weights each, weights), from the tensors of a saved model alone."""
    packed = stored[name].flatten()
    indices = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    about = json.loads(bytes(stored[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    assert (about["blocksize"], about["nested_blocksize"], about["quant_type"]) == (64, 256, "nf4")
    of_scale = stored[f"{name}.nested_quant_map"][stored[f"{name}.absmax"].long()]
    outer = stored[f"{name}.nested_absmax"].repeat_interleave(256)[: len(of_scale)]
    scales = of_scale * outer + about["nested_offset"]
    values = torch.tensor(NF4)[indices] * scales.repeat_interleave(64)
    return indices, scales, values.reshape(about["shape"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_int8_is_the_published_format(folders, tmp_path, small_tokenizer, architecture: str) -> None:
    plain = load_file(folders[architecture] / "model.safetensors")
    model = load(folders[architecture], load_bits=8)
    stored = load_file(save(model, tmp_path / "int8", small_tokenizer) / "model.safetensors")
    quantized = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert sorted(quantized) == sorted(name for name, tensor in plain.items() if is_linear(name, tensor))
    for name in quantized:
        numbers, scale = slow_int8(rows_of(plain[name], architecture))
        assert torch.equal(stored[name].float(), numbers)
        assert torch.equal(stored[name.replace("weight", "SCB")], scale)
        ours = model.get_submodule(name.removesuffix(".weight")).dequantized(torch.float32)
        assert_close(ours, numbers * scale[:, None] / 127, rtol=1e-6, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nf4_is_the_published_format(folders, tmp_path, small_tokenizer, architecture: str) -> None:
    plain = load_file(folders[architecture] / "model.safetensors")
    model = load(folders[architecture], load_bits=4)
    stored = load_file(save(model, tmp_path / "nf4", small_tokenizer) / "model.safetensors")
    quantized = [name for name, tensor in stored.items() if name.endswith(".weight") and tensor.dtype == torch.uint8]
    assert sorted(quantized) == sorted(name for name, tensor in plain.items() if is_linear(name, tensor))
    for name in quantized:
        weight = rows_of(plain[name], architecture)
        expected, exact_scales = slow_nf4(weight)
        indices, scales, values = unpack_nf4(stored, name)
        assert torch.equal(indices, expected)
        assert stored[name].numel() * 2 == weight.numel()
        # the second quantization moves a scale by at most one step of its own 8 bits
        assert float((scales - exact_scales).abs().max()) < 0.02 * float(exact_scales.max())
        ours = model.get_submodule(name.removesuffix(".weight")).dequantized(torch.float32)
        assert_close(ours, values, rtol=1e-6, atol=1e-8)
        # half of the widest gap of the code book, from -1 to -0.696
        assert float(((values - weight).abs() / exact_scales.repeat_interleave(64).view_as(weight)).max()) < 0.175


@pytest.mark.parametrize("shape", [(7, 96), (3, 65), (2, 8)])
def test_nf4_of_widths_that_are_no_multiple_of_a_block(shape: tuple[int, int]) -> None:
    import bitsandbytes

    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    layer = NF4Linear(shape[1], shape[0], bias=False, compress_statistics=False, quant_type="nf4")
    layer.weight = bitsandbytes.nn.Params4bit(weight, compress_statistics=False, quant_type="nf4").to("cpu")
    padded = torch.cat([weight.flatten(), torch.zeros(-weight.numel() % 64)])
    indices, scales = slow_nf4(padded)
    expected = (torch.tensor(NF4)[indices] * scales.repeat_interleave(64))[: weight.numel()].view(shape)
    assert torch.equal(layer.dequantized(torch.float32), expected)
    x = torch.randn(4, shape[1], generator=torch.Generator().manual_seed(4))
    assert_close(layer(x), x @ expected.T)


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_saved_and_loaded_again_it_is_the_same_bit_for_bit(
    folders, tmp_path, small_tokenizer, architecture: str, bits: int
) -> None:
    model = load(folders[architecture], load_bits=bits)
    expected = logprobs(model)  # which changes nothing about what is saved
    folder = save(model, tmp_path / "quantized", small_tokenizer)
    again = load(folder)
    assert torch.equal(logprobs(again), expected)
    assert (quantized_bits(again), quantized_bits(load(folders[architecture]))) == (bits, None)
    assert num_parameters(again) == num_parameters(load(folders[architecture]))
    stored, plain = load_file(folder / "model.safetensors"), load_file(folders[architecture] / "model.safetensors")
    others = [name for name, tensor in plain.items() if not is_linear(name, tensor)]
    assert len(others) > 5
    assert all(torch.equal(stored[name], plain[name]) for name in others)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_neighbours_or_the_mode(folders, bits: int) -> None:
    """Activations far above 6, where the library's own 8-bit layers treat whole columns apart."""
    model = load(folders["qwen3"], load_bits=bits)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    x[3, 5] = 400.0
    with torch.no_grad():
        together, alone = layer(x), layer(x[:1])
        assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)
        assert_close(together, x @ layer.dequantized(torch.float32).T, atol=1e-3, rtol=1e-5)
        expected = logprobs(model)
        assert torch.equal(logprobs(model.train()), expected)


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_gradients_pass_through_as_through_plain_layers(folders, architecture: str, bits: int) -> None:
    model = load(folders[architecture], load_bits=bits)
    name = "model.layers.0.mlp.up_proj" if architecture == "qwen3" else "transformer.h.0.mlp.c_fc"
    layer = model.get_submodule(name)
    plain = nn.functional.linear
    weight = layer.dequantized(torch.float32)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    plain(y, weight, layer.bias).square().sum().backward()
    assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-5)
    assert layer.weight.grad is None
    # what backward needs of the weights is kept in their few bits
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x).sum()
    assert all(t.numel() != weight.numel() for t in kept)


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_dequantized_layers_are_plain_again(folders, tmp_path, small_tokenizer, architecture: str, bits: int) -> None:
    model = load(folders[architecture], load_bits=bits)
    expected = logprobs(model)
    plain = dequantize(model)
    assert_close(logprobs(plain), expected, atol=1e-4, rtol=0)
    again = load(save(plain, tmp_path / "dequantized", small_tokenizer))
    assert quantized_bits(again) is None
    assert torch.equal(logprobs(again), logprobs(plain))
    shapes = {n: p.shape for n, p in load(folders[architecture]).named_parameters()}
    assert {n: p.shape for n, p in again.named_parameters()} == shapes


@pytest.mark.parametrize("bits", BITS)
def test_the_engine_and_the_packed_forward_pass_serve_it(folders, bits: int) -> None:
    model = load(folders["qwen3"], load_bits=bits)
    engine = NativeEngine(model)
    assert engine.path == "modules"  # the lean path reads plain weights
    prompts = [[5, 6, 7, 8], [9, 10]]
    groups = engine.generate(prompts, [[1, 2], [3]], Sampling(max_tokens=6, temperature=0.9))
    rows = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    batch = collate(
        [
            Sample([*p, *c.ids], [False] * len(p) + [True] * len(c.ids), group=i, prefix=len(p))
            for i, (p, c) in enumerate(rows)
        ]
    )
    forward = Forward(model, 0.9)
    assert forward.path == "packed"
    with torch.no_grad():
        scored = forward(batch).logprobs[batch.mask]
    sampled = torch.tensor([x for _, c in rows for x in c.logprobs])
    assert_close(scored, sampled, atol=2e-4, rtol=0)


@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_finds_its_base_in_the_bits_that_it_was_trained_on(
    folders, tmp_path, small_tokenizer, bits: int
) -> None:
    model = apply_adapter(load(folders["gpt2"], load_bits=bits), AdapterSection(rank=3), seed=1).eval()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with model.disable_adapter():
        assert torch.equal(logprobs(model), logprobs(load(folders["gpt2"], load_bits=bits)))
    folder = save(model, tmp_path / "adapter", small_tokenizer)
    note_base_bits(model, folder)
    expected = logprobs(model)
    again = load(folder)
    assert has_adapter(again)
    assert quantized_bits(again) == bits
    assert torch.equal(logprobs(again), expected)
    # asked for a base with the adapter in it: weights that are no longer quantized, or that are so again
    merged = load(folder, adapter=AdapterSection())
    assert (has_adapter(merged), quantized_bits(merged)) == (False, None)
    assert_close(logprobs(merged), expected, atol=1e-4, rtol=0)
    twice = load(folder, adapter=AdapterSection(), load_bits=8)
    assert quantized_bits(twice) == 8
    assert 1e-3 < float((logprobs(twice) - expected).abs().max()) < 0.5
    assert twice.name_or_path == str(folder)
    # without the note it would be another model
    (folder / "base_quantization.json").unlink()
    assert float((logprobs(load(folder)) - expected).abs().max()) > 1e-3


def test_what_is_refused(folders, tmp_path, small_tokenizer, monkeypatch) -> None:
    folder = save(load(folders["qwen3"], load_bits=8), tmp_path / "int8", small_tokenizer)
    assert quantized_bits(load(folder, load_bits=8)) == 8
    with refuses(UsageError, "load_bits"):
        load(folder, load_bits=4)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "posttrain.models.quantize")
    with refuses(MissingExtra, "pip install -e", "[quantize]'"):
        load(folder)
