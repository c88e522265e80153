"""Bytes that the trainer's pass keeps between forward and backward, from the configuration of a model.

With N tokens of a micro-batch in the trainer's pass (a shared prompt counts once), Q and K slots of queries and keys,
L layers, width d, MLP width f, attention widths a and k, s bytes of a weight, a layer keeps in bytes:

- the inputs of its linear layers, s · N · (2d + a + f), and of its norms, s · N · 2d (a + k more for norms of queries
  and keys), twice for RMS norms that are trained; inside of the MLP s · N · 3f (gated), 4f (GPT-2's GELU) or f. In fp32
  the families of ``models/forward/fused.py`` keep no normed values and 2f;
- attention: s · (2aQ + 2kK) + 4 · heads · Q, and the mask, s · Q · keys of a row, where a prompt is shared;
- under an adapter, norms in 4 bytes, and of every adapted layer an input in 4 bytes next to 4 · rank.

Those families on a GPU with products in 16 bits (weights in bf16, or ``train.precision: bf16``) keep, with r bytes of a
residual (those of a weight), r · N · 2d and r · N · (a + k) for the inputs of norms, 2 · N · (2d + 3f) for those of
products and SwiGLU, and no mask; an adapter without autocast has an input of 4 bytes for each of its layers.

With ``train.gradient_checkpointing`` that is one layer's, as far as it is more than the logits, and s · d · N · L.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from transformers import PretrainedConfig

from posttrain.models.forward.fused import FAMILIES
from posttrain.models.forward.packing import ROUND_TOKENS
from posttrain.models.forward.predictions import kept_elements, max_logit_elements
from posttrain.recipes.sections import AdapterSection, ModelSection, TrainSection

# Architectures whose activations were counted: whether queries and keys have norms.
QK_NORMS = {"qwen3": True, "olmo2": True, "qwen2": False, "llama": False, "gpt2": False}
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model: its name, its shape, in how many layers it is, and in and out of a linear layer."""

    name: str
    shape: tuple[int, ...]
    times: int
    linear: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return self.times * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch of the longest rows: ``prompt`` and ``answer`` tokens each, in groups that share prompts.

    ``prompt`` is 0 where rows share nothing; their ``answer`` is then the whole row. One token of a row is left out
    where nothing reads its state.
    """

    rows: int
    groups: int
    prompt: int
    answer: int
    trained: int

    @property
    def queries(self) -> int:
        return self.groups * self.prompt + self.rows * self.answer

    @property
    def keys(self) -> int:
        return self.queries + self.rows * self.prompt


def up_to(multiple: int, number: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def low_rank(weights: list[Weight], adapter: AdapterSection) -> Iterator[Weight]:
    """Yield the two factors of each adapted layer."""
    for weight in weights:
        layer = f".{weight.name.removesuffix('.weight')}"
        is_meant = adapter.targets == "all-linear" or any(layer.endswith(f".{target}") for target in adapter.targets)
        if weight.linear is not None and is_meant:
            size_in, size_out = weight.linear
            yield Weight(f"{weight.name}.A", (adapter.rank, size_in), weight.times)
            yield Weight(f"{weight.name}.B", (size_out, adapter.rank), weight.times)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer of the model as it is computed: widths in numbers, and ``size``, the bytes of a number of its weights.

    ``queries``, ``keys``: of all heads of a token. ``inner``: of the feed-forward part. ``is_half``: products are
    computed in 16 bits on a GPU. ``is_fused``: our own kernels compute norms and gates.
    """

    family: str
    number: int  # of layers like it
    width: int
    heads: int
    queries: int
    keys: int
    inner: int
    size: int
    is_autocast: bool
    is_half: bool
    is_fused: bool
    keeps_gelu: bool
    is_recomputed: bool

    @property
    def is_gpt2(self) -> bool:
        return self.family == "gpt2"

    @property
    def inputs(self) -> int:
        """The inputs of the linear layers."""
        return 2 * self.width + self.queries + self.inner

    @property
    def normed(self) -> int:
        """The inputs of the norms."""
        if QK_NORMS[self.family]:
            return 2 * self.width + self.queries + self.keys
        return 2 * self.width

    @property
    def between(self) -> int:
        """The numbers that are kept between the two products of the feed-forward part."""
        if self.is_gpt2 and self.keeps_gelu:
            return 4 * self.inner
        if self.is_gpt2:
            return self.inner
        if self.is_fused:
            return 2 * self.inner
        return 3 * self.inner


def kept_layer(config: PretrainedConfig, model: ModelSection, train: TrainSection, *, on_gpu: bool) -> KeptLayer:
    """Return the sizes of a layer that the recipe's ``model`` and ``train`` give this configuration."""
    size = BYTES[model.dtype]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or heads
    is_autocast = train.precision == "bf16"
    is_half = on_gpu and (size == 2 or is_autocast)
    has_kernels = size == 4
    if is_half:
        has_kernels = not model.load_bits
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * config.n_embd
    else:
        inner = config.intermediate_size
    return KeptLayer(
        family=config.model_type,
        number=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        queries=heads * head_dim,
        keys=num_key_heads * head_dim,
        inner=inner,
        size=size,
        is_autocast=is_autocast,
        is_half=is_half,
        is_fused=config.model_type in FAMILIES and has_kernels,
        keeps_gelu=getattr(config, "activation_function", None) == "gelu_new",
        is_recomputed=train.gradient_checkpointing,
    )


def activation_bytes(
    layer: KeptLayer, micro: Micro, weights: list[Weight], adapter: AdapterSection | None, logits: int
) -> int:
    """Return bytes that the layers, the final norm and its reader keep for the backward pass."""
    tokens = up_to(ROUND_TOKENS, micro.queries)
    if adapter is None:
        of_token = _trained_bytes(layer)
    else:
        factors = [w for w in low_rank(weights, adapter) if w.name.endswith(".A")]
        of_token = _adapted_bytes(layer, adapter, factors)
    of_layer = _attention_bytes(layer, micro) + tokens * of_token
    of_layers = of_layer * layer.number
    if layer.is_recomputed:  # the inputs of the layers, and one layer that is computed again
        gates = 3
        if layer.is_fused:
            gates = 2
        again = of_layer + gates * layer.inner * layer.size * tokens
        of_layers = layer.size * layer.width * tokens * layer.number + max(again - logits, 0)
    num_final = 1
    if adapter is None and not layer.is_gpt2 and not layer.is_fused:
        num_final = 2
    return int(of_layers + layer.size * layer.width * (num_final * tokens + up_to(ROUND_TOKENS, micro.trained)))


def _attention_bytes(layer: KeptLayer, micro: Micro) -> int:
    """Return bytes of queries, keys, values and outputs, of the normalizers, and of the mask where there is one."""
    number = layer.size
    seen = layer.keys
    if layer.is_half:
        number = 2
        if _repeats_keys():
            seen = layer.queries
    kept = number * (2 * layer.queries * micro.queries + 2 * seen * micro.keys) + 4 * layer.heads * micro.queries
    if micro.prompt and not layer.is_half:
        kept += layer.size * micro.rows * micro.answer * (micro.prompt + micro.answer)
    return kept


def _trained_bytes(layer: KeptLayer) -> int:
    """Return bytes that a token leaves in norms and products of a layer, all of whose weights are trained."""
    if layer.is_half and layer.is_fused:
        return layer.size * layer.normed + 2 * 2 * layer.inner + 2 * (2 * layer.width + layer.inner)
    num_norms = 2
    if layer.is_gpt2 or layer.is_fused:
        num_norms = 1
    return layer.size * (layer.inputs + num_norms * layer.normed + layer.between)


def _adapted_bytes(layer: KeptLayer, adapter: AdapterSection, factors: list[Weight]) -> int:
    """Return bytes that a token leaves in a layer under an adapter, whose first factors are ``factors``."""
    targets = [w.shape[1] for w in factors]
    inner = adapter.rank * len(targets)  # between the two factors
    if layer.is_half and layer.is_fused:
        kept = layer.size * layer.normed + 2 * 2 * layer.inner
        number = 4
        own = sum(targets)
        if layer.is_autocast:
            number = 2
        if layer.is_autocast and not adapter.dropout:
            # layers of one place share their input; attention keeps its own output
            places = {(w.name.rsplit(".", 3)[0], w.shape[1]) for w in factors if ".o_proj." not in w.name}
            own = sum(size_in for _, size_in in places)
        kept += number * (own + inner)
        if adapter.dropout:
            kept += sum(targets)
        return kept
    kept = 4 * inner + layer.size * layer.between
    if adapter.dropout:
        kept += 5 * sum(targets)
    if layer.size == 4:
        kept += 4 * layer.inputs
    elif not adapter.dropout:
        kept += 4 * sum(targets)
    if layer.is_gpt2:
        return kept + layer.size * layer.normed
    return kept + 4 * layer.normed


@cache
def _repeats_keys() -> bool:
    """Return True where variable-length attention wants a key for every query head (torch 2.11)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" not in inspect.signature(varlen_attn).parameters


def logit_bytes(
    config: PretrainedConfig, micro: Micro, size: int, gpu_memory: int | None, *, head_trained: bool
) -> int:
    """Return bytes of the logits, probabilities and gradients of the tokens that are computed at a time (16 or 18 bytes
    each), and of a trained head's gradient and kept probabilities."""
    trained = up_to(ROUND_TOKENS, micro.trained)
    rows = min(trained, max(1, max_logit_elements(gpu_memory) // config.vocab_size))
    numbers = rows * (16 if size == 4 else 18)
    if head_trained:
        kept = 0
        if rows < trained:
            kept = min(trained, kept_elements(gpu_memory) // config.vocab_size)
        numbers += 4 * (config.hidden_size + kept)
    return int(numbers * config.vocab_size)
