"""Do a server and a model in this process have the same weights? Asked on a few tokens, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.engines.native.engine import sampling_mode
from posttrain.randomness import generator
from posttrain.types import Completion

PROMPT_TOKENS = (7, 3, 5)
NEW_TOKENS = 8
# Nats. In fp32 the two programs differ by some 1e-6; in bf16 by the rounding of logits, 2^-8 of their size.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2


def probe_prompts(vocab_size: int, context: int) -> list[list[int]]:
    """Fixed prompts of different lengths, of arbitrary ids, with room for an answer."""
    lengths = [max(1, min(n, context - NEW_TOKENS)) for n in PROMPT_TOKENS]
    numbers = generator(0, "vllm probe").integers(0, vocab_size, (len(lengths), max(lengths)))
    return [numbers[i, :n].tolist() for i, n in enumerate(lengths)]


def largest_difference(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> float:
    """The largest difference between the completions' log-probabilities and the model's own, at temperature 1."""
    worst = 0.0
    with sampling_mode(model):
        device = next(model.parameters()).device
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion.ids]], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
            difference = (own - torch.tensor(completion.logprobs)).abs()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf")).max()))
    return worst


def default_tolerance(model: Any) -> float:
    """How far apart the same weights may be, by the precision that the model is in here."""
    return TOLERANCE if next(model.parameters()).dtype == torch.float32 else HALF_TOLERANCE
