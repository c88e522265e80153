"""Recompute loss and gradient for one update, using transformers' forward pass on single unpadded rows.

The loss is a function of log-probabilities (``balances.losses``). First its derivatives with respect to them are taken
over the full batch. Then each row runs again with gradients: ``Σ slope · log p`` has the same gradient as the loss.
Memory therefore holds the graph for only one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.balances.losses import LossInputs, expected_regularizers, expected_values
from posttrain.balances.record import UpdateFacts
from posttrain.balances.weights import expected_correction, expected_weights


@dataclass(frozen=True, slots=True)
class AuditedRows:
    """The rows of an update: token ids, trained positions, and values at these positions.

    sampler, old, advantages: one value per trained position, by row; None if the loss does not use them. ``old`` is
    also None if the audited weights provide it (``old_is_own``). reads_reference: the loss uses a reference model.
    """

    ids: Sequence[Sequence[int]]
    places: Sequence[Sequence[int]]
    sampler: Sequence[Sequence[float]] | None = None
    old: Sequence[Sequence[float]] | None = None
    advantages: Sequence[Sequence[float]] | None = None
    reads_reference: bool = False
    old_is_own: bool = False

    @property
    def lengths(self) -> Tensor:
        """Trained tokens per row, ``int64 [B]``."""
        return torch.tensor([len(one) for one in self.places])


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Loss and gradient for an update. ``size``: sum of the absolute loss terms.

    logprobs, reference: sums over trained tokens per row, float64 ``[B]``. gradients: float64 by name, before
    clipping.
    """

    loss: float
    size: float
    logprobs: Tensor
    reference: Tensor | None
    gradients: Mapping[str, Tensor]


def score_row(model: Any, ids: Sequence[int], places: Sequence[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Score one row: log-probabilities and entropies at ``places``, each float64 ``[N]``."""
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0]
    at = torch.tensor(list(places), device=device)
    scored = logits[at - 1]
    if scored.dtype != torch.float64:
        scored = scored.float()
    distribution = (scored / temperature).log_softmax(dim=-1)
    chosen = distribution.gather(1, tokens[0, at][:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return chosen.double().cpu(), entropy.double().cpu()


def recompute(
    model: Any,
    rows: AuditedRows,
    facts: UpdateFacts,
    temperature: float,
    reference: tuple[Any, AbstractContextManager[Any]] | None,
) -> Recomputed:
    """Recompute the loss, and its gradient for all parameters with ``requires_grad``.

    ``reference``: a model, and the context to run it in (which may disable an adapter).
    """
    logprobs, entropy = (torch.zeros(_shape(rows), dtype=torch.float64) for _ in range(2))
    of_reference: Tensor | None = None
    with torch.no_grad():
        for row, (ids, places) in enumerate(zip(rows.ids, rows.places, strict=True)):
            logprobs[row, : len(places)], entropy[row, : len(places)] = score_row(model, ids, places, temperature)
        if reference is not None:
            of_reference = torch.zeros_like(logprobs)
            scorer, inside = reference
            with inside:
                for row, (ids, places) in enumerate(zip(rows.ids, rows.places, strict=True)):
                    of_reference[row, : len(places)], _ = score_row(scorer, ids, places, temperature)
    inputs = _inputs_of(rows, logprobs, entropy, of_reference)
    loss, size, slopes = _slopes_of(inputs, facts)
    gradients = _backward(model, rows, temperature, slopes)
    sums = None
    if of_reference is not None:
        sums = of_reference.sum(dim=1)
    return Recomputed(loss, size, logprobs.detach().sum(dim=1), sums, gradients)


def _shape(rows: AuditedRows) -> tuple[int, int]:
    return len(rows.places), max(1, int(rows.lengths.max()))


def _padded(rows: AuditedRows, values: Sequence[Sequence[float]] | None) -> Tensor | None:
    """Pad values at trained positions with zeros to ``float64 [B, T]``, T being the largest count."""
    if values is None:
        return None
    result = torch.zeros(_shape(rows), dtype=torch.float64)
    for row, own in enumerate(values):
        result[row, : len(own)] = torch.tensor(list(own), dtype=torch.float64)
    return result


def _inputs_of(rows: AuditedRows, logprobs: Tensor, entropy: Tensor, reference: Tensor | None) -> LossInputs:
    """Build loss inputs for trained tokens only; untrained positions are dropped."""
    mask = torch.arange(logprobs.shape[1]) < rows.lengths[:, None]
    old = _padded(rows, rows.old)
    if rows.old_is_own:
        old = logprobs.clone()
    return LossInputs(
        mask,
        logprobs.requires_grad_(True),
        old,
        _padded(rows, rows.sampler),
        _padded(rows, rows.advantages),
        reference,
        entropy.requires_grad_(True),
    )


def _slopes_of(inputs: LossInputs, facts: UpdateFacts) -> tuple[float, float, tuple[Tensor, Tensor]]:
    """Compute the loss, the absolute sum of its terms, and its derivatives by log-probabilities and entropies."""
    assert inputs.entropy is not None
    with torch.enable_grad():
        computed = expected_values(facts.objective, inputs)
        assert computed is not None, "an objective without a formula was refused before"
        values = computed.values
        if facts.level == "token":
            if facts.kl_coef or facts.entropy_coef:
                further = expected_regularizers(inputs, facts.kl_coef, facts.kl_estimator, facts.entropy_coef)
                values = values + further
            values = torch.where(inputs.mask, values, torch.zeros_like(values))
        if facts.correction is not None and inputs.old is not None and inputs.sampler is not None:
            correction = expected_correction(facts.correction, inputs.old, inputs.sampler, inputs.mask)
            assert correction is not None, "a correction without a formula was refused before"
            values = values * correction
        terms = values * _weights_of(inputs, facts)
        total = terms.sum()
    leaves = [inputs.logprobs, inputs.entropy]
    slopes = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return float(total.detach()), float(terms.detach().abs().sum()), (slopes[0], slopes[1])


def _weights_of(inputs: LossInputs, facts: UpdateFacts) -> Tensor:
    lengths = inputs.mask.sum(dim=1)
    if facts.level == "token":
        weights = expected_weights(facts.aggregation, lengths)
        assert weights is not None, "an aggregation without a formula was refused before"
        return torch.where(inputs.mask, weights[:, None], 0.0)
    each = 2 if facts.level == "pair" else 1
    weights = expected_weights(facts.aggregation, lengths.unflatten(0, (-1, each)).sum(dim=1))
    assert weights is not None, "an aggregation without a formula was refused before"
    return weights


def _backward(model: Any, rows: AuditedRows, temperature: float, slopes: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Accumulate the gradient of ``Σ slope · log p``, row by row."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trained.items()}
    for row, (ids, places) in enumerate(zip(rows.ids, rows.places, strict=True)):
        own = [slope[row, : len(places)] for slope in slopes]
        if not any(bool(slope.any()) for slope in own):
            continue
        with torch.enable_grad():
            logprobs, entropy = score_row(model, ids, places, temperature)
            (logprobs * own[0] + entropy * own[1]).sum().backward()
        for name, parameter in trained.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad.detach().cpu().double()
                parameter.grad = None
    return sums


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Compute the global gradient norm."""
    return float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
