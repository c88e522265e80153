"""Recompute masks and token selections from whole-batch numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.balances.findings import Reading, tally
from posttrain.balances.limits import ratio_limit
from posttrain.balances.record import Formula, StepRecord, TokenRecord

OptionValues = Mapping[str, Any]
EDGE = 1e-9  # tolerance at a selection threshold, relative to its size: summation order may round either way


def expected_kept(record: StepRecord, tokens: TokenRecord, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Recompute tokens kept by all masks, and tokens in the denominator, ``bool [B, T]``.

    None for third-party masks.
    """
    kept = torch.ones_like(mask)
    counted = torch.ones_like(mask)
    for one in record.facts.masks:
        formula = _MASKS.get(one.name)
        if formula is None:
            return None
        own = formula(tokens, mask, one.options) | ~mask
        kept &= own
        if one.divisor == "kept":
            counted &= own
    return kept, counted


def read_masks(record: StepRecord) -> Iterator[Reading]:
    """Yield balances for masks and covariance-based selections."""
    tokens, rows = record.tokens, record.rows
    if tokens is None or rows is None or "policy_logprobs" not in tokens.fields:
        return
    mask = trained_of(tokens)
    if not record.facts.has_dropout:
        compared = mask & rows.computed[:, None]
        gaps = torch.where(compared, (tokens.fields["policy_logprobs"] - tokens.logprobs).abs(), 0.0)
        limit = ratio_limit(record.facts.trainer_limit)
        found = f"one that differs by {float(gaps.amax()):.2e}"
        yield Reading("mask", float(gaps.amax()), limit, f"log-probabilities of the update within {limit:.1e}", found)
    expected = expected_kept(record, tokens, mask)
    if record.facts.masks and expected is not None:
        wrong = int((((tokens.fields["unmasked"] > 0) != expected[0]) & mask).sum())
        yield tally("mask", wrong, "tokens as the masks keep them", f"{wrong} of {int(mask.sum())} that are not")
    chosen = _CHOICES.get(record.facts.objective.name)
    if chosen is not None:
        wrong = chosen(tokens, mask, record.facts.objective)
        yield tally(
            "mask",
            wrong,
            "tokens or pairs chosen by their place in the batch",
            f"{wrong} that are not as they should be",
        )


def trained_of(tokens: TokenRecord) -> Tensor:
    """Trained tokens in participating rows, ``bool [B, T]``."""
    left_out = tokens.fields.get("left_out")
    if left_out is None:
        return tokens.mask
    return tokens.mask & (left_out == 0)[:, None]


def _unlikely_answers(tokens: TokenRecord, mask: Tensor, options: OptionValues) -> Tensor:
    fields = tokens.fields
    gaps = torch.where(mask, fields["sampler_logprobs"] - fields["policy_logprobs"], 0.0)
    drift = gaps.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    is_unlikely = drift > options.get("threshold", 1e-4)
    return (fields["advantages"] >= 0) | ~is_unlikely[:, None]


def _most_uncertain(tokens: TokenRecord, mask: Tensor, options: OptionValues) -> Tensor:
    entropies = tokens.fields["policy_entropy"].double()
    limit = torch.quantile(entropies[mask], 1.0 - options.get("share", 0.2))
    near = (entropies - limit).abs() <= EDGE * limit.abs().clamp(min=1.0)
    return torch.where(near, tokens.fields["unmasked"] > 0, entropies > limit)


_MASKS: dict[str, Callable[[TokenRecord, Tensor, OptionValues], Tensor]] = {
    "off_policy_sequence": _unlikely_answers,
    "top_entropy": _most_uncertain,
}


def _products(tokens: TokenRecord, mask: Tensor) -> Tensor:
    """The terms of the covariance of advantage and log-probability, of trained tokens in order."""
    deviations = []
    for name in ("advantages", "policy_logprobs"):
        values = tokens.fields[name].double()[mask]
        deviations.append(values - math.fsum(values.tolist()) / max(1, len(values)))
    return deviations[0] * deviations[1]


def _drawn(tokens: TokenRecord, mask: Tensor, objective: Formula) -> int:
    """Selected tokens that are not eligible, plus the count mismatch."""
    options = objective.options
    products = _products(tokens, mask)
    drawn = tokens.fields["clip_cov_tokens"][mask] > 0
    advantages = tokens.fields["advantages"][mask]
    rho = (tokens.fields["policy_logprobs"] - tokens.fields["old_logprobs"])[mask].clamp(-20.0, 20.0).exp()
    held = (advantages < 0) & (rho < 1.0 - options.get("clip_low", 0.2))
    held |= (advantages > 0) & (rho > 1.0 + options.get("clip_high", 0.2))
    low, high = options.get("cov_low", 1.0), options.get("cov_high", 5.0)
    may_be = ~held & (products > low - EDGE) & (products < high + EDGE)
    must_be = ~held & (products > low + EDGE) & (products < high - EDGE)
    most = max(1, int(options.get("share", 2e-4) * len(products)))
    wrong = int((drawn & ~may_be).sum())
    count = int(drawn.sum())
    wrong += max(0, count - most) + max(0, min(most, int(must_be.sum())) - count)
    return wrong


def _strongest(tokens: TokenRecord, mask: Tensor, objective: Formula) -> int:
    products = _products(tokens, mask)
    chosen = tokens.fields["kl_cov_tokens"][mask] > 0
    most = max(1, int(objective.options.get("share", 2e-4) * len(products)))
    wrong = abs(int(chosen.sum()) - most)
    if bool(chosen.any()):
        least = float(products[chosen].min())
        wrong += int((~chosen & (products > least + EDGE * max(1.0, abs(least)))).sum())
    return wrong


def _matched(tokens: TokenRecord, mask: Tensor, objective: Formula) -> int:
    """Pairs whose reference margin does not match their policy rank. Ties may swap."""
    margins = []
    for name in ("policy_logprobs", "ref_logprobs"):
        rows = torch.where(mask, tokens.fields[name].double(), 0.0).sum(dim=1)
        margins.append(rows[0::2] - rows[1::2])
    policy, reference = margins
    matched = reference - tokens.fields["transport_shift"][0::2].double()
    size = float(reference.abs().amax().clamp(min=1.0))
    order = policy.argsort()
    falls = matched[order].diff() < -1e-5 * size
    apart = policy[order].diff() > EDGE * size
    others = (matched.sort().values - reference.sort().values).abs() > 1e-5 * size
    return int((falls & apart).sum()) + int(others.sum())


_CHOICES: dict[str, Callable[[TokenRecord, Tensor, Formula], int]] = {
    "clip_cov": _drawn,
    "kl_cov": _strongest,
    "aot": _matched,
}


def formulas_of_masks() -> frozenset[str]:
    """List recomputable masks."""
    return frozenset(_MASKS)
