"""The comparison of a decoding path with the model, on a few ragged sequences, before the path is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.models.forward.forward import causal_lm
from posttrain.randomness import generator
from posttrain.sampling.native.cache import Decoder, Prefix, SharedPrefixes, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = (7, 3, 60)
STEPS = 4
LEAST_PAST = 16  # tokens of a row behind a switch of the configuration


def probe_lengths(switches: tuple[int, ...], reach: int) -> list[tuple[int, ...]]:
    """Return batches of prompt lengths: one of 64 tokens with what is decoded, then past each switch and across it.

    Past a window by half of it, where rows of ``reach`` tokens get so far: a few tokens of thousands change little.
    """
    batches: list[tuple[int, ...]] = [PROMPT_TOKENS]
    for switch in switches:
        past = min(switch + max(switch // 2, LEAST_PAST), reach - STEPS)
        batches.append((max(past, 1), max(switch - 1, 1), min(PROMPT_TOKENS)))
    return batches


Decode = Callable[[list[list[int]], int], list[Tensor]]


def probe(
    model: PreTrainedModel, decode: Decode, dtype: torch.dtype, context: int, prompt_tokens: Sequence[int]
) -> tuple[float, float]:
    """Return the largest difference in log-probability between a path and ``model``'s own forward, and its limit.

    Both in nats. Prompts of different lengths are prefilled and decoded for a few steps with given tokens; the full
    distribution of every step is compared. ``decode(rows, steps)``: the log-probabilities ``[rows, steps, V]`` after
    each of the last ``steps`` tokens of a row but its last, by every way of the path. The limit follows the spread of
    the logits, which is small in a fresh model. The caller sets full precision: TF32 rounds by more than a wrong
    function may differ.
    """
    steps = min(STEPS, max(1, context // 2))
    lengths = [max(1, min(n, context - steps)) for n in prompt_tokens]
    weight = model.get_input_embeddings().weight
    numbers = generator(0, "engine probe").integers(0, int(weight.shape[0]), (len(lengths), max(lengths) + steps))
    rows = [numbers[i, : n + steps].tolist() for i, n in enumerate(lengths)]
    ways = decode(rows, steps)
    takes_few = "logits_to_keep" in signature(causal_lm(model).forward).parameters
    options = {"logits_to_keep": steps} if takes_few else {}
    difference = spread = 0.0
    for i, row in enumerate(rows):
        ids = torch.tensor([row[:-1]], device=weight.device)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **options).logits
        expected = logits[0, -steps:].float().log_softmax(-1)
        difference = max(difference, *(_largest(expected - logprobs[i]) for logprobs in ways))
        spread = max(spread, float(expected.std(-1).max()))
    return difference, 1e-2 + 0.1 * spread if dtype.itemsize < 4 else 1e-5 + 1e-3 * spread


def _largest(difference: Tensor) -> float:
    """Return the largest absolute entry; NaN, which compares as nothing, counts as infinite."""
    return float(torch.nan_to_num(difference.abs(), nan=float("inf")).max())


def decode_in_slots(decoder: Decoder, rows: list[list[int]], steps: int) -> list[Tensor]:
    """Return what ``decoder`` computes (see ``probe``), for prompts that are copied and, if it can, shared."""
    return [_decode(decoder, rows, steps, share=share) for share in ([False, True] if decoder.can_share else [False])]


def _decode(decoder: Decoder, rows: list[list[int]], steps: int, *, share: bool) -> Tensor:
    device, names = decoder.device, list(range(len(rows)))
    bodies = [row[: -steps - 1] for row in rows]
    longest = max(map(len, bodies))
    shared = SharedPrefixes(decoder.shapes, len(rows), device) if share else None
    cache = SlotCache(decoder, len(rows), longest + steps + 1, shared)
    cache.reserve(longest)
    prefix = decoder.prefill([body or [0] for body in bodies])
    cache.place(Prefix(prefix.keys, prefix.values, [len(body) for body in bodies]), names, names)
    cache.refresh(len(rows))
    logprobs = []
    for step in range(steps):
        tokens = torch.tensor([row[step - steps - 1] for row in rows], device=device)
        positions = torch.tensor([len(body) + step for body in bodies], device=device)
        logprobs.append(decoder.decode(tokens, positions, cache).float().log_softmax(-1))
        cache.advance()
    return torch.stack(logprobs, 1)
