"""Balances of sampled or given answers: rewards, groups, passes, endings, versions and draws."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from posttrain.balances.findings import Reading, compared, tally
from posttrain.balances.record import SampledAnswer, SamplingFacts, StepRecord, TokenRecord, first_round

REWARD_LIMIT = 1e-9  # float64 sums of a few terms
LARGEST_DUPLICATE = 40.0  # nats of chance that equal answers took


def read_answers(record: StepRecord) -> Iterator[Reading]:
    """Yield balances of a batch's answers at its first update; for data rows, at every update."""
    if record.given:
        yield _given(record)
    sampling = record.facts.sampling
    if sampling is None or not record.is_first or not record.answers:
        return
    if sampling.rewards is not None:
        yield _rewards(record.answers, sampling.rewards)
    if sampling.rubric is not None and any(answer.criteria for answer in record.answers):
        yield _rubric(record.answers, sampling.rubric)
    yield _verdicts(record.answers)
    yield _groups(record, sampling)
    yield _prompts(record, sampling)
    if not sampling.has_turns:
        yield _ends(record.answers, sampling)
    yield _versions(record, sampling)
    if sampling.draws:
        yield _duplicates(record, sampling)
    if sampling.replays:
        yield _kept_sets(record.answers, sampling)
    if sampling.penalty is not None and record.before.kl_weight is not None and "kl_weight" in record.measured:
        weight = record.before.kl_weight
        yield compared("kl_weight", record.measured["kl_weight"], weight, abs(weight), REWARD_LIMIT)


def _rewards(answers: Sequence[SampledAnswer], weights: Mapping[str, float]) -> Reading:
    """Reward = Σ weight × part."""
    worst, expected, found = 0.0, 0.0, 0.0
    for answer in answers:
        total, size = 0.0, 1.0
        for name, weight in weights.items():
            if name in answer.skipped:
                continue
            part = answer.parts.get(name, math.nan)
            total += weight * part
            size += abs(weight * part)
        gap = abs(answer.reward - total) / size
        if not gap <= worst:
            worst, expected, found = gap, total, answer.reward
        if math.isnan(gap):
            worst = math.inf
            break
    terms = " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)
    return Reading("reward", worst, REWARD_LIMIT, f"a reward of {expected:.9g} (= {terms})", f"{found:.9g}")


def criterion_weights(value: object) -> tuple[float, ...]:
    """Read the weights of a row's criteria (``rubric`` reward); empty if unreadable."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list):
        return ()
    weights: list[float] = []
    for one in value:
        weight: object = None
        if isinstance(one, Mapping):
            weight = one.get("weight")
            if weight is None:
                weight = one.get("points")
        if not isinstance(weight, int | float):
            weight = 1.0
        weights.append(float(weight))
    return tuple(weights)


def _rubric(answers: Sequence[SampledAnswer], part: str) -> Reading:
    """Part = Σ w y / Σ max(w, 0) over judged criteria, whose y is 0 or 1 (part ``rubric:k``)."""
    worst, expected, found = 0.0, 0.0, 0.0
    for answer in answers:
        judged = [(w, answer.parts.get(f"rubric:{k}")) for k, w in enumerate(answer.criteria, start=1)]
        met = [(w, y) for w, y in judged if y is not None]
        most = math.fsum(w for w, _ in met if w > 0)
        if most == 0 or part in answer.skipped:
            continue
        share = math.fsum(w * y for w, y in met) / most
        size = math.fsum(abs(w) for w, _ in met) / most
        gap = abs(answer.parts.get(part, math.nan) - share) / size
        if any(y not in (0.0, 1.0) for _, y in met):
            gap = math.inf
        if not gap <= worst:
            worst, expected, found = gap, share, answer.parts.get(part, math.nan)
        if math.isnan(gap):
            worst = math.inf
            break
    return Reading("rubric", worst, REWARD_LIMIT, f"a weighted share of {expected:.9g}", f"{found:.9g}")


def _verdicts(answers: Sequence[SampledAnswer]) -> Reading:
    """Correct answers have part ``correct`` = 1, wrong ones 0."""
    worth = {"right": 1.0, "wrong": 0.0, "no_answer": 0.0}
    wrong = 0
    for answer in answers:
        if answer.outcome in worth and "correct" in answer.parts:
            wrong += answer.parts["correct"] != worth[answer.outcome]
    return tally("correct", wrong, "the part 'correct' as the verdict says", f"{wrong} answers with another value")


def _groups(record: StepRecord, sampling: SamplingFacts) -> Reading:
    """Groups are complete and share a prompt."""
    broken = 0
    for group in record.groups:
        members = [record.answers[place] for place in group]
        first = members[0]
        is_whole = sorted(a.rollout_index for a in members) == list(range(sampling.group_size))
        is_one = all((a.prompt_index, a.epoch) == (first.prompt_index, first.epoch) for a in members)
        if not sampling.has_turns:
            is_one = is_one and all(tuple(a.prompt) == tuple(first.prompt) for a in members)
        broken += not (is_whole and is_one)
    what = f"groups of {sampling.group_size} answers to one prompt"
    return tally("groups", broken, what, f"{broken} of {len(record.groups)} that are not")


def _prompts(record: StepRecord, sampling: SamplingFacts) -> Reading:
    """No prompt repeats within a pass, and passes are counted correctly."""
    drawn = [group[0] for group in _by_group(first_round(record), sampling.group_size)]
    repeated = _repeated(record, [(a.visited, a.epoch) for a in drawn])
    if sampling.num_examples is not None:
        start = record.batch * sampling.num_prompts
        repeated += sum(a.epoch != (start + n) // sampling.num_examples for n, a in enumerate(drawn))
    what = "each prompt once in a pass"
    return tally("prompts", repeated, what, f"{repeated} of {len(drawn)} prompts that come again, or in another pass")


def _by_group(answers: Sequence[SampledAnswer], size: int) -> list[Sequence[SampledAnswer]]:
    return [answers[start : start + size] for start in range(0, len(answers), size)]


def _repeated(record: StepRecord, drawn: Sequence[tuple[int, int]]) -> int:
    """Count prompts already drawn in the same or a later pass."""
    repeated = sum(number - 1 for number in Counter(drawn).values())
    for index, epoch in set(drawn):
        last, step = record.before.seen.get(index, (-1, 0))
        repeated += last >= epoch and step < record.step
    return repeated


def _given(record: StepRecord) -> Reading:
    """No unit repeats within a pass, and chosen answers never score below rejected ones."""
    units = list(dict.fromkeys((row.unit, row.epoch) for row in record.given))
    repeated = _repeated(record, units)
    rows = len(record.given)
    if record.facts.level == "pair":
        scores = [row.score for row in record.given]
        repeated += sum(chosen < rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True))
        rows //= 2
    repeated += rows - len(units)
    if record.facts.num_given is not None:
        start = (record.step - 1) * len(units)
        repeated += sum(epoch != (start + n) // record.facts.num_given for n, (_, epoch) in enumerate(units))
    return tally("prompts", repeated, "each row once in a pass", f"{repeated} that come again, or in another pass")


def _ends(answers: Sequence[SampledAnswer], sampling: SamplingFacts) -> Reading:
    """Answers end with an end token, or because a limit was reached."""
    wrong = 0
    stops = set(sampling.stop_ids)
    for answer in answers:
        if answer.has_failed:
            continue
        is_wrong = False
        inner = answer.ids[:-1]
        if stops and not stops.isdisjoint(inner):
            is_wrong = True
        if answer.finish == "stop" and stops and not sampling.has_stop_texts:
            is_wrong = is_wrong or not answer.ids or answer.ids[-1] not in stops
        if answer.finish == "length":
            has_room = sampling.max_tokens is not None and len(answer.ids) < sampling.max_tokens
            if sampling.context is not None:
                has_room = has_room and len(answer.prompt) + len(answer.ids) < sampling.context
            is_wrong = is_wrong or has_room
        if sampling.max_tokens is not None:
            is_wrong = is_wrong or len(answer.ids) > sampling.max_tokens
        wrong += is_wrong
    what = f"answers that end with their end token, or at {sampling.max_tokens} tokens"
    return tally("finish", wrong, what, f"{wrong} of {len(answers)} that do not")


def _kept_sets(answers: Sequence[SampledAnswer], sampling: SamplingFacts) -> Reading:
    """Generated tokens belong to their kept set. Sets contain no duplicates and respect their limit."""
    wrong = 0
    for answer in answers:
        if answer.has_failed:
            continue
        if answer.kept is None or len(answer.kept.offsets) != len(answer.ids) + 1:
            wrong += 1
            continue
        own = answer.own
        for t, token in enumerate(answer.ids):
            members = answer.kept.at(t)
            if own is not None and not own[t]:
                wrong += len(members) > 0
                continue
            is_wrong = token not in members or len(set(members)) != len(members)
            if sampling.most_kept is not None:
                is_wrong = is_wrong or len(members) > sampling.most_kept
            wrong += is_wrong
    what = f"each token in its kept set, of at most {sampling.most_kept}"
    return tally("kept_sets", wrong, what, f"{wrong} that are not")


def _versions(record: StepRecord, sampling: SamplingFacts) -> Reading:
    """Answers use the scheduled weight version; resumed and repeated batches may use newer ones."""
    newest = record.step - 1
    oldest = record.facts.updates * max(0, record.batch - sampling.staleness)
    versions = [a.version for a in record.answers]
    wrong = sum(not oldest <= version <= newest for version in versions)
    what = f"answers of the weights after {newest} updates"
    if oldest != newest:
        what = f"answers of the weights after {oldest} to {newest} updates"
    return tally("version", wrong, what, f"{wrong} of others (from {min(versions)} to {max(versions)})")


def _duplicates(record: StepRecord, sampling: SamplingFacts) -> Reading:
    """Duplicate answers within a group, weighted by improbability."""
    chances = math.log(10.0 * len(record.answers) * sampling.group_size)
    nats = 0.0
    for group in record.groups:
        seen = set[tuple[int, ...]]()
        for place in group:
            answer = record.answers[place]
            if answer.logprobs is None:
                continue
            ids = tuple(answer.ids)
            if ids in seen:
                nats += max(0.0, -math.fsum(answer.logprobs) - chances)
            seen.add(ids)
    found = f"equal answers of a chance of e^-{nats:.0f}"
    return Reading("samples", nats, LARGEST_DUPLICATE, "answers that are drawn one by one", found)


def surprise_of(tokens: TokenRecord, rows: Tensor) -> dict[str, float]:
    """Sum of ``−log p − H`` over trained tokens in ``rows``, and its expected variance.

    For tokens drawn from a distribution with entropy H, each term has expectation 0 regardless of context. Squared
    samples are a poor variance estimate: when a model is confident, nearly all variance comes from tokens that are
    almost never drawn. With ``ε = 1 − p`` and R the entropy contributed by all other tokens, their second moment is
    at least ``R² / ε`` (Jensen). Uses the larger of both.
    """
    assert tokens.entropy is not None
    p = tokens.logprobs.exp()
    rest = (tokens.entropy + p * tokens.logprobs).clamp(min=0.0)
    of_others = rest.square() / (-torch.expm1(tokens.logprobs)).clamp(min=1e-9)
    estimate = p * tokens.logprobs.square() + of_others - tokens.entropy.square()
    surprise = -tokens.logprobs - tokens.entropy
    variance = torch.maximum(surprise.square(), estimate)
    chosen = tokens.mask & rows[:, None]
    return {"surprise": float(surprise[chosen].sum()), "surprise_squared": float(variance[chosen].sum())}
