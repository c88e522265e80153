"""A fixed batch that a server and the model in this process score, to compare their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from posttrain.engines.base import Sampling
from posttrain.engines.http import Unreadable
from posttrain.engines.native.engine import sampling_mode
from posttrain.engines.vllm.protocol import CompletionRequest, ServedModel, check_vocabulary
from posttrain.randomness import generator
from posttrain.world import Within

# The longest is more than a block of keys and values on any device, so that a cache of prompts takes part.
PROMPT_TOKENS = (300, 40, 7, 3)
NEW_TOKENS = 8
TOP = 20  # as many as a server gives by default
# Nats. In fp32 two programs differ by some 1e-5 in unlikely tokens; in bf16 by the rounding of logits, 2^-8 of their
# size, which tells other weights apart but hardly one update from none.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2


@dataclass(frozen=True, slots=True)
class Scores:
    """A server's view of one prompt: ids of prompt and answer, and at places in them log-probabilities by token id."""

    ids: tuple[int, ...]
    places: dict[int, dict[int, float]]


def probe_bodies(served: ServedModel, vocab_size: int, context: int) -> list[dict[str, Any]]:
    """Return two requests for each prompt of arbitrary ids: a greedy answer (from the cache), its scores (past it)."""
    lengths = [max(1, min(n, context - NEW_TOKENS)) for n in PROMPT_TOKENS]
    numbers = generator(0, "vllm probe").integers(0, vocab_size, (len(lengths), max(lengths)))
    greedy, bodies = Sampling(min(NEW_TOKENS, context - 1), temperature=0.0), []
    for i, length in enumerate(lengths):
        prompt = tuple(numbers[i, :length].tolist())
        body = CompletionRequest(served.name, prompt, greedy.max_tokens, greedy, seed=0).body()
        bodies += [body | {"logprobs": TOP}, body | {"prompt_logprobs": 0, "max_tokens": 1}]
    return bodies


def read_scores(answer: Any, prompt: Sequence[int], vocab_size: int) -> Scores:
    """Return the scores of an answer to one of ``probe_bodies``.

    Raises:
        Unreadable: ids or log-probabilities are missing, or of tokens that the model has not.
    """
    try:
        choice = answer["choices"][0]
        ids = (*prompt, *map(int, choice["token_ids"]))
        if len(ids) > len(prompt) + NEW_TOKENS:
            raise Unreadable(f"{len(ids) - len(prompt)} tokens, where {NEW_TOKENS} at most were asked for")
        of_prompt = choice.get("prompt_logprobs") or []
        places = {i: {int(k): float(v["logprob"]) for k, v in each.items()} for i, each in enumerate(of_prompt) if each}
        for i, each in enumerate(choice["logprobs"]["top_logprobs"] or [], start=len(prompt)):
            places[i] = {int(k.removeprefix("token_id:")): float(v) for k, v in each.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unreadable(f"no log-probabilities of a probe ({type(error).__name__}: {error})") from None
    if not any(places.values()) or not all(0 < place < len(ids) for place in places):
        raise Unreadable("no log-probabilities of a probe")
    check_vocabulary([*ids, *(token for tokens in places.values() for token in tokens)], vocab_size)
    return Scores(ids, places)


def largest_difference(model: Any, within: Within, scored: Sequence[Scores]) -> float:
    """Return the largest difference between the server's log-probabilities and the model's, at temperature 1, in nats.

    ``within``: gathers a sharded model around its forward passes.
    """
    worst = 0.0
    with sampling_mode(model):
        device = next(model.parameters()).device
        for scores in scored:
            ids = torch.tensor([scores.ids], device=device)
            logits = within(partial(model, input_ids=ids, use_cache=False)).logits[0].float()
            own = logits.log_softmax(-1).cpu()
            where = [(i - 1, token) for i, tokens in scores.places.items() for token in tokens]
            theirs = torch.tensor([value for tokens in scores.places.values() for value in tokens.values()])
            rows, columns = zip(*where, strict=True)
            difference = (own[list(rows), list(columns)] - theirs).abs()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf")).max()))
    return worst


def default_tolerance(model: Any, dtype: str = "float32") -> float:
    """Return the allowed difference, by the precision of the model here and of the server's."""
    is_half = next(model.parameters()).dtype == torch.bfloat16 or dtype == "bfloat16"
    return HALF_TOLERANCE if is_half else TOLERANCE
