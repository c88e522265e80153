"""Directions of the residual stream as tokens, for a report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.features.logit_lens import build_lens


@torch.no_grad()
def strongest_tokens(model: Any, directions: Tensor, tokenizer: Any, count: int = 8) -> list[dict[str, list[Any]]]:
    """For each direction [n, d] the tokens with the largest and the smallest logits (``logit_lens``).

    ``{"up": [[text, logit], ...], "down": [...]}``.

    Raises:
        UsageError: a model whose final norm or LM head is not known.
    """
    if not len(directions):
        return []
    up, down = build_lens(model).extremes(directions, count)
    return [
        {"up": _texts(rising, tokenizer), "down": _texts(falling, tokenizer)}
        for rising, falling in zip(up, down, strict=True)
    ]


def show_token(tokenizer: Any, token: int) -> str:
    """A token as text."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _texts(likely: list[tuple[int, float]], tokenizer: Any) -> list[list[Any]]:
    return [[show_token(tokenizer, token), round(float(logit), 3)] for token, logit in likely]
