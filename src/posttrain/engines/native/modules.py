"""The decoding path for every architecture: the model's own modules over our key/value cache.

The forward pass is the model's; only where keys and values are kept is ours. Serves any causal
language model whose state is keys and values, with sliding windows where its configuration names
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from posttrain.engines.native.cache import SlotCache
from posttrain.engines.native.decoder import pad_right
from posttrain.engines.native.prefixes import LayerShape, Prefix


class ColumnCache(Cache):
    """transformers' cache interface for one decode step over a ``SlotCache``."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, 1, dim]`` at the cursor; all columns of the batch come back."""
        return self.slots.write(layer_idx, key_states[:, :, 0], value_states[:, :, 0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots.width - 1


class ModulesDecoder:
    """A ``Decoder`` that calls ``model`` itself (a transformers model, or a peft one around it)."""

    name = "modules"
    transposed = False
    can_share = False
    has_kernel = False

    def __init__(self, model: Any, shapes: list[LayerShape] | None = None) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        window = getattr(config, "sliding_window", None)
        # Configurations that list their layers' kinds name the windowed ones there; the others
        # (Mistral) mean every layer.
        self.window = window if window and ("sliding_attention" in kinds or not kinds) else None
        self.mixed = "sliding_attention" in kinds
        self.shapes = shapes or self._find_shapes()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        tokens = pad_right(prompts, self.device)
        # Without a configuration the cache keeps every position, also in layers with a window.
        cache = DynamicCache()
        self.model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            position_ids=torch.arange(tokens.shape[1], device=self.device).expand_as(tokens),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        keys = [layer.keys.transpose(1, 2) for layer in cache.layers]
        values = [layer.values.transpose(1, 2) for layer in cache.layers]
        return Prefix(keys, values, [len(p) for p in prompts])

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self._mask(len(tokens), cache),
            position_ids=positions[:, None],
            past_key_values=ColumnCache(cache),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _find_shapes(self) -> list[LayerShape]:
        """What one token leaves in the cache of each layer."""
        prefix = self.prefill([[0]])
        pairs = zip(prefix.keys, prefix.values, strict=True)
        return [LayerShape(k.shape[2], k.shape[3], v.shape[3], k.dtype) for k, v in pairs]

    def _mask(self, rows: int, cache: SlotCache) -> Any:
        """The additive mask ``[R, 1, 1, width]`` in the form that the model takes."""
        full = cache.mask()
        if full is None:
            full = torch.zeros((rows, 1, 1, cache.width), dtype=cache.dtype, device=self.device)
        if self.window is None:
            return full
        windowed = full
        if cache.width > self.window:
            # Counted over what a row may see, the newest first: a hole takes no place in the window.
            places = (full == 0).flip(-1).cumsum(-1).flip(-1)
            windowed = full.masked_fill(places > self.window, -torch.inf)
        return {"full_attention": full, "sliding_attention": windowed} if self.mixed else windowed
