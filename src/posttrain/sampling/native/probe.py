"""Compare a decoding path with the model on a few ragged sequences before using it."""

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
LEAST_PAST = 16  # tokens beyond a length switch


def probe_lengths(switches: tuple[int, ...], reach: int) -> list[tuple[int, ...]]:
    """Choose batches of prompt lengths: a short one, then one per switch with rows beyond it and across it.

    Rows exceed a window by half its size if ``reach`` permits, since a few tokens among thousands change little.
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
    """Measure the largest log-probability difference between a path and ``model``, and its tolerance.

    Both in nats. Ragged prompts are prefilled and decoded for a few steps with fixed tokens, comparing full
    distributions. ``decode(rows, steps)`` returns log-probabilities ``[rows, steps, V]`` before each of a row's last
    ``steps`` tokens, for each variant of the path. The tolerance scales with the logits' spread, which is small in
    untrained models. Callers must set full precision, because TF32 rounding errors exceed the effect of a wrong
    function.
    """
    steps = min(STEPS, max(1, context // 2))
    lengths = [max(1, min(n, context - steps)) for n in prompt_tokens]
    weight = model.get_input_embeddings().weight
    numbers = generator(0, "engine probe").integers(0, int(weight.shape[0]), (len(lengths), max(lengths) + steps))
    rows = [numbers[i, : n + steps].tolist() for i, n in enumerate(lengths)]
    ways = decode(rows, steps)
    takes_few = "logits_to_keep" in signature(causal_lm(model).forward).parameters
    options = {}
    if takes_few:
        options["logits_to_keep"] = steps
    difference = spread = 0.0
    for i, row in enumerate(rows):
        ids = torch.tensor([row[:-1]], device=weight.device)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **options).logits
        expected = logits[0, -steps:].float().log_softmax(-1)
        difference = max(difference, *(_largest(expected - logprobs[i]) for logprobs in ways))
        spread = max(spread, float(expected.std(-1).max()))
    if dtype.itemsize < 4:
        return difference, 1e-2 + 0.1 * spread
    return difference, 1e-5 + 1e-3 * spread


def _largest(difference: Tensor) -> float:
    """Largest absolute entry; NaN counts as infinite."""
    return float(torch.nan_to_num(difference.abs(), nan=float("inf")).max())


def decode_in_slots(decoder: Decoder, rows: list[list[int]], steps: int) -> list[Tensor]:
    """Run ``decoder`` (see ``probe``) with copied and, if supported, shared prompts."""
    ways = [_decode(decoder, rows, steps, share=False)]
    if decoder.can_share:
        ways.append(_decode(decoder, rows, steps, share=True))
    return ways


def _decode(decoder: Decoder, rows: list[list[int]], steps: int, *, share: bool) -> Tensor:
    device = decoder.device
    names = list(range(len(rows)))
    bodies = [row[: -steps - 1] for row in rows]
    longest = max(map(len, bodies))
    shared = None
    if share:
        shared = SharedPrefixes(decoder.shapes, len(rows), device)
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
