"""Weights in 8 or 4 bits through bitsandbytes, stored in its layout, multiplied as what they stand for.

8 bits: LLM.int8()'s rows (Dettmers et al. 2022), ``W[i, j] = s[i] q[i, j] / 127`` with s the largest magnitude of
the row. 4 bits: NF4 with double quantization (Dettmers et al. 2023, QLoRA), ``W = a · code[q]`` with one of 16 values
for each weight and one a, itself in 8 bits, for each 64 of them. Linear layers are quantized (GPT-2's transposed ones,
too); embeddings, norms, biases and the LM head keep their type.

Departure: every product is ``x W^T`` with W dequantized to the type of x. The library's own 8-bit layer rounds x as
well, and takes columns of x with a number above 6 apart, which depends on all rows of the batch. Its own 4-bit layer
computes in bf16 on some processors, and changes the weights' layout in place.

The only module that imports bitsandbytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from posttrain.errors import MissingExtra
from posttrain.models.config import Model
from posttrain.models.forward.linear import ONEDNN_LEAST, onednn_product, takes_onednn

Bits = Literal[4, 8]

try:
    import bitsandbytes
except ImportError as error:
    raise MissingExtra("bitsandbytes", "quantize", "a model with quantized weights") from error


def load_quantized(
    source: str, bits: Bits | None, device: torch.device, options: Mapping[str, object]
) -> tuple[Any, Any]:
    """Return a causal language model whose linear layers are quantized, and transformers' report of what it found.

    Args:
        source: a folder or hub name; with ``bits``, of a model in full precision, which is quantized tensor by tensor
            as it is read; without, of one that was stored quantized.
        device: where the weights are quantized and stay.
        options: of ``from_pretrained``.

    Raises:
        OSError, ValueError, ...: whatever transformers raises for a source that it cannot load.
    """
    how = {} if bits is None else {"quantization_config": quantization_config(bits)}  # a None would say: plain weights
    model, loading_info = AutoModelForCausalLM.from_pretrained(source, device_map={"": device}, **options, **how)
    for module in model.modules():  # every quantized layer multiplies as described above
        if type(module) is bitsandbytes.nn.Linear8bitLt and module.weight.dtype == torch.int8:
            module.__class__ = Int8Linear
        elif type(module) is bitsandbytes.nn.Linear4bit:
            module.__class__ = NF4Linear
    if bits is not None:
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:  # what is not quantized would keep the whole file mapped
                parameter.data = parameter.data.clone()
    return model, loading_info


def quantization_config(bits: Bits) -> BitsAndBytesConfig:
    """Return the configuration that transformers keeps in ``config.json`` of a quantized model."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )


class _DequantizedProduct(torch.autograd.Function):
    """``x W^T`` that keeps the quantized weights for backward, not the dequantized ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return _multiply(x, layer.dequantized(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _multiply(gradient, ctx.layer.dequantized(gradient.dtype).t()), None


def _multiply_dequantized(layer: Any, x: Tensor) -> Tensor:
    """``x W^T + b`` of a quantized layer."""
    product = _DequantizedProduct.apply(x, layer)
    return product if layer.bias is None else product + layer.bias.to(x.dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if x.dtype == torch.float32 and takes_onednn(weight) and rows * weight.numel() >= ONEDNN_LEAST:
        return onednn_product(x.contiguous(), weight)
    return F.linear(x, weight)


class Int8Linear(bitsandbytes.nn.Linear8bitLt):
    """A linear layer with 8-bit rows; see above."""

    weight: Any

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights that it stands for, ``[out, in]``."""
        return bitsandbytes.functional.int8_vectorwise_dequant(self.weight.data, self.weight.SCB).to(dtype)

    forward = _multiply_dequantized


class NF4Linear(bitsandbytes.nn.Linear4bit):
    """A linear layer with 4-bit blocks; see above."""

    weight: Any

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights that it stands for, ``[out, in]``."""
        # As rows of one block each: of rows that end within a block, the library's routine for CPUs (0.50) takes the
        # scales from the wrong places.
        state = copy.copy(self.weight.quant_state)
        packed, shape = self.weight.data.view(torch.uint8).flatten(), state.shape
        blocks = state.absmax.numel()
        packed = F.pad(packed, (0, blocks * state.blocksize // 2 - packed.numel()))
        state.shape, state.dtype = torch.Size((blocks, state.blocksize)), dtype
        return bitsandbytes.functional.dequantize_4bit(packed, state).flatten()[: shape.numel()].view(shape)

    forward = _multiply_dequantized


@torch.no_grad()
def dequantize(model: Model) -> Any:
    """The model with plain layers again, in place: the weights are what the quantized ones stood for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Int8Linear | NF4Linear):
            dtype = model.get_input_embeddings().weight.dtype
            model.set_submodule(name, _plain_layer(module, module.dequantized(dtype)))
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_8bit = model.is_loaded_in_4bit = False
    return model


def _plain_layer(layer: Any, weight: Tensor) -> nn.Module:
    plain: Any
    with torch.device("meta"):
        if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):  # GPT-2 keeps its weights transposed
            plain, weight = Conv1D(layer.out_features, layer.in_features), weight.t().contiguous()
        else:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight = nn.Parameter(weight)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach())
    return plain


def weight_bytes(model: nn.Module) -> int:
    """Bytes that a model's weights take in memory, scales and code books included, tied ones once."""
    tensors = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()}
    return sum(tensors.values())


def adamw_in_8_bits(groups: list[dict[str, object]], *, paged: bool, **settings: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with moments in 8 bits; ``settings`` are lr, betas and eps."""
    kind = bitsandbytes.optim.AdamW8bit
    if paged:
        kind = bitsandbytes.optim.PagedAdamW8bit
    optimizer: torch.optim.Optimizer = kind(groups, **settings)
    return optimizer


def add_code_tables(optimizer: torch.optim.Optimizer, states: Iterable[dict[str, Any]]) -> None:
    """Give the restored states of an 8-bit optimizer the tables that their codes stand for; they are constants."""
    optimizer.fill_qmap()  # type: ignore[attr-defined]
    tables = optimizer.name2qmap  # type: ignore[attr-defined]
    for state in states:
        if state["state1"].dtype == torch.uint8:
            device = state["state1"].device
            state["qmap1"] = tables["dynamic"].to(device)
            state["qmap2"] = tables["udynamic"].to(device)
