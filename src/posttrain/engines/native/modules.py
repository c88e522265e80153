"""The decoding paths for every architecture: the model's own modules, over our key/value cache or over their own.

``ModulesDecoder``: the forward pass is the model's; only where keys and values are kept is ours. Serves any causal
language model whose state is keys and values, with sliding windows where its configuration names them.

``PlainRows``: the cache is the model's, too, made from its own configuration. States of linear attention, convolutions
and the like tolerate neither padding nor rows that join later, so rows of one prompt length are decoded together. A
model without a cache that can be used reads all tokens anew at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Conversation
from posttrain.engines.native.cache import SlotCache, pad_right
from posttrain.engines.native.prefixes import LayerShape, Prefix
from posttrain.engines.native.probe import PROMPT_TOKENS, STEPS
from posttrain.engines.native.sampler import draw
from posttrain.models.forward.precision import full_precision
from posttrain.randomness import generator, uniforms

_CACHES = ("past_key_values", "cache_params", "state")  # what models call it


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


class PlainRows:
    """Rows of one length in one batch.

    Args:
        tokens: the prompts, ``int64 [P, L]``.
        prompt_of_row: for every row, the index of its prompt.
        is_cached: keep the model's own cache; without it, every step reads all tokens.
    """

    def __init__(self, model: Any, tokens: Tensor, prompt_of_row: Sequence[int], *, is_cached: bool) -> None:
        self.model, self.is_cached, self.name = model, is_cached, ""
        self.cache: Any = None
        index = torch.tensor(list(prompt_of_row), device=tokens.device)
        if not is_cached:
            self.tokens = tokens[index]
            self.logits = self._read(self.tokens)
            return
        self.tokens = tokens
        self.logits = self._read(tokens)
        if self.can_select:
            self.keep(index)
        else:  # a cache of the model's own kind
            self.cache, self.tokens = None, tokens[index]
            self.logits = self._read(self.tokens)

    @property
    def can_select(self) -> bool:
        """Whether rows can be taken out of the batch, or repeated."""
        return not self.is_cached or hasattr(self.cache, "reorder_cache")

    def feed(self, tokens: Tensor) -> None:
        """Add one token ``int64 [R]`` to every row; ``logits [R, V]`` are those after it."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        self.logits = self._read(tokens[:, None] if self.is_cached else self.tokens)

    def keep(self, rows: Tensor) -> None:
        """Make these rows, which may repeat, the batch."""
        if self.is_cached:
            self.cache.reorder_cache(rows)
        self.tokens, self.logits = self.tokens[rows], self.logits[rows]

    def _read(self, tokens: Tensor) -> Tensor:
        given = {self.name: self.cache} if self.cache is not None else {}
        output = self.model(input_ids=tokens, use_cache=self.is_cached, **given, **_last_logits(self.model, 1))
        if self.is_cached:
            self.name = next(name for name in _CACHES if getattr(output, name, None) is not None)
            self.cache = output[self.name]
        logits: Tensor = output.logits[:, -1]
        return logits


def _last_logits(model: Any, count: int) -> dict[str, int]:
    """What asks a model for the logits of the last positions alone, if it can be asked."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {"logits_to_keep": count} if "logits_to_keep" in signature(base.forward).parameters else {}


def sample_plainly(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Conversation],
    sampling: Sampling,
    num_slots: int,
    *,
    is_cached: bool,
) -> None:
    """Bring every row to its end, at most ``num_slots`` at a time, those of one prompt length together."""
    ordered = sorted(rows, key=lambda row: len(prompts[row.prompt]))
    while ordered:
        length = len(prompts[ordered[0].prompt])
        batch = [row for row in ordered[:num_slots] if len(prompts[row.prompt]) == length]
        del ordered[: len(batch)]
        _sample_batch(model, prompts, batch, sampling, is_cached)


def _sample_batch(
    model: Any, prompts: Sequence[Sequence[int]], batch: list[Conversation], sampling: Sampling, is_cached: bool
) -> None:
    device = model.get_input_embeddings().weight.device
    order = list(dict.fromkeys(row.prompt for row in batch))
    tokens = torch.tensor([list(prompts[prompt]) for prompt in order], device=device)
    state = PlainRows(model, tokens, [order.index(row.prompt) for row in batch], is_cached=is_cached)
    width = max(row.limit for row in batch)
    table = uniforms([row.key for row in batch], width) if sampling.temperature > 0 else None
    places, step = list(range(len(batch))), 0  # of the rows in the batch, in ``batch``
    while True:
        uniform = None
        if table is not None:
            uniform = torch.from_numpy(np.ascontiguousarray(table[places, step][:, None]))
            uniform = uniform if device.type == "mps" else uniform.to(device)
        ids, probabilities = draw(state.logits, uniform, sampling)
        for place, token, logprob in zip(places, ids.tolist(), probabilities.log().tolist(), strict=True):
            row = batch[place]
            if row.finish is None:
                row.ids.append(token)
                row.logprobs.append(logprob)
                is_last = step + 1 >= row.limit
                row.finish = "stop" if token in sampling.stop_ids else "length" if is_last else None
        step += 1
        alive = [r for r, place in enumerate(places) if batch[place].finish is None]
        if not alive:
            return
        if len(alive) < len(places) and state.can_select:
            kept = torch.tensor(alive, device=device)
            state.keep(kept)
            ids, places = ids[kept], [places[r] for r in alive]
        state.feed(ids)


@full_precision()
def probe_plainly(model: Any, reach: int, lengths: Sequence[int], *, is_cached: bool) -> tuple[float, float]:
    """The largest difference in log-probability between this path and the model's own forward, and its tolerance.

    Two rows of each length are decoded for a few steps with given tokens; then one is taken out.
    """
    device = model.get_input_embeddings().weight.device
    size = int(model.get_input_embeddings().weight.shape[0])
    difference = spread = 0.0
    for length in {max(1, min(n, reach - STEPS)) for n in (max(PROMPT_TOKENS), 5, *lengths)}:
        numbers = generator(0, "plain probe").integers(0, size, (2, length + STEPS))
        rows = torch.from_numpy(numbers).to(device)
        kept = _last_logits(model, STEPS + 1)
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False, **kept).logits
        expected = logits[:, -STEPS - 1 :].float().log_softmax(-1)
        state = PlainRows(model, rows[:, :length], [0, 1], is_cached=is_cached)
        for step in range(STEPS):
            if step == STEPS - 1 and state.can_select:
                state.keep(torch.tensor([1], device=device))
            own = state.logits.float().log_softmax(-1)
            gap = (expected[-len(own) :, step] - own).abs()
            difference = max(difference, float(torch.nan_to_num(gap, nan=float("inf")).max()))
            state.feed(rows[-len(own) :, length + step])
        spread = max(spread, float(expected.std(-1).max()))
    half = model.get_input_embeddings().weight.dtype.itemsize < 4
    return difference, 1e-2 + 0.1 * spread if half else 1e-5 + 1e-3 * spread
