"""One completion token by token, for someone who waits at the screen.

The tokens are those that the native engine draws for the same key, one at a time and with what is known of each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from posttrain.engines.base import Sampling, check_prompts, check_sampling
from posttrain.engines.native.engine import sampling_mode
from posttrain.engines.native.sampler import draw
from posttrain.errors import RunFailure
from posttrain.models.stated_sizes import context_length
from posttrain.randomness import uniforms
from posttrain.types import Finish


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token with its log-probability and the entropy (nats) of the distribution that it was drawn from.

    Both at the sampling temperature (1 when greedy), before truncation. ``likely``: the likeliest tokens there, each
    with its log-probability, in order. ``is_last``: it is a stop token, or there is no room for another.
    """

    id: int
    logprob: float
    entropy: float
    likely: tuple[tuple[int, float], ...]
    is_last: bool
    finish: Finish


def stream(
    model: Any, prompt: Sequence[int], key: int, sampling: Sampling, *, num_likely: int = 0
) -> Generator[StreamedToken, None, None]:
    """Draw one completion of ``prompt``; each token is given as soon as it is there.

    Closing the iterator ends the work. ``finish`` is ``stop`` at a stop token, else ``length``, and tells of the
    last token only.

    Raises:
        UsageError: an empty prompt, one that leaves no room in the model's context, or sampling options out of range.
        RunFailure: the model's logits are not finite.
    """
    context = sampling.within(context_length(model.config))
    check_sampling(sampling)
    check_prompts([prompt], context, int(model.get_input_embeddings().weight.shape[0]))
    limit = min(sampling.max_tokens, context - len(prompt))
    device = next(model.parameters()).device
    numbers = None if sampling.temperature == 0 else torch.as_tensor(uniforms([key], limit), device=device)
    return _decode(model, torch.tensor([list(prompt)], device=device), limit, numbers, sampling, num_likely)


def _decode(
    model: Any, ids: torch.Tensor, limit: int, numbers: torch.Tensor | None, sampling: Sampling, num_likely: int
) -> Generator[StreamedToken, None, None]:
    cache = DynamicCache()
    for step in range(limit):
        with sampling_mode(model):  # entered anew for each token: in between, the model belongs to others
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            token = _draw_one(logits, None if numbers is None else numbers[:, step : step + 1], sampling, num_likely)
        stops = token.id in sampling.stop_ids
        is_last = stops or step + 1 == limit
        yield replace(token, is_last=is_last, finish="stop" if stops else "length")
        if is_last:
            return
        ids = torch.tensor([[token.id]], device=ids.device)


def _draw_one(logits: torch.Tensor, number: torch.Tensor | None, sampling: Sampling, num_likely: int) -> StreamedToken:
    drawn, _ = draw(logits, number, sampling)
    scaled = logits.float() if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    table = scaled.log_softmax(-1)[0]
    logprob = float(table[drawn[0]])
    if not torch.isfinite(table.max()):
        raise RunFailure("the model's logits are not finite, so no token can be drawn from them")
    entropy = float(torch.special.entr(table.exp()).sum())
    values, places = table.topk(min(num_likely, table.shape[0]))
    likely = tuple(zip(places.tolist(), values.tolist(), strict=True))
    return StreamedToken(int(drawn[0]), logprob, entropy, likely, is_last=False, finish="length")
