"""Decoding paths for any architecture, with our key/value cache or the model's cache.

``ModulesDecoder``: the model's forward pass over our cache, for causal language models with key/value state, including
sliding windows named in the configuration.

``PlainRows``: the model's forward pass and cache. Linear attention, convolutions and similar states allow neither
padding nor joining rows, so rows with equal prompt lengths are decoded together. Models without a usable cache reread
all tokens in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from posttrain.errors import EngineMismatch
from posttrain.models.forward.forward import causal_lm
from posttrain.models.forward.logit_rules import apply_rules, ids_as_mask
from posttrain.randomness import uniforms
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.native.cache import LayerShape, Prefix, SlotCache, pad_right
from posttrain.sampling.native.sampler import DrawnSets, draw, draw_kept
from posttrain.sampling.stop_texts import StopFinder

_CACHES = ("past_key_values", "cache_params")  # names of the cache in models' outputs


class ColumnCache(Cache):
    """transformers' cache interface for one decode step over a ``SlotCache``."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, 1, dim]`` at the cursor and return all visible columns."""
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
        # Configurations with layer types mark windowed layers; otherwise (Mistral) every layer is windowed.
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
        """Find per-layer cache shapes by running one token."""
        prefix = self.prefill([[0]])
        pairs = zip(prefix.keys, prefix.values, strict=True)
        return [LayerShape(k.shape[2], k.shape[3], v.shape[3], k.dtype) for k, v in pairs]

    def _mask(self, rows: int, cache: SlotCache) -> Tensor | dict[str, Tensor]:
        """Build an additive mask ``[R, 1, 1, width]`` in the format expected by the model."""
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
    """Rows of equal length in one batch with the model's cache; ``logits [R, V]`` follow the last tokens.

    Args:
        tokens: prompts ``int64 [P, L]``.
        prompt_of_row: prompt index per row.
        is_cached: use the model's cache; otherwise every step rereads all tokens.
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
        options = dict[str, Any](self.cache)
        if "logits_to_keep" in signature(causal_lm(self.model).forward).parameters:
            options["logits_to_keep"] = 1
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


class PlainSchedule:
    """Completes at most ``num_slots`` rows together, grouped by prompt length; see ``Schedule``.

    If a caller sets ``finish`` between steps, the row leaves the batch. Rows cannot join.
    """

    num_free = 0

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        num_slots: int,
        *,
        is_cached: bool,
        stop_texts: StopFinder | None = None,
    ) -> None:
        self.stop_texts = stop_texts
        self.model, self.prompts, self.sampling = model, prompts, sampling
        self.num_slots, self.is_cached = num_slots, is_cached
        self.waiting = sorted(rows, key=lambda row: len(prompts[row.prompt]))
        self.batch: Iterator[None] | None = None

    @property
    def is_done(self) -> bool:
        """True once all rows have finished."""
        return self.batch is None and not self.waiting

    def step(self) -> None:
        """Draw one token per row in the batch, or start another batch."""
        if self.batch is None:
            self.waiting = [row for row in self.waiting if row.finish is None]
            if not self.waiting:
                return
            length = len(self.prompts[self.waiting[0].prompt])
            rows = [row for row in self.waiting[: self.num_slots] if len(self.prompts[row.prompt]) == length]
            del self.waiting[: len(rows)]
            self.batch = _steps_of_batch(self.model, self.prompts, rows, self.sampling, self.is_cached, self.stop_texts)
        try:
            next(self.batch)
        except StopIteration:
            self.batch = None

    def run(self) -> None:
        """Complete every row."""
        while not self.is_done:
            self.step()


def _steps_of_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    batch: list[Conversation],
    sampling: Sampling,
    is_cached: bool,
    stop_texts: StopFinder | None,
) -> Iterator[None]:
    """Complete these rows, yielding after each token."""
    device = model.get_input_embeddings().weight.device
    order = list(dict.fromkeys(row.prompt for row in batch))
    tokens = torch.tensor([list(prompts[prompt]) for prompt in order], device=device)
    state = PlainRows(model, tokens, [order.index(row.prompt) for row in batch], is_cached=is_cached)
    width = max(row.limit for row in batch)
    table = torch.from_numpy(uniforms([row.key for row in batch], width)) if sampling.temperature > 0 else None
    rules = sampling.rules
    places = list(range(len(batch)))  # of the rows in the batch, in ``batch``
    for step in range(width):
        uniform = None if table is None else table[places, step, None]
        if uniform is not None and device.type != "mps":
            uniform = uniform.to(device)
        sets: DrawnSets | None = None
        logits = state.logits
        if rules is not None:
            barred: Tensor | None = None
            if rules.barred_ids and step < sampling.min_tokens:
                barred = ids_as_mask(rules.barred_ids, logits.shape[1], device).expand_as(logits)
            logits = apply_rules(rules, logits, _seen(prompts, [batch[place] for place in places], logits), barred)
        if sampling.keeps_sets and uniform is not None:
            ids, probabilities, kept = draw_kept(logits, uniform, sampling)
            sets = DrawnSets(kept[None])
        else:
            ids, probabilities = draw(logits, uniform, sampling)
        drawn = zip(places, ids.tolist(), probabilities.log().tolist(), strict=True)
        for r, (place, token, logprob) in enumerate(drawn):
            row = batch[place]
            if sets is not None:
                sets.append_to(row, 0, r)
            row.ids.append(token)
            row.logprobs.append(logprob)
            is_last = step + 1 >= row.limit
            is_end = token in sampling.stop_ids or (stop_texts is not None and stop_texts.ends(row.turn))
            if is_end:
                row.finish = "stop"
            elif is_last:
                row.finish = "length"
        yield
        alive = [r for r, place in enumerate(places) if batch[place].finish is None]
        if not alive:
            return
        if len(alive) < len(places):
            kept = torch.tensor(alive, device=device)
            state.keep(kept)
            ids, places = ids[kept], [places[r] for r in alive]
        state.feed(ids[:, None])


def _seen(prompts: Sequence[Sequence[int]], rows: Sequence[Conversation], like: Tensor) -> Tensor:
    """Mark tokens present in each row, including its prompt: ``bool [R, V]``."""
    seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    for r, row in enumerate(rows):
        seen[r, torch.tensor([*prompts[row.prompt], *row.ids], device=like.device)] = True
    return seen


def decode_plainly(model: PreTrainedModel, rows: list[list[int]], steps: int, *, is_cached: bool) -> list[Tensor]:
    """Decode each row with the model, batched with a decoy that leaves before the last step (see ``probe``)."""
    device = model.get_input_embeddings().weight.device
    logprobs = []
    for row in rows:
        tokens = torch.tensor([row[::-1], row], device=device)
        state = PlainRows(model, tokens[:, :-steps], [0, 1], is_cached=is_cached)
        for step in range(-steps, 0):
            logprobs.append(state.logits[-1].float().log_softmax(-1))
            if step == -2:
                tokens = tokens[1:]
                state.keep(torch.tensor([1], device=device))
            if step < -1:
                state.feed(tokens[:, step, None])
    return [torch.stack(logprobs).unflatten(0, (len(rows), steps))]
