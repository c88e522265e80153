"""Prompts, keys, and the log-probabilities of a model's own forward pass, for tests of the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.randomness import derive_key
from posttrain.types import Completion

LENGTHS = (5, 1, 12, 3)


def make_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1, low: int = 8) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(low, 300, n).tolist() for n in lengths]


def make_keys(count: int, group: int, seed: int = 0) -> list[list[int]]:
    return [[derive_key(seed, "test", i, j) for j in range(group)] for i in range(count)]


def forward_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of ``ids`` after ``prompt`` by one uncached forward pass of one row."""
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0].float() / temperature
    return logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]


def worst_difference(model: Any, prompts: Any, completions: Any, temperature: float = 1.0) -> float:
    """Return the largest gap of recorded log-probabilities to a forward pass; 0 is recorded for replies."""
    worst = 0.0
    for prompt, group in zip(prompts, completions, strict=True):
        for c in group:
            expected = forward_logprobs(model, prompt, c.ids, temperature)
            if c.own is not None:
                expected = torch.where(torch.tensor(c.own), expected, torch.zeros(()))
            assert len(c.logprobs) == len(c.ids)
            worst = max(worst, float((expected - torch.tensor(c.logprobs)).abs().max()))
    return worst


def ids_of(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in group] for group in completions]
