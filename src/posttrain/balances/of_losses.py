"""Balances of the loss: value, derivatives by model outputs, clipping and correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from posttrain.balances.advantages import PerAnswer, own_logprobs
from posttrain.balances.findings import Reading, compared
from posttrain.balances.limits import SLOPE_LIMIT, SUM_LIMIT
from posttrain.balances.losses import OF_A_HEAD, Computed, LossInputs, expected_regularizers, expected_values
from posttrain.balances.masks import expected_kept, trained_of
from posttrain.balances.of_rows import places_of
from posttrain.balances.record import Fields, RowSums, StepRecord, TokenRecord
from posttrain.balances.weights import expected_correction, expected_weights

# Depend on labels, a baseline, a teacher or single tokens, which files do not store.
NEEDS_TOKENS = ("kto", "on_policy_distillation", "ld_dpo", "dft", "clip_cov", "kl_cov", "aot")
ROUNDING = 8 * 2.0**-24  # error of an fp32 sum, relative to the sum of absolute terms
CORRECTION_LIMIT = 1e-5  # factors are fp32


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Terms of the loss sum: inputs, weights (``[B, T]``, or ``[U]`` per unit), correction, and tokens kept by masks
    (``bool [B, T]``).
    """

    inputs: LossInputs
    weights: Tensor
    correction: Tensor | None = None
    kept: Tensor | None = None


def read_loss(record: StepRecord, advantages: PerAnswer | None) -> Iterator[Reading]:
    """Yield balances of the loss. From files, only those possible with per-row sums."""
    rows = record.rows
    assert rows is not None
    if record.tokens is not None:
        terms = _of_tokens(record, record.tokens, advantages)
        if terms.correction is not None:
            yield from _correction(record.tokens, terms)
        yield from _recompute(record, rows, terms)
        return
    yield _of_parts(record, rows)
    of_rows = _of_sums(record, rows, advantages)
    if of_rows is not None:
        computed = expected_values(record.facts.objective, of_rows.inputs)
        if computed is not None:
            total, size = _weighed(record, rows, of_rows, computed)
            rounded = _rounded(of_rows)
            of_rounded = expected_values(record.facts.objective, rounded.inputs)
            assert of_rounded is not None
            moved, _ = _weighed(record, rows, rounded, of_rounded)
            yield _loss(record, total, size, 2 * abs(moved - total) + _scattered(record, rows, of_rows))


def _of_parts(record: StepRecord, rows: RowSums) -> Reading:
    """The loss equals the sum of row contributions."""
    found = record.measured.get("loss", math.nan)
    size = float(rows.value.abs().sum()) + abs(found)
    return compared("loss", found, float(rows.value.sum()), size, SUM_LIMIT)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A loss, the sum of its absolute terms, its derivatives, and clipping (None: unclipped objective)."""

    total: float
    size: float
    slopes: Fields
    clipped: Tensor | None


def _recompute(record: StepRecord, rows: RowSums, terms: LossTerms) -> Iterator[Reading]:
    """Value, derivatives and clipping. Objectives without a formula use the sum of recorded values."""
    assert record.tokens is not None
    known = _evaluate(record, terms)
    if known is None:
        parts = record.tokens.values * terms.weights
        yield _loss(record, float(parts.sum()), float(parts.abs().sum()))
        return
    loss = _loss(record, known.total, known.size)
    slopes = _slopes(record.tokens, rows, known.slopes, 0.0)
    if not loss.holds or not slopes.holds:
        # a value near its minimum, or at an edge, amplifies what rounding does to the sum of a row
        moved = _evaluate(record, _rounded(terms))
        assert moved is not None
        loss = _loss(record, known.total, known.size, 2 * abs(moved.total - known.total))
        allowed = sum(float((moved.slopes[name] - x).abs().sum()) for name, x in known.slopes.items())
        slopes = _slopes(record.tokens, rows, known.slopes, 2 * allowed)
    yield loss
    if record.tokens.slopes:
        yield slopes
    if known.clipped is not None and "clip_fraction" in record.measured:
        yield _clip(record, rows, terms.inputs, known.clipped)


def _evaluate(record: StepRecord, terms: LossTerms) -> Evaluated | None:
    """Loss and derivatives. None for objectives without a formula."""
    leaves: dict[str, Tensor] = {}
    for name in ("logprobs", "entropy", "scores"):
        leaf = getattr(terms.inputs, name)
        if leaf is not None:
            leaves[name] = leaf.requires_grad_(True)
    with torch.enable_grad():
        computed = expected_values(record.facts.objective, terms.inputs)
        if computed is None:
            return None
        contributions = _contributions(record, terms, computed)
        total = contributions.sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    size = float(contributions.detach().abs().sum())
    return Evaluated(float(total.detach()), size, dict(zip(leaves, found, strict=True)), computed.clipped)


def _rounded(terms: LossTerms) -> LossTerms:
    """Same, with each row's log-probabilities shifted by the possible fp32 rounding of a row mean."""
    inputs = terms.inputs
    logprobs = inputs.logprobs.detach()
    sizes = torch.where(inputs.mask, logprobs.abs(), torch.zeros_like(logprobs))
    if inputs.reference is not None:
        sizes = sizes + torch.where(inputs.mask, inputs.reference.abs(), torch.zeros_like(logprobs))
    shifts = ROUNDING * sizes.sum(dim=1) / inputs.lengths.clamp(min=1)
    shifts[1::2] *= -1.0  # of a pair one goes up and one down
    moved = torch.where(inputs.mask, logprobs + shifts[:, None], logprobs)
    return replace(terms, inputs=replace(inputs, logprobs=moved))


def _contributions(record: StepRecord, terms: LossTerms, computed: Computed) -> Tensor:
    """Loss terms, per token or unit."""
    facts = record.facts
    values = computed.values
    if terms.kept is not None:
        values = torch.where(terms.kept, values, torch.zeros_like(values))
    if facts.level == "token":
        if facts.kl_coef or facts.entropy_coef:
            regularizers = expected_regularizers(terms.inputs, facts.kl_coef, facts.kl_estimator, facts.entropy_coef)
            values = values + regularizers
        values = torch.where(terms.inputs.mask, values, torch.zeros_like(values))
    if terms.correction is not None:
        values = values * terms.correction
    return values * terms.weights


def _loss(record: StepRecord, expected: float, size: float, allowed: float = 0.0) -> Reading:
    """``size``: sum of absolute terms; ``allowed``: difference explained by rounding."""
    found = record.measured.get("loss", math.nan)
    reading = compared("loss", found, expected, size, SUM_LIMIT)
    if reading.holds or not abs(found - expected) <= allowed + SUM_LIMIT * size:
        return reading
    return replace(reading, gap=reading.limit)


def _slopes(tokens: TokenRecord, rows: RowSums, expected: Fields, allowed: float) -> Reading:
    """Derivatives of the loss by model outputs, over computed rows."""
    difference, size, largest = 0.0, 0.0, (0.0, 0.0)
    for name, found in tokens.slopes.items():
        slope = expected.get(name, torch.zeros_like(found))
        gap = (found - slope).abs()
        gap[~rows.computed] = 0.0
        difference += float(gap.sum())
        size += float(slope[rows.computed].abs().sum())
        place = int(gap.argmax())
        if float(gap.flatten()[place]) >= abs(largest[0] - largest[1]):
            largest = float(slope.flatten()[place]), float(found.flatten()[place])
    gap_of_all = max(0.0, difference - allowed) / max(size, 1e-12)
    if math.isnan(difference):
        gap_of_all = math.inf
    expected_text, found_text = (f"{x:.6g} of one log-probability" for x in largest)
    return Reading("gradient", gap_of_all, SLOPE_LIMIT, f"a derivative of {expected_text}", found_text)


def _clip(record: StepRecord, rows: RowSums, inputs: LossInputs, clipped: Tensor) -> Reading:
    """Fraction of clipped tokens. A token exactly at the threshold may round either way."""
    mask = inputs.mask & rows.computed[:, None]
    count = max(1.0, float(mask.sum()))
    expected = float(torch.where(mask, clipped, torch.zeros_like(clipped)).sum()) / count
    return compared("clip", record.measured["clip_fraction"], expected, 1.0, 1.5 / count)


def _correction(tokens: TokenRecord, terms: LossTerms) -> Iterator[Reading]:
    found = tokens.fields.get("correction")
    if found is None or terms.correction is None:
        return
    gaps = torch.where(terms.inputs.mask, (found.double() - terms.correction).abs(), torch.zeros_like(found).double())
    worst = int(gaps.argmax())
    size = max(1.0, float(terms.correction.abs().amax()))
    expected, seen = (float(x.flatten()[worst]) for x in (terms.correction, found))
    yield compared("correction", seen, expected, size, CORRECTION_LIMIT)


def _of_tokens(record: StepRecord, tokens: TokenRecord, advantages: PerAnswer | None) -> LossTerms:
    """Inputs, weights and correction: from recorded answers if available, otherwise from the batch."""
    rows = record.rows
    assert rows is not None
    facts = record.facts
    shape = tokens.mask.shape
    places = places_of(record)
    assert places is not None, "of a running update answers or rows are known"
    grid = Grid.of(shape, places)
    mask = grid.mask()
    fields = {name: x.double() for name, x in tokens.fields.items() if x.is_floating_point()}
    sampler = _sampler_logprobs(record, tokens, grid)
    sampling = facts.sampling
    old = fields.get("old_logprobs")
    if old is not None and sampler is not None and sampling is not None and not sampling.old_from_trainer:
        old = sampler
    logprobs = tokens.logprobs.clone()
    for known in (sampler, old):
        if known is not None:
            logprobs[~rows.computed] = known[~rows.computed]
    inputs = LossInputs(
        mask,
        logprobs,
        old,
        sampler,
        _advantages_at_tokens(record, tokens, advantages, places, grid),
        fields.get("ref_logprobs"),
        entropy=_copied(tokens.entropy),
        scores=_copied(tokens.scores),
        fields=fields,
    )
    lengths = torch.tensor([len(one) for one in places])
    weights = tokens.weights.double()
    if facts.level == "token":
        of_rows = expected_weights(facts.aggregation, lengths)
        if of_rows is not None:
            weights = torch.where(mask, of_rows[:, None], 0.0)
    else:
        each = 2 if facts.level == "pair" else 1
        of_units = expected_weights(facts.aggregation, lengths.unflatten(0, (-1, each)).sum(dim=1))
        if of_units is not None:
            weights = of_units
    kept: Tensor | None = None
    if facts.masks:
        kept = fields["unmasked"] > 0
        expected = expected_kept(record, tokens, trained_of(tokens))
        if expected is not None:
            kept, counted = expected
            of_counted = expected_weights(facts.aggregation, (mask & counted).sum(dim=1))
            if of_counted is not None:
                weights = torch.where(mask & counted, of_counted[:, None], 0.0)
    if "left_out" in fields:
        weights = _of_present(weights, fields["left_out"], facts.level)
    correction = fields.get("correction")
    if facts.correction is not None and old is not None and sampler is not None:
        known = expected_correction(facts.correction, old, sampler, mask)
        if known is not None:
            correction = known
    return LossTerms(inputs, weights, correction, kept)


def _of_present(weights: Tensor, left_out: Tensor, level: str) -> Tensor:
    """Weights with 0 for rows that only enter the denominator."""
    is_present = left_out == 0
    if level == "token":
        return torch.where(is_present[:, None], weights, 0.0)
    each = len(left_out) // len(weights)
    return torch.where(is_present[::each], weights, 0.0)


def _copied(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.clone()


@dataclass(frozen=True, slots=True)
class Grid:
    """Positions of trained tokens from B rows in ``[B, T]``, dropping those beyond T."""

    shape: torch.Size
    rows: Tensor
    columns: Tensor
    is_inside: Tensor | None

    @classmethod
    def of(cls, shape: torch.Size, places: Sequence[Sequence[int]]) -> Grid:
        """Grid of positions per row."""
        rows = torch.arange(len(places)).repeat_interleave(torch.tensor([len(one) for one in places]))
        columns = torch.tensor(list(chain.from_iterable(places)), dtype=torch.long)
        is_inside: Tensor | None = None
        if bool((columns >= shape[1]).any()):
            is_inside = columns < shape[1]
            rows, columns = rows[is_inside], columns[is_inside]
        return cls(shape, rows, columns, is_inside)

    def spread(self, values: Iterable[float]) -> Tensor:
        """``float64 [B, T]``: scatter flat row-by-row token values to their positions; 0 elsewhere."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        if self.is_inside is not None:
            numbers = numbers[self.is_inside]
        out = torch.zeros(self.shape, dtype=torch.float64)
        out[self.rows, self.columns] = numbers
        return out

    def mask(self) -> Tensor:
        """``bool [B, T]``: True at the places."""
        out = torch.zeros(self.shape, dtype=torch.bool)
        out[self.rows, self.columns] = True
        return out


def _sampler_logprobs(record: StepRecord, tokens: TokenRecord, grid: Grid) -> Tensor | None:
    """Sampler log-probabilities recorded with answers, or otherwise from the batch."""
    assert record.rows is not None
    field = tokens.fields.get("sampler_logprobs")
    if field is None:
        return None
    chosen = [record.answers[place] for place in record.rows.answers.tolist() if 0 <= place < len(record.answers)]
    if len(chosen) != len(record.rows) or any(answer.logprobs is None for answer in chosen):
        return field.double()
    return grid.spread(chain.from_iterable(own_logprobs(answer) for answer in chosen))


def _advantages_at_tokens(
    record: StepRecord,
    tokens: TokenRecord,
    advantages: PerAnswer | None,
    places: Sequence[Sequence[int]],
    grid: Grid,
) -> Tensor | None:
    assert record.rows is not None
    field = tokens.fields.get("advantages")
    if field is None:
        return None
    if advantages is None:
        return field.double()
    flat: list[float] = []
    for row, place in enumerate(record.rows.answers.tolist()):
        values: Sequence[float] | None = None
        if 0 <= place < len(advantages):
            values = advantages[place]
        if values is None:
            return field.double()
        if len(values) == 1:
            flat += [values[0]] * len(places[row])
        else:
            flat += values
    return grid.spread(flat)


def _of_sums(record: StepRecord, rows: RowSums, advantages: PerAnswer | None) -> LossTerms | None:
    """One entry per row, representing all its tokens. None if the loss is not a function of row sums.

    It is for likelihoods, row and pair objectives, and for policy gradients with ratio 1 and one advantage per row.
    """
    facts = record.facts
    if facts.objective.name in OF_A_HEAD or facts.correction is not None or facts.entropy_coef:
        return None
    if facts.objective.name in NEEDS_TOKENS or facts.masks or facts.kl_estimator == "k3_weighted":
        return None
    if facts.kl_coef and facts.kl_estimator not in ("k1", "k3"):
        return None
    a = rows.advantage.clone()
    reads_advantages = facts.level == "token" and facts.objective.name != "cross_entropy"
    if reads_advantages:
        if not record.is_first or bool((rows.uneven > 0).any()):
            return None
        if facts.sampling is None or (facts.sampling.staleness and not facts.sampling.old_from_trainer):
            return None
    for row, place in enumerate(rows.answers.tolist()):
        if advantages is not None and 0 <= place < len(advantages):
            values = advantages[place]
            if values is not None and len(values) == 1:
                a[row] = values[0]
    places = places_of(record)
    counts = rows.tokens.double()
    if places is not None:
        counts = torch.tensor([len(one) for one in places], dtype=torch.float64)
    each = counts.clamp(min=1)
    inputs = LossInputs(
        (counts > 0)[:, None],
        (rows.logprob / each)[:, None],
        (rows.old / each)[:, None],
        (rows.old / each)[:, None],
        a[:, None],
        (rows.reference / each)[:, None],
        counts=counts,
    )
    if facts.level == "token":
        weights = expected_weights(facts.aggregation, counts)
        if weights is None:
            return None
        return LossTerms(inputs, (weights * counts)[:, None])
    of_units = expected_weights(facts.aggregation, counts.unflatten(0, (-1, 2 if facts.level == "pair" else 1)).sum(1))
    if of_units is None:
        return None
    return LossTerms(inputs, of_units)


def _scattered(record: StepRecord, rows: RowSums, terms: LossTerms) -> float:
    """The difference that ratios of single tokens make which a row's mean does not show: of second order, as k3 is."""
    if record.facts.level != "token" or terms.inputs.advantages is None:
        return 0.0
    weights = terms.weights[:, 0] / terms.inputs.lengths.clamp(min=1)
    sizes = (weights * terms.inputs.advantages[:, 0].abs() * rows.kl_sampler.abs())[rows.computed]
    return 2 * float(sizes[sizes.isfinite()].sum())


def _weighed(record: StepRecord, rows: RowSums, terms: LossTerms, computed: Computed) -> tuple[float, float]:
    """Loss from row sums, and the sum of absolute terms. KL to the reference is taken from the record."""
    is_used = rows.computed
    contributions = computed.values * terms.weights
    if record.facts.level == "token":
        contributions = contributions[is_used]
    total, size = float(contributions.sum()), float(contributions.abs().sum())
    if record.facts.kl_coef and record.facts.level == "token":
        weights = terms.weights[:, 0] / terms.inputs.lengths.clamp(min=1)
        of_rows = rows.kl_reference
        if record.facts.kl_estimator == "k1":
            of_rows = rows.logprob - rows.reference
        kl = record.facts.kl_coef * (weights * of_rows)[is_used]
        total += float(kl.sum())
        size += float(kl.abs().sum())
    return total, size
