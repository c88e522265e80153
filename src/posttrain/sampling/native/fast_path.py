"""The fast decoding path for one family of blocks: Qwen3, Qwen2, Llama and their like.

It issues few operations a layer and reads a group's prompt once, over the very same parameters. Projections are
separate products written side by side into one buffer: at 64 rows a fused weight would save 2 of 41 microseconds.

The block, for a row vector x (RMS norms n1, n2; per-head norms on q and k in Qwen3)::

    q, k, v = x1 Wq, x1 Wk, x1 Wv                 x1 = n1(x)
    x = x + softmax(rope(q) rope(K)^T s) V Wo
    x = x + (silu(x2 Wg) * x2 Wu) Wd              x2 = n2(x)

``FastDecoder.bind`` refuses a model whose parts are not exactly these; ``probe`` then compares log-probabilities with
the model's own forward, which finds a part that looks alike but computes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.models.forward.forward import causal_lm
from posttrain.models.forward.linear import ONEDNN_LEAST, onednn_product, takes_onednn
from posttrain.models.lora import LowRank, low_rank_terms
from posttrain.sampling.native.cache import LayerShape, Prefix, SharedPrefixes, SlotCache, Window, pad_right

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BASE_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
# Rotary frequencies that do not depend on the length of the sequence.
STATIC_ROPES = {"default", "linear", "llama3", "yarn"}

# (layer's number, its parameters, the projections) -> [N, query heads * head_dim]
Attend = Callable[[int, "Layer", "Workspace"], Tensor]


class Layer:
    """One block: parameters by reference, and concatenated head norms."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1: Tensor = layer.input_layernorm.weight.detach()
        self.norm2: Tensor = layer.post_attention_layernorm.weight.detach()
        self.eps: float = layer.input_layernorm.variance_epsilon
        parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        self.q, self.k, self.v, self.o = map(Projection.bind, parts)
        self.gate, self.up, self.down = map(Projection.bind, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.head_norm: Tensor | None = None  # [query heads + key heads, head_dim]
        if hasattr(attention, "q_norm"):
            norms = ((attention.q_norm, self.q), (attention.k_norm, self.k))
            expanded = [norm.weight.detach().expand(p.size // attention.head_dim, -1) for norm, p in norms]
            self.head_norm, self.head_eps = torch.cat(expanded), float(attention.q_norm.variance_epsilon)


@dataclass(frozen=True, slots=True)
class Workspace:
    """A buffer ``[N, all heads * head_dim]`` and views into it, overwritten by every block."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotated: Tensor  # query and key heads together [N, query heads + key heads, head_dim]
    values: Tensor  # [N, key heads, head_dim]


class FastDecoder:
    """A ``Decoder`` over the parameters of ``model``. Made by ``bind``, anew for every generation."""

    def __init__(self, base: PreTrainedModel, head: nn.Linear, max_positions: int) -> None:
        attention = base.layers[0].self_attn
        self.embedding: Tensor = base.embed_tokens.weight.detach()
        self.head: Tensor = head.weight.detach()
        self.head_bias = None if head.bias is None else head.bias.detach()
        self.norm: Tensor = base.norm.weight.detach()
        self.eps: float = base.norm.variance_epsilon
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.layers = [Layer(layer) for layer in base.layers]
        self.num_queries = self.layers[0].q.size // self.head_dim
        self.num_keys = self.layers[0].k.size // self.head_dim
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        # Plain batched products beat the fused attention at one query per row on a CPU (54 + 65
        # against 179 microseconds at 64 rows x 128 columns); half precision needs its fp32 inside.
        self.transposed = self.device.type == "cpu" and self.dtype == torch.float32
        self.can_share = self.transposed
        self.shapes = [LayerShape(self.num_keys, self.head_dim, self.head_dim, self.dtype)] * len(self.layers)
        cos, sin = base.rotary_emb(self.embedding[:1], torch.arange(max_positions, device=self.device)[None])
        sign = torch.ones(self.head_dim, dtype=sin.dtype, device=self.device)
        sign[: self.head_dim // 2] = -1
        self.max_positions = max_positions
        # [max_positions, 1, head_dim]; sin has the sign of the half turn.
        self.cos, self.sin = cos[0, :, None, :], (sin[0] * sign)[:, None, :]
        self._work: Workspace | None = None
        self._no_bias = torch.zeros((1, 1, 1), dtype=self.dtype, device=self.device)

    @staticmethod
    def bind(model: PreTrainedModel, max_positions: int) -> FastDecoder | None:
        """Return a decoder for positions below ``max_positions``, or None if the model's parts are not ours."""
        inner = causal_lm(model)
        base = getattr(inner, "model", None)
        head = getattr(inner, "lm_head", None)
        if base is None or type(head) is not nn.Linear or not _fits(base, inner.config):
            return None
        window = getattr(inner.config, "sliding_window", None)
        kinds = getattr(inner.config, "layer_types", None)
        is_used = getattr(inner.config, "use_sliding_window", True)
        if kinds:
            is_used = "sliding_attention" in kinds
        if window is not None and is_used and max_positions > window:
            return None  # in some families the configuration alone has it
        return FastDecoder(base, head, max_positions)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        tokens = pad_right(prompts, self.device)
        rows, width = tokens.shape
        cos, sin = self.cos[:width].repeat(rows, 1, 1), self.sin[:width].repeat(rows, 1, 1)
        group = self.num_queries // self.num_keys
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(_: int, layer: Layer, work: Workspace) -> Tensor:
            q, k = self.turn(layer, work, cos, sin)
            keys.append(k.view(rows, width, self.num_keys, self.head_dim))
            values.append(work.values.clone().view(rows, width, self.num_keys, self.head_dim))
            query = q.view(rows, width, self.num_queries, self.head_dim).transpose(1, 2)
            key = keys[-1].transpose(1, 2).repeat_interleave(group, 1)
            value = values[-1].transpose(1, 2).repeat_interleave(group, 1)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
            return mixed.transpose(1, 2).reshape(rows * width, -1)

        hidden = F.embedding(tokens.view(-1), self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = self._block(index, layer, hidden, attend)
        return Prefix(keys, values, [len(p) for p in prompts])

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache | Window) -> Tensor:
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        bias, rows = cache.mask(), len(tokens)

        def attend(index: int, layer: Layer, work: Workspace) -> Tensor:
            q, k = self.turn(layer, work, cos, sin)
            keys, values = cache.write(index, k, work.values)
            query = q.view(rows, self.num_keys, -1, self.head_dim)
            if self.transposed:
                return self._attend_plainly(index, query, keys, values, bias, cache.shared)
            # Query heads sharing a key head become query positions. This avoids separate masks and enable_gqa, which
            # neither flash nor memory-efficient attention supports with a mask.
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self.scale)
            return mixed.reshape(rows, -1)

        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = self._block(index, layer, hidden, attend)
        return multiply(rms_norm(hidden, self.norm, self.eps), self.head, self.head_bias)

    def _attend_plainly(
        self,
        index: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        shared: SharedPrefixes | None,
    ) -> Tensor:
        """Compute attention ``[R, heads * group * dim]`` for ``query [R, heads, group, dim]``."""
        rows, heads, group, dim = query.shape
        flat = query.view(rows * heads, group, dim)
        values = values.flatten(0, 1)
        scores = torch.baddbmm(self._no_bias, flat, keys.flatten(0, 1), beta=0, alpha=self.scale)
        if bias is not None:
            scores.view(rows, heads, group, -1).add_(bias)
        if shared is None or shared.width == 0:
            return torch.bmm(scores.softmax(-1), values).view(rows, -1)
        width = shared.width
        groups = len(shared.names) * heads  # [prompt, head] pairs, each with the same number of queries
        queries = flat.view(rows * heads, -1).index_select(0, shared.to_groups).view(groups, -1, dim)
        past, beta = (self._no_bias, 0) if shared.bias is None else (shared.bias, 1)
        on_prefix = torch.baddbmm(past, queries, shared.keys[index].flatten(0, 1), beta=beta, alpha=self.scale)
        on_prefix = on_prefix.view(-1, group * width).index_select(0, shared.to_rows).view(rows * heads, group, width)
        weights = torch.cat((on_prefix, scores), -1).softmax(-1)
        spread = weights[:, :, :width].index_select(0, shared.to_groups).view(groups, -1, width)
        mixed = torch.bmm(spread, shared.values[index].flatten(0, 1))
        mixed = mixed.view(-1, group * dim).index_select(0, shared.to_rows).view(rows * heads, group, dim)
        return mixed.baddbmm_(weights[:, :, width:], values).view(rows, -1)

    def _block(self, index: int, layer: Layer, hidden: Tensor, attend: Attend) -> Tensor:
        """Compute one block on ``[N, hidden]``; ``hidden`` is overwritten."""
        work = self._workspace(hidden.shape[0])
        x = rms_norm(hidden, layer.norm1, layer.eps)
        layer.q.into(x, work.q)
        layer.k.into(x, work.k)
        layer.v.into(x, work.v)
        hidden = layer.o.add_to(hidden, attend(index, layer, work))
        x = rms_norm(hidden, layer.norm2, layer.eps)
        return layer.down.add_to(hidden, F.silu(layer.gate.apply(x), inplace=True).mul_(layer.up.apply(x)))

    def turn(self, layer: Layer, work: Workspace, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys ``[N, heads, head_dim]``, normed and rotated. cos, sin ``[N, 1, head_dim]``."""
        rotated, count = work.rotated, self.num_queries
        if layer.head_norm is not None:
            rotated = rms_norm(rotated, layer.head_norm, layer.head_eps)
        turned = rotated.roll(self.head_dim // 2, -1)
        rotated = rotated * cos
        q = torch.addcmul(rotated[:, :count], turned[:, :count], sin)
        return q, torch.addcmul(rotated[:, count:], turned[:, count:], sin)

    def forget_workspace(self) -> None:
        self._work = None

    def _workspace(self, rows: int) -> Workspace:
        """The buffer for ``rows``, kept while the number of rows stays the same."""
        if self._work is None or len(self._work.q) != rows:
            dim, rotated = self.head_dim, self.num_queries + self.num_keys
            buffer = torch.empty((rows, (rotated + self.num_keys) * dim), dtype=self.dtype, device=self.device)
            heads = buffer.view(rows, -1, dim)
            q, k, v = buffer.split([self.num_queries * dim, self.num_keys * dim, self.num_keys * dim], 1)
            self._work = Workspace(q, k, v, heads[:, :rotated], heads[:, rotated:])
        return self._work


def _fits(base: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Check if all parts match the block above with known types."""
    if _parts(base) != BASE_PARTS or type(base.embed_tokens) is not nn.Embedding or not len(base.layers):
        return False
    rope = getattr(base.rotary_emb, "rope_type", None)  # some families have one per layer type
    if not isinstance(rope, str) or rope not in STATIC_ROPES or config.hidden_act != "silu":
        return False
    return hasattr(base.norm, "variance_epsilon") and all(map(_layer_fits, base.layers))


def _layer_fits(layer: Any) -> bool:
    if _parts(layer) != LAYER_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    extra = _parts(attention) - ATTENTION_PARTS
    if extra not in (set(), {"q_norm", "k_norm"}) or _parts(mlp) - MLP_PARTS - {"act_fn"}:
        return False
    if extra and attention.q_norm.weight.shape[0] != attention.head_dim:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, name) for name in extra)]
    if getattr(attention, "sliding_window", None) is not None or not all(hasattr(n, "variance_epsilon") for n in norms):
        return False
    names = [(attention, name) for name in ATTENTION_PARTS] + [(mlp, name) for name in MLP_PARTS]
    return all(low_rank_terms(getattr(parent, name, None)) is not None for parent, name in names)


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b`` for x ``[N, in]``, weight ``[out, in]``: ``[N, out]``, a new tensor."""
    if x.shape[0] * weight.numel() >= ONEDNN_LEAST and takes_onednn(weight):
        return onednn_product(x, weight, bias)
    return F.linear(x, weight, bias)


@dataclass(slots=True)
class Projection:
    """``x W^T + b`` plus the active adapters' ``scale (x A^T) B^T``."""

    weight: Tensor
    bias: Tensor | None
    adapters: list[LowRank]

    @classmethod
    def bind(cls, module: object) -> Projection:
        """Take parameters by reference from a linear layer, optionally with LoRA."""
        terms = low_rank_terms(module)
        assert terms is not None, "the caller has checked that the module is plain"
        linear, adapters = terms
        return cls(linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), adapters)

    @property
    def size(self) -> int:
        return int(self.weight.shape[0])

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write the product into ``out`` ``[N, size]``, possibly a slice of a wider buffer."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        self._adapt(x, out)

    def apply(self, x: Tensor) -> Tensor:
        """Return ``[N, size]``, a new tensor."""
        out = multiply(x, self.weight, self.bias)
        self._adapt(x, out)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add the projection of x to ``residual`` in place."""
        if x.shape[0] * self.weight.numel() >= ONEDNN_LEAST and takes_onednn(self.weight):
            residual.add_(multiply(x, self.weight, self.bias))
        else:
            residual.addmm_(x, self.weight.t())
            if self.bias is not None:
                residual.add_(self.bias)
        self._adapt(x, residual)
        return residual

    def _adapt(self, x: Tensor, out: Tensor) -> None:
        for term in self.adapters:
            inner = torch.mm(x.to(term.down.dtype), term.down.t())
            if term.up.dtype == out.dtype:
                out.addmm_(inner, term.up.t(), alpha=term.scale)
            else:  # adapters kept in fp32 over a half-precision base
                out.copy_(out.to(term.up.dtype).addmm_(inner, term.up.t(), alpha=term.scale))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize by the root mean square of the last dimension (Zhang & Sennrich 2019), in fp32, or x's float64."""
    if x.dtype.itemsize < 4 and x.device.type != "cuda":
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight
    # Of half precision, computed in fp32 inside, the modules round in between.
    if x.device.type == "cuda" and weight.ndim == 1 and x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # one kernel
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
    # F.rms_norm is composed of slower steps on a CPU (8.2 against 5.7 microseconds).
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.addcmul(_constant(eps), size, size, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)


@lru_cache(maxsize=16)
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value)
