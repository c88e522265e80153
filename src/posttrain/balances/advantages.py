"""Recompute advantages from rewards, groups and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.balances.record import SampledAnswer, StepRecord, UpdateFacts

PerAnswer = Sequence[list[float] | None]  # per answer: a scalar, or an array over generated tokens
Groups = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Paid:
    """One answer's rewards per generated token, with values of preceding states and of the final state."""

    rewards: list[float]
    values: list[float]
    final: float


def expected_advantages(record: StepRecord) -> PerAnswer | None:
    """Recompute every answer's advantage in a batch; None if that is impossible.

    Impossible for third-party formulas, or if required numbers are missing from the record (log-probabilities of
    truncated, untrained answers).
    """
    facts = record.facts
    if facts.advantage is None or facts.sampling is None:
        return None
    if facts.advantage.name not in formulas_of_advantages():
        return None
    members = _members(record)
    result: list[list[float] | None] = [None] * len(record.answers)
    if facts.advantage.name in _OF_TOKENS or facts.advantage.name == "turn_normalized":
        return _per_token(record, members)
    if facts.advantage.name in _OF_PARTS:
        return _by_parts(record, members)
    members = _compared(record, members, result)
    rewards = [[record.answers[place].reward for place in group] for group in members]
    if facts.sampling.penalty is not None:
        penalties = _penalties(record, members)
        if penalties is None:
            return None
        rewards = [[record.answers[place].reward - sum(penalties[place]) for place in group] for group in members]
    options = facts.advantage.options
    if facts.advantage.name in _OF_GROUPS:
        computed = [_OF_GROUPS[facts.advantage.name](group, options) for group in rewards]
    else:
        computed = _OF_BATCHES[facts.advantage.name](rewards, options)
    for group, values in zip(members, computed, strict=True):
        for place, value in zip(group, values, strict=True):
            result[place] = [value]
    return result


def _members(record: StepRecord) -> list[list[int]]:
    """Indices of answers to compare: those completed, within the chosen groups."""
    members = []
    for group in record.groups:
        played = [place for place in group if not record.answers[place].has_failed]
        if any(record.answers[place].advantage is not None for place in played):
            members.append(played)
    return members


def _compared(record: StepRecord, members: list[list[int]], result: list[list[float] | None]) -> list[list[int]]:
    """Rewarded answers by group. Others get 0 in ``result``, as do groups with fewer than two."""
    groups = []
    for group in members:
        scored = [place for place in group if record.answers[place].is_scored]
        if len(scored) < min(2, len(group)):
            scored = []
        for place in group:
            if place not in scored:
                result[place] = [0.0]
        if scored:
            groups.append(scored)
    return groups


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float], lost: int) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - lost))


def _as_paid(group: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    return list(group)


def _less_mean(group: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    mean = _mean(group)
    return [x - mean for x in group]


def _less_others(group: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    total = math.fsum(group)
    return [x - (total - x) / (len(group) - 1) for x in group]


def _standardized(group: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    if max(group) == min(group):
        return [0.0] * len(group)
    scale = _spread(group, 1) + options.get("epsilon", 1e-4)
    mean = _mean(group)
    return [(x - mean) / scale for x in group]


def _over_mean(group: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    mean = _mean(group)
    if mean <= 0:
        return [0.0] * len(group)
    return [(x - mean) / mean for x in group]


def _over_batch(groups: Groups, options: Mapping[str, Any]) -> list[list[float]]:
    centred = [list(group) for group in groups]
    if options.get("center", "batch") == "group":
        centred = [_less_mean(group, {}) for group in groups]
    everything = [x for group in centred for x in group]
    spread = _spread(everything, 0)
    if spread <= 1e-15 * max(map(abs, everything)):
        return [[0.0] * len(group) for group in centred]
    mean = _mean(everything)
    scale = spread + options.get("epsilon", 1e-8)
    return [[(x - mean) / scale for x in group] for group in centred]


_OF_GROUPS: dict[str, Callable[[Sequence[float], Mapping[str, Any]], list[float]]] = {
    "raw": _as_paid,
    "centered": _less_mean,
    "leave_one_out": _less_others,
    "normalized": _standardized,
    "mean_scaled": _over_mean,
}
_OF_BATCHES: dict[str, Callable[[Groups, Mapping[str, Any]], list[list[float]]]] = {"batch_normalized": _over_batch}
_OF_TOKENS = ("gae", "return_to_go")
_OF_PARTS = ("gdpo",)


def _by_parts(record: StepRecord, members: Sequence[Sequence[int]]) -> PerAnswer | None:
    """Standardize each reward within its group, then whiten the weighted sum over the batch (Liu et al. 2026, section
    3).
    """
    assert record.facts.sampling is not None
    assert record.facts.advantage is not None
    weights = record.facts.sampling.rewards
    if weights is None:
        return None
    options = record.facts.advantage.options
    sums: dict[int, list[float]] = {}
    for group in members:
        for name, weight in weights.items():
            known = [place for place in group if name not in record.answers[place].skipped]
            if not weight or not known:
                continue
            scaled = _standardized([record.answers[place].parts[name] for place in known], options)
            for place, value in zip(known, scaled, strict=True):
                sums.setdefault(place, []).append(weight * value)
    totals = {place: math.fsum(values) for place, values in sums.items()}
    result: list[list[float] | None] = [None] * len(record.answers)
    for place in (place for group in members for place in group):
        result[place] = [0.0]
    if len(totals) < 2:
        return result
    everything = list(totals.values())
    mean = _mean(everything)
    scale = _spread(everything, 1) + options.get("epsilon", 1e-4)
    for place, total in totals.items():
        if total:
            result[place] = [(total - mean) / scale]
    return result


def _field_of(record: StepRecord, name: str) -> dict[int, list[float]] | None:
    """A batch field restricted to each answer's generated tokens, by answer index."""
    tokens = record.tokens
    if tokens is None or tokens.whole_answers is None or name not in tokens.whole:
        return None
    rows = tokens.whole[name].tolist()
    found: dict[int, list[float]] = {}
    for place, row in zip(tokens.whole_answers.tolist(), rows, strict=True):
        if isinstance(row, float):
            found[place] = [row]
        else:
            found[place] = [row[t] for t in record.answers[place].places if t < len(row)]
    return found


def _k(estimator: str, r: float) -> float:
    """KL estimate from ``r = log π − log π_ref`` (Schulman 2020), with r clamped to ±20."""
    r = min(max(r, -20.0), 20.0)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return r * r / 2
    return math.expm1(-r) + r


def _penalties(record: StepRecord, members: Sequence[Sequence[int]]) -> dict[int, list[float]] | None:
    """KL penalty per generated token of compared answers. None if reference or sampler values are missing."""
    assert record.facts.sampling is not None
    penalty = record.facts.sampling.penalty
    if penalty is None:
        return {place: [0.0] * record.answers[place].num_own for group in members for place in group}
    reference = _field_of(record, "ref_logprobs")
    weight = record.measured.get("kl_weight", penalty.weight)
    found: dict[int, list[float]] = {}
    for place in (place for group in members for place in group):
        answer = record.answers[place]
        if reference is None or place not in reference or answer.logprobs is None:
            return None
        sampler = own_logprobs(answer)
        pairs = zip(sampler, reference[place], strict=False)
        found[place] = [weight * _k(penalty.estimator, one - other) for one, other in pairs]
        if len(found[place]) != len(sampler):
            return None
    return found


def own_logprobs(answer: SampledAnswer) -> list[float]:
    """Sampler log-probabilities of generated tokens."""
    assert answer.logprobs is not None
    if answer.own is None:
        return list(answer.logprobs)
    return [x for x, is_own in zip(answer.logprobs, answer.own, strict=True) if is_own]


def _turn_ends(answer: SampledAnswer) -> list[int]:
    """Indices of generated tokens that end a turn; a turn is a contiguous run of generated tokens."""
    places = answer.places
    return [k for k, place in enumerate(places) if k + 1 == len(places) or places[k + 1] != place + 1]


def _per_token(record: StepRecord, members: Sequence[Sequence[int]]) -> PerAnswer | None:
    facts = record.facts
    assert facts.advantage is not None
    assert facts.sampling is not None
    penalties = _penalties(record, members)
    values = _field_of(record, "old_values")
    final = _field_of(record, "final_values")
    needs_values = facts.advantage.name == "gae"
    options = facts.advantage.options
    bootstraps = bool(options.get("bootstrap", False))
    if penalties is None or (needs_values and values is None):
        return None
    paid: dict[int, Paid] = {}
    for place in (place for group in members for place in group):
        answer = record.answers[place]
        number = answer.num_own
        own_values = [0.0] * number
        if needs_values and values is not None:
            own_values = values.get(place, [])
        is_unpaid = bootstraps and answer.is_truncated
        if len(own_values) != number or (is_unpaid and final is None):
            return None
        behind = 0.0
        if is_unpaid and final is not None:
            behind = final[place][0]
        paid[place] = Paid(_pay(facts, answer, penalties[place], is_unpaid), own_values, behind)
    if facts.advantage.name == "turn_normalized":
        return _by_turns(record, members, paid)
    gamma = options.get("gamma", 1.0)
    weight = options.get("gae_lambda", 0.95) if needs_values else 1.0
    computed = {place: _discounted(one, gamma, gamma * weight) for place, one in paid.items()}
    if options.get("whiten", True):
        computed = _whitened(computed)
    return [computed.get(place) for place in range(len(record.answers))]


def _pay(facts: UpdateFacts, answer: SampledAnswer, penalty: Sequence[float], is_unpaid: bool) -> list[float]:
    """Rewards at generated tokens: turn rewards at turn ends, everything else at the last token, minus penalties."""
    assert facts.sampling is not None
    paid = [-x for x in penalty]
    if not paid:
        return paid
    of_turns = 0.0
    ends = _turn_ends(answer)
    for number, reward in enumerate(answer.turns):
        if reward is not None and facts.sampling.turn_weight:
            paid[ends[number]] += facts.sampling.turn_weight * reward
            of_turns += facts.sampling.turn_weight * reward
    if not is_unpaid:
        paid[-1] += answer.reward - of_turns
    return paid


def _discounted(paid: Paid, gamma: float, decay: float) -> list[float]:
    """``A_t = δ_t + γλ A_{t+1}`` with ``δ_t = r_t + γ V_{t+1} − V_t`` (Schulman et al. 2016, eq. 16)."""
    result = [0.0] * len(paid.rewards)
    following = 0.0
    next_value = paid.final
    for t in range(len(paid.rewards) - 1, -1, -1):
        error = paid.rewards[t] + gamma * next_value - paid.values[t]
        following = error + decay * following
        next_value = paid.values[t]
        result[t] = following
    return result


def _whitened(rows: Mapping[int, list[float]]) -> dict[int, list[float]]:
    everything = [x for row in rows.values() for x in row]
    if not everything or max(everything) == min(everything):
        return {place: [0.0] * len(row) for place, row in rows.items()}
    mean = _mean(everything)
    scale = _spread(everything, 0) + 1e-8
    return {place: [(x - mean) / scale for x in row] for place, row in rows.items()}


def _by_turns(record: StepRecord, members: Sequence[Sequence[int]], paid: Mapping[int, Paid]) -> PerAnswer:
    """Returns from each turn on, standardized over group members that reached it."""
    assert record.facts.advantage is not None
    options = record.facts.advantage.options
    gamma = options.get("gamma", 1.0)
    result: list[list[float] | None] = [None] * len(record.answers)
    for group in members:
        returns: dict[int, list[float]] = {}
        lengths: dict[int, list[int]] = {}
        for place in group:
            ends = _turn_ends(record.answers[place])
            starts = [0, *(end + 1 for end in ends[:-1])]
            lengths[place] = [end + 1 - start for start, end in zip(starts, ends, strict=True)]
            sums = [math.fsum(paid[place].rewards[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
            for k in range(len(sums) - 2, -1, -1):
                sums[k] += gamma * sums[k + 1]
            returns[place] = sums
        for place in group:
            values: list[float] = []
            for k, length in enumerate(lengths[place]):
                others = [sums[k] for sums in returns.values() if k < len(sums)]
                scaled = 0.0
                if len(others) > 1:
                    mine = [p for p, sums in returns.items() if k < len(sums)].index(place)
                    scaled = _standardized(others, options)[mine]
                values += [scaled] * length
            result[place] = values
    return result


def following_kl_weight(penalty_weight: float, observed: float, target: float, num_answers: int, horizon: int) -> float:
    """Recompute the penalty weight for the next batch (Ziegler et al. 2019, section 2.2)."""
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return penalty_weight * (1.0 + error * num_answers / horizon)


def formulas_of_advantages() -> frozenset[str]:
    """List recomputable advantages."""
    return frozenset((*_OF_GROUPS, *_OF_BATCHES, *_OF_TOKENS, *_OF_PARTS, "turn_normalized"))
