"""The decoding paths for every architecture: the model's own modules, over our key/value cache or over their own.

``ModulesDecoder``: the model's forward pass over our cache, for any causal language model whose state is keys and
values, with sliding windows where its configuration names them.

``PlainRows``: the cache is the model's, too. States of linear attention, convolutions and the like allow neither
padding nor rows that join later, so rows of one prompt length are decoded together. A model without a usable cache
reads all tokens at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from posttrain.errors import EngineMismatch
from posttrain.models.forward.forward import causal_lm
from posttrain.randomness import generator, uniforms
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.native.cache import LayerShape, Prefix, SlotCache, pad_right
from posttrain.sampling.native.probe import PROMPT_TOKENS, STEPS, largest, tolerance_of
from posttrain.sampling.native.sampler import draw

_CACHES = ("past_key_values", "cache_params")  # names of the cache in models' outputs


class ColumnCache(Cache):
    """transformers' cache interface for one decode step over a ``SlotCache``."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, 1, dim]`` at the cursor; return all columns of the batch."""
        return self.slots.write(layer_idx, key_states[:, :, 0], value_states[:, :, 0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots.width - 1


class ModulesDecoder:
    """A ``Decoder`` that calls ``model`` itself (a transformers model, or a peft one around it)."""

    transposed = False
    can_share = False

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape] | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
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
        cache = DynamicCache()  # without a configuration it keeps every position, also in layers with a window
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
        """Return the shapes that one token leaves in the cache of each layer."""
        prefix = self.prefill([[0]])
        pairs = zip(prefix.keys, prefix.values, strict=True)
        return [LayerShape(k.shape[2], k.shape[3], v.shape[3], k.dtype) for k, v in pairs]

    def _mask(self, rows: int, cache: SlotCache) -> Tensor | dict[str, Tensor]:
        """Return the additive mask ``[R, 1, 1, width]`` in the form that the model takes."""
        full = cache.mask()
        if full is None:
            full = torch.zeros((rows, 1, 1, cache.width), dtype=cache.dtype, device=self.device)
        if self.window is None:
            return full
        windowed = full
        if cache.width > self.window:
            windowed = full.clone()
            windowed[..., : cache.width - self.window] = -torch.inf
        return {"full_attention": full, "sliding_attention": windowed} if self.mixed else windowed


class PlainRows:
    """Rows of one length in one batch, with the model's own cache; ``logits [R, V]`` follow their last tokens.

    Args:
        tokens: the prompts, ``int64 [P, L]``.
        prompt_of_row: for every row, the index of its prompt.
        is_cached: keep the model's own cache; without it, every step reads all tokens.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: Tensor, prompt_of_row: Sequence[int], *, is_cached: bool
    ) -> None:
        self.model, self.is_cached, self.tokens = model, is_cached, tokens[:, :0]
        self.cache: dict[str, Cache] = {}
        self.feed(tokens)
        self.keep(torch.tensor(list(prompt_of_row), device=tokens.device))

    def feed(self, tokens: Tensor) -> None:
        """Add tokens ``int64 [R, T]`` to every row."""
        if not self.is_cached:
            self.tokens = tokens = torch.cat([self.tokens, tokens], 1)
        options = {**self.cache, **_last_logits(self.model, 1)}
        output = self.model(input_ids=tokens, use_cache=self.is_cached, **options)
        if self.is_cached:
            self.cache = {name: output[name] for name in _CACHES if getattr(output, name, None) is not None}
            if not self.cache:
                raise EngineMismatch("the model returns no cache")
        self.logits: Tensor = output.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Make these rows, which may repeat, the batch."""
        for cache in self.cache.values():
            cache.reorder_cache(rows)
        if not self.is_cached:
            self.tokens = self.tokens[rows]
        self.logits = self.logits[rows]


def _last_logits(model: PreTrainedModel, count: int) -> dict[str, int]:
    """Return the option for the logits of the last positions alone, if the model has it."""
    return {"logits_to_keep": count} if "logits_to_keep" in signature(causal_lm(model).forward).parameters else {}


def sample_plainly(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Conversation],
    sampling: Sampling,
    num_slots: int,
    *,
    is_cached: bool,
) -> None:
    """Complete every row, at most ``num_slots`` at a time, those of one prompt length together."""
    ordered = sorted(rows, key=lambda row: len(prompts[row.prompt]))
    while ordered:
        length = len(prompts[ordered[0].prompt])
        batch = [row for row in ordered[:num_slots] if len(prompts[row.prompt]) == length]
        del ordered[: len(batch)]
        _sample_batch(model, prompts, batch, sampling, is_cached)


def _sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    batch: list[Conversation],
    sampling: Sampling,
    is_cached: bool,
) -> None:
    device = model.get_input_embeddings().weight.device
    order = list(dict.fromkeys(row.prompt for row in batch))
    tokens = torch.tensor([list(prompts[prompt]) for prompt in order], device=device)
    state = PlainRows(model, tokens, [order.index(row.prompt) for row in batch], is_cached=is_cached)
    width = max(row.limit for row in batch)
    table = torch.from_numpy(uniforms([row.key for row in batch], width)) if sampling.temperature > 0 else None
    places = list(range(len(batch)))  # of the rows in the batch, in ``batch``
    for step in range(width):
        uniform = None if table is None else table[places, step, None]
        if uniform is not None and device.type != "mps":
            uniform = uniform.to(device)
        ids, probabilities = draw(state.logits, uniform, sampling)
        for place, token, logprob in zip(places, ids.tolist(), probabilities.log().tolist(), strict=True):
            row = batch[place]
            row.ids.append(token)
            row.logprobs.append(logprob)
            is_last = step + 1 >= row.limit
            row.finish = "stop" if token in sampling.stop_ids else "length" if is_last else None
        alive = [r for r, place in enumerate(places) if batch[place].finish is None]
        if not alive:
            return
        if len(alive) < len(places):
            kept = torch.tensor(alive, device=device)
            state.keep(kept)
            ids, places = ids[kept], [places[r] for r in alive]
        state.feed(ids[:, None])


def probe_plainly(
    model: PreTrainedModel, reach: int, lengths: Sequence[int], *, is_cached: bool
) -> tuple[float, float]:
    """Return the largest difference in log-probability from the model's own forward, and its tolerance.

    Two rows of each length are decoded for a few steps with given tokens; then one is taken out.
    """
    weight = model.get_input_embeddings().weight
    difference = spread = 0.0
    for length in {max(1, min(n, reach - STEPS)) for n in (max(PROMPT_TOKENS), 5, *lengths)}:
        numbers = generator(0, "plain probe").integers(0, int(weight.shape[0]), (2, length + STEPS))
        rows = torch.from_numpy(numbers).to(weight.device)
        kept = _last_logits(model, STEPS + 1)
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False, **kept).logits
        expected = logits[:, -STEPS - 1 :].float().log_softmax(-1)
        state = PlainRows(model, rows[:, :length], [0, 1], is_cached=is_cached)
        for step in range(STEPS):
            if step == STEPS - 1:
                state.keep(torch.tensor([1], device=weight.device))
            own = state.logits.float().log_softmax(-1)
            difference = max(difference, largest(expected[-len(own) :, step] - own))
            state.feed(rows[-len(own) :, length + step, None])
        spread = max(spread, float(expected.std(-1).max()))
    return difference, tolerance_of(weight.dtype, spread)
