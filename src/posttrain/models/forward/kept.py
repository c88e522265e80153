"""Estimate activation bytes stored for the backward pass, from a model configuration.

Notation: N micro-batch positions (shared prompts count once), Q query and K key slots, L layers, width d, MLP width f,
attention widths a and k, s bytes per weight. Bytes stored per layer:

- linear layer inputs, s · N · (2d + a + f); norm inputs, s · N · 2d (a + k more if queries and keys are normalized),
  doubled for trained RMS norms; MLP internals, s · N · 3f (gated), 4f (GPT-2's GELU) or f. In fp32, families in
  ``models/forward/fused.py`` skip normalized values and 2f;
- attention, s · (2aQ + 2kK) + 4 · heads · Q, plus masks for shared prompts, s · Q · keys per row;
- adapters: 4-byte norms; per adapted layer, a 4-byte input plus 4 · rank.

With 16-bit GPU products (bf16 weights, or ``train.precision: bf16``), these families store, given r bytes per residual
value (same as weights): norm inputs r · N · 2d and r · N · (a + k); product and SwiGLU inputs 2 · N · (2d + 3f); no
mask. Adapters without autocast store a 4-byte input per adapted layer.

With ``train.gradient_checkpointing``, only a single layer counts, as far as it exceeds the logits, plus
s · d · N · L.
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

# Architectures whose activations were measured: whether queries and keys are normalized.
QK_NORMS = {"qwen3": True, "olmo2": True, "qwen2": False, "llama": False, "gpt2": False}
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Weight:
    """Model tensor: name, shape, layer count, input and output width if linear."""

    name: str
    shape: tuple[int, ...]
    times: int
    linear: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return self.times * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Micro:
    """A worst-case micro-batch: ``prompt`` and ``answer`` lengths, grouped by shared prompt.

    Without sharing, ``prompt`` is 0 and ``answer`` covers whole rows. Each row omits a single token if no head reads
    its state.
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
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def low_rank(weights: list[Weight], adapter: AdapterSection) -> Iterator[Weight]:
    """Yield both low-rank factors per adapted layer."""
    for weight in weights:
        layer = f".{weight.name.removesuffix('.weight')}"
        is_meant = adapter.targets == "all-linear" or any(layer.endswith(f".{target}") for target in adapter.targets)
        if weight.linear is not None and is_meant:
            size_in, size_out = weight.linear
            yield Weight(f"{weight.name}.A", (adapter.rank, size_in), weight.times)
            yield Weight(f"{weight.name}.B", (size_out, adapter.rank), weight.times)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """Computed layer: widths in elements; ``size``, bytes per weight.

    ``queries``, ``keys``: total head widths per position. ``inner``: feed-forward width. ``is_half``: GPU products use
    16 bits. ``is_fused``: norms and gates use this package's kernels.
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
        """Count values stored between the two feed-forward products."""
        if self.is_gpt2 and self.keeps_gelu:
            return 4 * self.inner
        if self.is_gpt2:
            return self.inner
        if self.is_fused:
            return 2 * self.inner
        return 3 * self.inner


def kept_layer(config: PretrainedConfig, model: ModelSection, train: TrainSection, *, on_gpu: bool) -> KeptLayer:
    """Derive layer sizes from configuration plus recipe sections ``model`` and ``train``."""
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
    """Sum stored bytes for layers, final norm and its consumer."""
    tokens = up_to(ROUND_TOKENS, micro.queries)
    if adapter is None:
        of_token = _trained_bytes(layer)
    else:
        factors = [w for w in low_rank(weights, adapter) if w.name.endswith(".A")]
        of_token = _adapted_bytes(layer, adapter, factors)
    of_layer = _attention_bytes(layer, micro) + tokens * of_token
    of_layers = of_layer * layer.number
    if layer.is_recomputed:  # layer inputs, plus a single recomputed layer
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
    """Sum attention bytes: queries, keys, values, outputs, normalizers, masks if used."""
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
    """Count bytes stored per position by norms and products, all weights trained."""
    if layer.is_half and layer.is_fused:
        return layer.size * layer.normed + 2 * 2 * layer.inner + 2 * (2 * layer.width + layer.inner)
    num_norms = 2
    if layer.is_gpt2 or layer.is_fused:
        num_norms = 1
    return layer.size * (layer.inputs + num_norms * layer.normed + layer.between)


def _adapted_bytes(layer: KeptLayer, adapter: AdapterSection, factors: list[Weight]) -> int:
    """Count bytes stored per position under an adapter, given its input ``factors``."""
    targets = [w.shape[1] for w in factors]
    inner = adapter.rank * len(targets)  # between the two factors
    if layer.is_half and layer.is_fused:
        kept = layer.size * layer.normed + 2 * 2 * layer.inner
        number = 4
        own = sum(targets)
        if layer.is_autocast:
            number = 2
        if layer.is_autocast and not adapter.dropout:
            # parallel projections share an input; attention stores its output
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
    """Check if variable-length attention needs keys repeated per query head (torch 2.11)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" not in inspect.signature(varlen_attn).parameters


def logit_bytes(
    config: PretrainedConfig, micro: Micro, size: int, gpu_memory: int | None, *, head_trained: bool
) -> int:
    """Sum bytes for logits, probabilities and gradients per chunk (16 or 18 bytes each).

    Trained heads add their gradient and stored probabilities.
    """
    trained = up_to(ROUND_TOKENS, micro.trained)
    rows = min(trained, max(1, max_logit_elements(gpu_memory) // config.vocab_size))
    numbers = rows * (16 if size == 4 else 18)
    if head_trained:
        kept = 0
        if rows < trained:
            kept = min(trained, kept_elements(gpu_memory) // config.vocab_size)
        numbers += 4 * (config.hidden_size + kept)
    return int(numbers * config.vocab_size)
