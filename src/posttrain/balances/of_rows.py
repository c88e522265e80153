"""Balances of an update's rows: which are trained, token counts, weights, advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.balances.advantages import PerAnswer
from posttrain.balances.findings import Reading, compared, tally
from posttrain.balances.limits import ADVANTAGE_LIMIT, ALIVE, LARGE_SURPRISE, MOVED, ratio_limit
from posttrain.balances.record import RowSums, SamplingFacts, StepRecord, TokenRecord
from posttrain.balances.weights import expected_weights

WEIGHT_LIMIT = 1e-6  # of float64 weights, which a file keeps in fp32


def places_of(record: StepRecord) -> list[Sequence[int]] | None:
    """Expected trained positions per row, from its answer or data row.

    None if the record has neither: files do not store data set rows.
    """
    assert record.rows is not None
    if not record.given and not record.answers:
        return None
    if record.given:
        return [row.places for row in record.given]
    found: list[Sequence[int]] = []
    for place in record.rows.answers.tolist():
        if 0 <= place < len(record.answers):
            found.append(record.answers[place].places)
        else:
            found.append([])
    return found


def read_row_balances(record: StepRecord, advantages: PerAnswer | None) -> Iterator[Reading]:
    """Yield balances of an update's rows. ``advantages``: per answer in the batch, if known."""
    rows = record.rows
    assert rows is not None
    places = places_of(record)
    lengths = rows.tokens
    if places is not None:
        lengths = torch.tensor([len(one) for one in places])
    if record.answers and record.facts.sampling is not None:
        yield _taken(record, rows, record.facts.sampling)
    if places is not None:
        yield _tokens(rows, places, lengths)
    if advantages is not None:
        yield _advantages(record, rows, advantages)
        if record.is_first:
            yield _recorded(record, advantages)
        yield _idle(record, rows, advantages)
    counted = _counted(record, lengths)
    if counted is not None:
        weights = _weights(record, rows, counted)
        if weights is not None:
            yield weights
    yield from _against_others(record, rows)


def _counted(record: StepRecord, lengths: Tensor) -> Tensor | None:
    """Tokens per row in the denominator. None if masks decide and the file lacks them."""
    if all(one.divisor == "all" for one in record.facts.masks):
        return lengths
    if record.tokens is None:
        return None
    return ((record.tokens.fields["counted"] > 0) & record.tokens.mask).sum(dim=1)


def _taken(record: StepRecord, rows: RowSums, sampling: SamplingFacts) -> Reading:
    """Each pass trains every answer at most once. At the end of a pass all were trained, except named ones."""
    answers = rows.answers.tolist()
    last = record.update % record.facts.num_minibatches == record.facts.num_minibatches - 1
    before = record.before.taken
    if record.update % record.facts.num_minibatches == 0:
        before = frozenset()
    wrong = len(answers) - len(set(answers))
    wrong += sum(place in before for place in answers)
    for place in answers:
        if not 0 <= place < len(record.answers):
            wrong += 1
            continue
        answer = record.answers[place]
        is_masked = sampling.masks_truncated and not sampling.divides_all and answer.is_truncated
        wrong += answer.has_failed or is_masked
    if last and sampling.takes_all and not sampling.redraws:
        had = before | set(answers)
        for place, answer in enumerate(record.answers):
            is_due = not answer.has_failed and not (sampling.masks_truncated and answer.is_truncated)
            wrong += is_due and bool(answer.num_own) and place not in had
    return tally("rows", wrong, "each answer once in a pass over the batch", f"{wrong} that are not")


def _tokens(rows: RowSums, places: Sequence[Sequence[int]], lengths: Tensor) -> Reading:
    sums = torch.tensor([sum(one) for one in places])
    differs = (rows.tokens != lengths) | (rows.places != sums)
    wrong = int(differs.sum())
    expected = f"{int(lengths.sum())} trained tokens, at the positions of the answers"
    return tally("tokens", wrong, expected, f"{int(rows.tokens.sum())}; {wrong} of {len(lengths)} rows differ")


def _advantages(record: StepRecord, rows: RowSums, advantages: PerAnswer) -> Reading:
    """Advantages per row; per token if recorded."""
    worst, expected, found = 0.0, 0.0, 0.0
    at_tokens: Sequence[Sequence[float]] | None = None
    if record.tokens is not None and "advantages" in record.tokens.fields:
        at_tokens = record.tokens.fields["advantages"].tolist()
    means = rows.advantage.tolist()
    uneven = rows.uneven.tolist()
    for number, place in enumerate(rows.answers.tolist()):
        values: list[float] | None = None
        if 0 <= place < len(advantages):
            values = advantages[place]
        if values is None:
            continue
        size = max(1.0, *map(abs, values))
        here = [(means[number], math.fsum(values) / len(values))]
        if at_tokens is not None:
            row = at_tokens[number]
            each = record.answers[place].places
            if len(values) == 1:
                values = values * len(each)
            here = [(row[t], value) for t, value in zip(each, values, strict=True) if t < len(row)]
        elif len(values) == 1:
            here.append((values[0] + uneven[number], values[0]))
        for one, other in here:
            gap = abs(one - other) / size
            if not gap <= worst:
                worst, expected, found = gap, other, one
    return Reading("advantage", _finite(worst), ADVANTAGE_LIMIT, f"{expected:.9g} (worst row)", f"{found:.9g}")


def _recorded(record: StepRecord, advantages: PerAnswer) -> Reading:
    """Recorded advantages of all answers in the batch."""
    worst, expected, found = 0.0, 0.0, 0.0
    for answer, values in zip(record.answers, advantages, strict=True):
        if values is None or answer.advantage is None:
            continue
        mean = math.fsum(values) / max(1, len(values))
        gap = abs(answer.advantage - mean) / max(1.0, *map(abs, values), 0.0)
        if not gap <= worst:
            worst, expected, found = gap, mean, answer.advantage
    return Reading("advantage", _finite(worst), ADVANTAGE_LIMIT, f"{expected:.9g} (recorded)", f"{found:.9g}")


def _finite(gap: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap


def _weights(record: StepRecord, rows: RowSums, lengths: Tensor) -> Reading | None:
    """Weights of whole rows, or of units at their first row."""
    facts = record.facts
    each = 2 if facts.level == "pair" else 1
    if facts.level == "token":
        of_token = expected_weights(facts.aggregation, lengths)
        if of_token is None:
            return None
        expected = of_token * lengths
        found = rows.weight
        if bool(found.isnan().all()):
            return None
    else:
        of_unit = expected_weights(facts.aggregation, lengths.unflatten(0, (-1, each)).sum(dim=1))
        if of_unit is None:
            return None
        expected = of_unit
        found = rows.weight[::each]
    gap = (found - expected).abs().sum() / expected.abs().sum()
    reading = compared("weights", float(found.sum()), float(expected.sum()), 1.0, WEIGHT_LIMIT)
    return Reading("weights", max(_finite(float(gap)), reading.gap), WEIGHT_LIMIT, reading.expected, reading.found)


def _idle(record: StepRecord, rows: RowSums, advantages: PerAnswer) -> Reading:
    """Only rows that cannot change anything are skipped."""
    corrections: Tensor | None = None
    if record.tokens is not None and "correction" in record.tokens.fields:
        corrections = torch.where(record.tokens.mask, record.tokens.fields["correction"], 0.0).abs().sum(dim=1)
    kept: Tensor | None = None
    if record.tokens is not None and "unmasked" in record.tokens.fields:
        kept = (record.tokens.mask & (record.tokens.fields["unmasked"] > 0)).any(dim=1)
    divides_all = record.facts.sampling is not None and record.facts.sampling.divides_all
    wrong = 0
    for number, place in enumerate(rows.answers.tolist()):
        if bool(rows.computed[number]) or not 0 <= place < len(advantages):
            continue
        if divides_all and record.answers[place].is_truncated:
            continue
        values = advantages[place]
        acts = values is None or any(abs(value) > ADVANTAGE_LIMIT for value in values)
        if corrections is not None:
            acts = acts and bool(corrections[number] > 0)
        elif record.facts.correction is not None:
            acts = False  # files do not store its factors
        if kept is not None:
            acts = acts and bool(kept[number])
        elif record.facts.masks:
            acts = False
        wrong += acts and bool(rows.tokens[number])
    return tally("idle", wrong, "no row left out that has an advantage", f"{wrong} of them")


def _of_newest_weights(record: StepRecord, rows: RowSums) -> bool:
    """Check if all rows' answers were sampled with the weights before this update."""
    answers = [record.answers[place] for place in rows.answers.tolist() if 0 <= place < len(record.answers)]
    return bool(answers) and all(answer.version == record.step - 1 for answer in answers)


def _against_others(record: StepRecord, rows: RowSums) -> Iterator[Reading]:
    """Yield balances comparing log-probabilities with sampler, old policy and reference."""
    sampling = record.facts.sampling
    count = float(rows.tokens[rows.computed].sum())
    if count and record.facts.has_dropout is False:
        yield from _against_reference(record, rows, count)
    if not count or not record.is_first or sampling is None or record.facts.has_dropout:
        return
    is_fresh = _of_newest_weights(record, rows)
    if is_fresh and sampling.draws:
        yield from _against_sampler(record, rows, sampling, count)
    if (is_fresh and sampling.draws and sampling.at_scored_temperature) or sampling.old_from_trainer:
        yield from _against_old(record, rows, sampling)
    squares = record.measured.get("surprise_squared", 0.0)
    is_drawn = is_fresh and sampling.draws and not sampling.is_cut
    if is_drawn and squares > 0 and sampling.at_scored_temperature:
        yield _drawn(record)


def _against_sampler(record: StepRecord, rows: RowSums, sampling: SamplingFacts, count: float) -> Iterator[Reading]:
    limit = record.facts.sampler_limit
    if sampling.at_scored_temperature:
        kl = float(rows.kl_sampler[rows.computed].sum()) / count
        yield _mismatch(kl, limit)
        known = record.tokens
        if sampling.old_from_trainer and known is not None and "old_logprobs" in known.whole:
            yield _mismatch(_whole_kl(known), limit)
    elif "kl_resampled" in record.measured:
        yield _mismatch(record.measured["kl_resampled"], limit)


def _mismatch(kl: float, limit: float) -> Reading:
    return Reading("sampler", _finite(abs(kl)), limit, f"a KL of at most {limit:.1e} nats per token", f"{kl:.2e}")


def _whole_kl(tokens: TokenRecord) -> float:
    """KL between sampler and old log-probabilities, over all rows in the batch that have both."""
    old, sampler = tokens.whole["old_logprobs"].double(), tokens.whole["sampler_logprobs"].double()
    known = (old != 0) & (sampler != 0)
    gap = (sampler - old)[known]
    if not len(gap):
        return 0.0
    return float((torch.expm1(-gap) + gap).mean())


def _against_old(record: StepRecord, rows: RowSums, sampling: SamplingFacts) -> Iterator[Reading]:
    """The ratio is 1 before the first update."""
    limit = record.facts.sampler_limit
    if sampling.old_from_trainer:
        limit = record.facts.trainer_limit
    largest = ratio_limit(limit)
    if record.tokens is not None and "old_logprobs" in record.tokens.fields:
        mask = record.tokens.mask & rows.computed[:, None]
        gaps = torch.where(mask, record.tokens.logprobs - record.tokens.fields["old_logprobs"], 0.0)
        found = float(gaps.abs().amax())
    else:
        sums = ((rows.logprob - rows.old).abs() / rows.tokens.clamp(min=1))[rows.computed]
        known = sums[~sums.isnan()]
        if not len(known):
            return
        found = float(known.amax())
    expected = f"a ratio of 1 within {largest:.1e}"
    yield Reading("ratio", _finite(found), largest, expected, f"one that differs by {found:.2e}")


def _against_reference(record: StepRecord, rows: RowSums, count: float) -> Iterator[Reading]:
    """KL to the reference is 0 before a run's first update, and positive once weights have moved."""
    if bool(rows.kl_reference[rows.computed].isnan().any()):
        return
    kl = float(rows.kl_reference[rows.computed].sum()) / count
    limit = record.facts.trainer_limit
    moving = record.facts.reference
    if moving is not None and moving.last_move(record.step):
        if moving.mixing == 1 and moving.last_move(record.step) == record.step - 1:
            expected = f"a KL to the reference of at most {limit:.1e}, as the reference has just become the policy"
            yield Reading("reference", _finite(abs(kl)), limit, expected, f"{kl:.2e}")
    elif record.step == 1:
        expected = f"a KL to the reference of at most {limit:.1e} before the first update"
        yield Reading("reference", _finite(abs(kl)), limit, expected, f"{kl:.2e}")
    elif record.before.moved > MOVED:
        gap = math.inf
        if kl > 0:
            gap = ALIVE / kl
        expected = f"a KL to the reference above {ALIVE:.0e}, as the weights have moved by {record.before.moved:.2g}"
        yield Reading("reference", gap, 1.0, expected, f"{kl:.2e}")


def _drawn(record: StepRecord) -> Reading:
    """Drawn tokens are as likely as their entropy predicts: in this batch, and cumulatively."""
    deviations = []
    for before, squared in ((0.0, 0.0), (record.before.surprise, record.before.surprise_squared)):
        spread = math.sqrt(squared + record.measured["surprise_squared"])
        deviations.append((before + record.measured["surprise"]) / spread)
    worst = max(deviations, key=abs)
    found = f"a mean of −log p that is {worst:+.1f} standard deviations from the entropy"
    return Reading("draws", _finite(abs(worst)), LARGE_SURPRISE, "tokens that are drawn as they are scored", found)
