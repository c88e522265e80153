"""8-bit and 4-bit weights in bitsandbytes' storage layout, multiplied as dequantized values.

8 bits: LLM.int8() rows (Dettmers et al. 2022), ``W[i, j] = s[i] q[i, j] / 127``, where s is the row's largest
magnitude. 4 bits: NF4 using double quantization (Dettmers et al. 2023, QLoRA), ``W = a · code[q]``, choosing among 16
values per weight, plus an 8-bit scale a per 64 weights. Linear layers are quantized, including GPT-2's transposed
layers. Embeddings, norms, biases and LM heads keep their dtype.

Departure: products are always ``x W^T``, dequantizing W to x's dtype. The library's 8-bit layer also rounds x and
handles outlier columns (magnitude above 6) separately, which depends on all batch rows. Its 4-bit layer computes in
bf16 on some processors, modifying weight layouts in place.

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
from posttrain.models.forward.linear import ONEDNN_LEAST, onednn_product, takes_onednn
from posttrain.types import Model

Bits = Literal[4, 8]

try:
    import bitsandbytes
except ImportError as error:
    raise MissingExtra("bitsandbytes", "quantize", "a model with quantized weights") from error


def load_quantized(
    source: str, bits: Bits | None, device: torch.device, options: Mapping[str, object]
) -> tuple[Any, Any]:
    """Load a causal language model with quantized linear layers, plus transformers' loading report.

    Args:
        source: folder or hub name. If ``bits`` is given: a full-precision model, quantized tensor by tensor while
            loading. Otherwise: an already quantized model.
        device: holds the quantized weights.
        options: passed to ``from_pretrained``.

    Raises:
        OSError, ValueError, ...: any transformers loading error.
    """
    arguments: dict[str, object] = {**options, "device_map": {"": device}}
    if bits is not None:  # a None would request plain weights
        arguments["quantization_config"] = quantization_config(bits)
    model, loading_info = AutoModelForCausalLM.from_pretrained(source, **arguments)
    for module in model.modules():  # every quantized layer multiplies as described above
        if type(module) is bitsandbytes.nn.Linear8bitLt and module.weight.dtype == torch.int8:
            module.__class__ = Int8Linear
        elif type(module) is bitsandbytes.nn.Linear4bit:
            module.__class__ = NF4Linear
    if bits is not None:
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:  # unquantized tensors would otherwise keep the whole file mapped
                parameter.data = parameter.data.clone()
    return model, loading_info


def quantization_config(bits: Bits) -> BitsAndBytesConfig:
    """Build the quantization section transformers keeps in ``config.json``."""
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
    if layer.bias is None:
        return product
    return product + layer.bias.to(x.dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if x.dtype == torch.float32 and takes_onednn(weight) and rows * weight.numel() >= ONEDNN_LEAST:
        return onednn_product(x.contiguous(), weight)
    return F.linear(x, weight)


class Int8Linear(bitsandbytes.nn.Linear8bitLt):
    """A linear layer with 8-bit rows; see above."""

    weight: Any

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to ``[out, in]``."""
        return bitsandbytes.functional.int8_vectorwise_dequant(self.weight.data, self.weight.SCB).to(dtype)

    forward = _multiply_dequantized


class NF4Linear(bitsandbytes.nn.Linear4bit):
    """A linear layer with 4-bit blocks; see above."""

    weight: Any

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to ``[out, in]``."""
        # Reshaped to single-block rows: bitsandbytes 0.50 reads wrong scales on CPUs if rows end inside a block.
        state = copy.copy(self.weight.quant_state)
        packed = self.weight.data.view(torch.uint8).flatten()
        shape = state.shape
        blocks = state.absmax.numel()
        packed = F.pad(packed, (0, blocks * state.blocksize // 2 - packed.numel()))
        state.shape = torch.Size((blocks, state.blocksize))
        state.dtype = dtype
        return bitsandbytes.functional.dequantize_4bit(packed, state).flatten()[: shape.numel()].view(shape)

    forward = _multiply_dequantized


@torch.no_grad()
def dequantize(model: Model) -> Any:
    """Replace quantized layers by plain ones in place, using dequantized weights."""
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
        if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):  # GPT-2 stores transposed weights
            plain = Conv1D(layer.out_features, layer.in_features)
            weight = weight.t().contiguous()
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
    """Give restored 8-bit optimizer states their constant code tables."""
    optimizer.fill_qmap()  # type: ignore[attr-defined]
    tables = optimizer.name2qmap  # type: ignore[attr-defined]
    for state in states:
        if state["state1"].dtype == torch.uint8:
            device = state["state1"].device
            state["qmap1"] = tables["dynamic"].to(device)
            state["qmap2"] = tables["udynamic"].to(device)
