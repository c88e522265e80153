"""Logit rules depending on preceding tokens; shared by sampler and trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.types import LogitRules

FAR_BELOW = -1e30  # a logit whose probability is 0, and finite: 0 times it is 0


def apply_rules(rules: LogitRules, logits: Tensor, seen: Tensor | None, barred: Tensor | None) -> Tensor:
    """Apply rules to logits ``[R, V]``, in fp32 or float64.

    seen ``bool [R, V]``: prefix tokens, for repetition penalties. barred ``bool [R, V]``: forbidden tokens.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
    """Mark tokens seen earlier, ``bool [M, num_ids]``: row ``tokens [M, T]`` before column ``int64 [M]`` (positive)."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    prefixes = torch.where(places < columns.clamp(min=1)[:, None], tokens, tokens[:, :1])
    seen = torch.zeros((len(tokens), num_ids), dtype=torch.bool, device=tokens.device)
    return seen.scatter_(1, prefixes, True)
