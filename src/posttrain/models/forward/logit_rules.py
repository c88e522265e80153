"""Rules that change the logits of a token as a function of the tokens before it; sampler and trainer apply the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.types import LogitRules

FAR_BELOW = -1e30  # a logit whose probability is 0, and finite: 0 times it is 0


def apply_rules(rules: LogitRules, logits: Tensor, seen: Tensor | None, barred: Tensor | None) -> Tensor:
    """Return the logits ``[R, V]`` after the rules, in fp32 or float64.

    seen ``bool [R, V]``: the tokens of the prefix, for a penalty. barred ``bool [R, V]``: tokens of probability 0.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if seen is not None and rules.repetition_penalty != 1.0:
        penalized = torch.where(logits > 0, logits / rules.repetition_penalty, logits * rules.repetition_penalty)
        logits = torch.where(seen, penalized, logits)
    if barred is not None:
        logits = logits.masked_fill(barred, FAR_BELOW)
    return logits


def ids_as_mask(ids: Sequence[int], num_ids: int, device: torch.device) -> Tensor:
    """``bool [num_ids]``: True at these ids."""
    mask = torch.zeros(num_ids, dtype=torch.bool)
    mask[list(ids)] = True
    return mask.to(device)


def tokens_before(tokens: Tensor, columns: Tensor, num_ids: int) -> Tensor:
    """``bool [M, num_ids]``: the tokens of each row of ``tokens [M, T]`` before its column (``int64 [M]``, above 0)."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    prefixes = torch.where(places < columns.clamp(min=1)[:, None], tokens, tokens[:, :1])
    seen = torch.zeros((len(tokens), num_ids), dtype=torch.bool, device=tokens.device)
    return seen.scatter_(1, prefixes, True)
