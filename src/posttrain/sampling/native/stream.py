"""One completion token by token, for someone who waits at the screen."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from posttrain.errors import RunFailure
from posttrain.models.config import context_length
from posttrain.randomness import uniforms
from posttrain.sampling.base import Sampling, check_prompts, check_sampling
from posttrain.sampling.native.engine import sampling_mode
from posttrain.sampling.native.sampler import draw
from posttrain.types import Finish


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token with its log-probability at the sampling temperature (1 when greedy), before truncation.

    ``is_last``: it is a stop token, or there is no room for another. ``finish`` counts for the last token only.
    """

    id: int
    logprob: float
    is_last: bool
    finish: Finish


def stream(
    model: PreTrainedModel, prompt: Sequence[int], key: int, sampling: Sampling
) -> Generator[StreamedToken, None, None]:
    """Draw one completion of ``prompt``: the tokens that the native engine draws for the same key.

    Closing the iterator ends the work.

    Raises:
        UsageError: an empty prompt, one that leaves no room in the model's context, or sampling options out of range.
        RunFailure: the model's logits are not finite.
    """
    context = sampling.within(context_length(model.config))
    check_sampling(sampling)
    check_prompts([prompt], context, int(model.get_input_embeddings().weight.shape[0]))
    return _decode(model, list(prompt), key, min(sampling.max_tokens, context - len(prompt)), sampling)


def _decode(
    model: PreTrainedModel, ids: list[int], key: int, limit: int, sampling: Sampling
) -> Generator[StreamedToken, None, None]:
    device, cache = next(model.parameters()).device, DynamicCache()
    numbers = None if sampling.temperature == 0 else torch.as_tensor(uniforms([key], limit), device=device)
    for step in range(limit):
        with sampling_mode(model):  # entered anew for each token: in between, the model belongs to others
            read = torch.tensor([ids], device=device)
            logits = model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            drawn, probability = draw(logits, None if numbers is None else numbers[:, step, None], sampling)
        if not torch.isfinite(logits.max()):
            raise RunFailure("the model's logits are not finite, so no token can be drawn from them")
        token, logprob = int(drawn[0]), float(probability.log()[0])
        stops = token in sampling.stop_ids
        yield StreamedToken(token, logprob, stops or step + 1 == limit, "stop" if stops else "length")
        if stops:
            return
        ids = [token]
