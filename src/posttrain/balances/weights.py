"""Recompute denominators and corrections from lengths and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.balances.record import Formula

OptionValues = Mapping[str, Any]
LARGEST = 20.0  # log-ratios are clamped to so many nats


def expected_weights(aggregation: Formula, lengths: Tensor) -> Tensor | None:
    """Weight per trained token of each row, float64 ``[B]``, from token counts.

    For units: weight per unit, from its token count. None for third-party formulas.
    """
    formula = _WEIGHTS.get(aggregation.name)
    if formula is None or not bool((lengths > 0).any()):
        return None
    weights = formula(lengths.double(), aggregation.options)
    return torch.where(lengths > 0, weights, torch.zeros_like(weights))


def _of_all_tokens(lengths: Tensor, options: OptionValues) -> Tensor:
    return torch.full_like(lengths, 1.0 / float(lengths.sum()))


def _of_each_row(lengths: Tensor, options: OptionValues) -> Tensor:
    return 1.0 / (lengths.clamp(min=1) * int((lengths > 0).sum()))


def _of_a_length(lengths: Tensor, options: OptionValues) -> Tensor:
    return torch.full_like(lengths, 1.0 / (int((lengths > 0).sum()) * float(options["length"])))


def _of_units(lengths: Tensor, options: OptionValues) -> Tensor:
    return torch.full_like(lengths, 1.0 / len(lengths))


_WEIGHTS: dict[str, Callable[[Tensor, OptionValues], Tensor]] = {
    "token_mean": _of_all_tokens,
    "sequence_mean": _of_each_row,
    "constant": _of_a_length,
    "unit_mean": _of_units,
}


def expected_correction(correction: Formula, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor | None:
    """Correction factor per token, ``[B, T]``, from trainer and sampler log-probabilities; 1 elsewhere.

    None for third-party formulas.
    """
    formula = _CORRECTIONS.get(correction.name)
    if formula is None:
        return None
    gap = torch.where(mask, (old - sampler).clamp(-LARGEST, LARGEST), torch.zeros_like(old))
    return torch.where(mask, formula(gap, mask, correction.options), torch.ones_like(gap))


def _capped(gap: Tensor, mask: Tensor, options: OptionValues) -> Tensor:
    return gap.exp().clamp(max=options.get("cap", 2.0))


def _capped_rows(gap: Tensor, mask: Tensor, options: OptionValues) -> Tensor:
    rows = gap.sum(dim=1, keepdim=True).clamp(-LARGEST, LARGEST).exp()
    return rows.clamp(max=options.get("cap", 2.0)).expand_as(gap)


def _inside(gap: Tensor, mask: Tensor, options: OptionValues) -> Tensor:
    ratio = gap.exp()
    is_inside = (ratio >= options.get("low", 0.5)) & (ratio <= options.get("high", 5.0))
    return ratio * is_inside


def _inside_on_average(gap: Tensor, mask: Tensor, options: OptionValues) -> Tensor:
    mean = (gap.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    is_inside = (mean >= options.get("low", 0.99)) & (mean <= options.get("high", 1.001))
    kept = torch.ones_like(gap)
    if options.get("weigh") == "token":
        kept = _capped(gap, mask, options)
    elif options.get("weigh") == "sequence":
        kept = _capped_rows(gap, mask, options)
    return kept * is_inside


_CORRECTIONS: dict[str, Callable[[Tensor, Tensor, OptionValues], Tensor]] = {
    "token_tis": _capped,
    "sequence_tis": _capped_rows,
    "icepop": _inside,
    "geometric_mask": _inside_on_average,
}


def formulas_of_weights() -> tuple[frozenset[str], frozenset[str]]:
    """List recomputable aggregations and corrections."""
    return frozenset(_WEIGHTS), frozenset(_CORRECTIONS)
