"""Balances for records from other trainers: groups, rewards, advantages, epochs, log-probabilities and tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from posttrain.balances.findings import EXPLANATIONS
from posttrain.balances.limits import LARGEST_KL
from posttrain.runs.diagnosis.findings import RunFinding, explanation, level
from posttrain.runs.diagnosis.others.formulas import FORMULAS, Groups, fitted_weights
from posttrain.runs.diagnosis.others.nemo_rl import read_nemo_rl
from posttrain.runs.diagnosis.others.rows import ForeignAnswer, ForeignRecords
from posttrain.runs.diagnosis.others.trl import read_trl

READERS = {"trl": read_trl, "nemo-rl": read_nemo_rl}
ADVANTAGE_LIMIT = 1e-3  # for fp32 advantages divided by a standard deviation near 0
OF_EQUAL = 0.05  # for advantages of equal rewards: a rounded mean divided by 1e-6
NOTABLE_KL = 1e-3  # nats per token; a bf16 sampler has 1e-5 to 1e-4
LARGEST_RATIO = 20.0
AnswersByBatch = Sequence[Sequence[Sequence[ForeignAnswer]]]  # nested by batch, then group


@dataclass(frozen=True, slots=True)
class ForeignDiagnosis:
    """Findings about records from a different trainer, faults first."""

    num_answers: int
    num_batches: int
    findings: tuple[RunFinding, ...]

    def of(self, kind: str) -> list[RunFinding]:
        """Select findings by kind."""
        return [one for one in self.findings if one.kind == kind]


def diagnose_records(path: Path, trainer: str) -> ForeignDiagnosis:
    """Check the records of ``trainer`` (a key of ``READERS``).

    Raises:
        UsageError: no such file. DataError: a damaged line or a missing column.
    """
    records = READERS[trainer](path)
    batches = list(records.batches())
    found = [*_rewards(records.answers), *_group_findings(batches), *_advantages(records, batches)]
    found += [*_prompts(batches), *_mismatch(records.answers), *_tokens(records.answers)]
    found += [_missing(name) for name in records.missing]
    kinds = ("fault", "audit", "level", "explanation")
    found.sort(key=lambda one: (kinds.index(one.kind), one.step or 0))
    return ForeignDiagnosis(len(records.answers), len(batches), tuple(found))


def _missing(name: str) -> RunFinding:
    return explanation("records", "all columns", f"missing: {name}", "checks that need them were skipped")


def _fault(check: str, step: int, expected: str, found: str, count: int = 1) -> RunFinding:
    explained = EXPLANATIONS[check]
    return RunFinding("fault", check, step, expected, found, explained.decided_by, explained.causes, count)


def _agrees(check: str, expected: str, found: str, count: int) -> RunFinding:
    return RunFinding("audit", check, None, expected, found, "they match", num_updates=count)


def _rewards(answers: Sequence[ForeignAnswer]) -> Iterator[RunFinding]:
    """Report completions without any reward."""
    silent = [one for one in answers if all(x is None for x in one.parts.values())]
    if silent:
        share = f"{len(silent):,} of {len(answers):,} answers without one (or NaN)"
        decide = "check the reward functions' return values for these answers"
        yield level("reward", "a reward for each answer", share, decide, silent[0].step)


def groups_of(batch: Sequence[ForeignAnswer]) -> list[list[ForeignAnswer]]:
    """Split a batch into groups: by the recorded group size, else by consecutive completions for one prompt."""
    size = batch[0].group_size
    if size is not None and size > 0:
        return [list(batch[start : start + size]) for start in range(0, len(batch), size)]
    return [list(members) for _, members in groupby(batch, key=lambda one: one.prompt)]


def _group_findings(batches: Sequence[Sequence[ForeignAnswer]]) -> Iterator[RunFinding]:
    """Check that groups are complete and share one prompt. Tables use the most common size."""
    if not any(one.prompt for batch in batches for one in batch):
        return
    sizes = Counter(len(group) for batch in batches for group in groups_of(batch))
    told = batches[0][0].group_size
    usual = told
    if usual is None:
        usual = sizes.most_common(1)[0][0]
    broken: list[int] = []
    number = 0
    for batch in batches:
        for group in groups_of(batch):
            number += 1
            is_whole = len(group) == usual or (told is None and len(group) % usual == 0)
            if not is_whole or len({one.prompt for one in group}) > 1:
                broken.append(group[0].step)
    if broken:
        what = f"groups of {usual} answers per prompt"
        yield _fault("groups", broken[0], what, f"{len(broken)} of {number} groups differ", len(broken))
    elif usual == 1:
        decide = "compare num_generations with the number and order of rows per prompt"
        yield level("groups", "consecutive answers to each prompt", "single answers", decide)
    else:
        yield _agrees("groups", f"groups of {usual} answers per prompt", f"{number} groups", len(batches))


def _advantages(records: ForeignRecords, batches: Sequence[Sequence[ForeignAnswer]]) -> Iterator[RunFinding]:
    """Check that all groups follow one known advantage formula."""
    if any(one.advantage is None for one in records.answers) and all(one.advantage is None for one in records.answers):
        return
    if any(one.uneven for one in records.answers):
        why = "advantages differ between tokens, and their token-level rewards are not recorded"
        yield explanation("advantage", "one advantage per answer", "several", why)
        return
    whole = [[group for group in groups_of(batch) if _is_usable(group)] for batch in batches]
    whole = [groups for groups in whole if groups]
    if not whole:
        return
    weighed: AnswersByBatch = whole
    weights: list[float] | None = None
    names = list(dict.fromkeys(name for one in records.answers for name in one.parts))
    if records.answers[0].weights is None and len(names) > 1:
        weights = [1.0] * len(names)
        weighed = _with_weights(whole, names, weights)
        if _best(weighed)[1]:
            for fitted in _fit(whole, names):
                other = _with_weights(whole, names, fitted)
                if not _best(other)[1]:
                    weighed, weights = other, fitted
                    break
    name, wrong, worst = _best(weighed)
    number = sum(len(groups) for groups in weighed)
    shown = ""
    if weights is not None:
        shown = " of " + " + ".join(f"{x:.3g} {part}" for x, part in zip(weights, names, strict=True))
    if not wrong:
        yield _agrees("advantage", f"rewards{shown} {name}", f"{number} groups", len(batches))
        return
    step, expected, found = worst
    what = f"{expected:.5g} for the worst answer (rewards{shown} {name})"
    yield _fault("advantage", step, what, f"{found:.5g}; {wrong} of {number} groups differ", wrong)


def _is_usable(group: Sequence[ForeignAnswer]) -> bool:
    known = all(one.advantage is not None and any(x is not None for x in one.parts.values()) for one in group)
    return len(group) > 1 and known


def _with_weights(whole: AnswersByBatch, names: Sequence[str], weights: Sequence[float]) -> AnswersByBatch:
    given = dict(zip(names, weights, strict=True))
    return [[[replace(one, weights=given) for one in group] for group in groups] for groups in whole]


def _fit(whole: AnswersByBatch, names: Sequence[str]) -> list[list[float]]:
    """Fit reward weights for tables that do not record them."""
    groups = [group for one in whole for group in one]
    columns: list[Groups] = [[[one.parts.get(name) or 0.0 for one in group] for group in groups] for name in names]
    return fitted_weights(columns, [[one.advantage or 0.0 for one in group] for group in groups])


def _best(whole: AnswersByBatch) -> tuple[str, int, tuple[int, float, float]]:
    """Find the best matching formula: name, number of differing groups, worst completion."""
    best: tuple[str, int, tuple[int, float, float]] | None = None
    for name, formula in FORMULAS.items():
        wrong = 0
        worst, at = 0.0, (0, 0.0, 0.0)
        for groups in whole:
            rewards = [[one.reward or 0.0 for one in group] for group in groups]
            for group, paid, expected in zip(groups, rewards, formula(rewards), strict=True):
                limit = ADVANTAGE_LIMIT
                if max(paid) - min(paid) <= 1e-6 * max(1.0, abs(paid[0])):
                    limit = OF_EQUAL
                differs = False
                for one, value in zip(group, expected, strict=True):
                    assert one.advantage is not None
                    gap = abs(one.advantage - value) / max(1.0, abs(value))
                    differs = differs or gap > limit
                    if gap > limit and gap > worst:
                        worst, at = gap, (one.step, value, one.advantage)
                wrong += differs
        if best is None or wrong < best[1]:
            best = name, wrong, at
    assert best is not None
    return best


def _prompts(batches: Sequence[Sequence[ForeignAnswer]]) -> Iterator[RunFinding]:
    """Check that prompts are unique within a batch, and within an epoch if recorded."""
    if not any(one.prompt for batch in batches for one in batch):
        return
    twice: list[int] = []
    of_pass: dict[int, set[str]] = {}
    repeated: list[int] = []
    before = set[str]()
    followed: list[int] = []
    for batch in batches:
        prompts = [group[0].prompt for group in groups_of(batch)]
        if len(set(prompts)) < len(prompts):
            twice.append(batch[0].step)
        epoch = batch[0].epoch
        if epoch is not None:
            seen = of_pass.setdefault(epoch, set())
            if seen & set(prompts):
                repeated.append(batch[0].step)
            seen.update(prompts)
        elif before & set(prompts):
            followed.append(batch[0].step)
        before = set(prompts)
    decide = "check the data for duplicates: if it has none, prompts are repeated by the sampler"
    for steps, expected in (
        (twice, "each prompt once per batch"),
        (repeated, "each prompt once per epoch"),
        (followed, "no overlap between consecutive batches"),
    ):
        if steps:
            yield level("prompts", expected, f"repeated prompts in {len(steps)} batches", decide, steps[0])


def _mismatch(answers: Sequence[ForeignAnswer]) -> Iterator[RunFinding]:
    """Compute the KL from sampler to trainer (k3) over all tokens in a step."""
    worst, at, total = 0.0, 0, 0
    for step, members in groupby(answers, key=lambda one: one.step):
        terms: list[float] = []
        for one in members:
            if one.sampler is None or one.trainer is None:
                continue
            for sampler, trainer in zip(one.sampler, one.trainer, strict=False):
                r = max(-LARGEST_RATIO, min(LARGEST_RATIO, sampler - trainer))
                terms.append(math.expm1(-r) + r)
        total += len(terms)
        if terms and math.fsum(terms) / len(terms) > worst:
            worst, at = math.fsum(terms) / len(terms), step
    if not total:
        return
    found = f"{worst:.2e} nats per token in the worst step"
    if worst > LARGEST_KL:
        yield _fault("sampler", at, f"a KL from sampler to trainer of at most {LARGEST_KL:g}", found)
    elif worst > NOTABLE_KL:
        decide = "typical values are 1e-5 to 1e-4 for a bf16 sampler and 1e-3 for 8 bits: compare both dtypes"
        yield level("sampler", f"a KL from sampler to trainer of at most {NOTABLE_KL:g}", found, decide, at)
    else:
        yield _agrees("sampler", f"a KL from sampler to trainer of at most {NOTABLE_KL:g}", found, total)


def _tokens(answers: Sequence[ForeignAnswer]) -> Iterator[RunFinding]:
    """Check that the loss covers all generated tokens, including the end token, but no padding."""
    wrong = [
        one for one in answers if one.trained is not None and one.written is not None and one.trained != one.written
    ]
    if wrong:
        first = wrong[0]
        found = f"{first.trained} of {first.written} in the first of {len(wrong):,} answers"
        if first.trained == 0 and all(one.trained == 0 for one in wrong):
            why = "answers without trained tokens were masked from the loss (mask_truncated_completions)"
            yield explanation("tokens", "trained answers", f"{len(wrong):,} untrained", why, first.step)
            return
        yield _fault("tokens", first.step, "all generated tokens trained", found, len(wrong))
    elif any(one.trained is not None for one in answers):
        total = sum(one.trained or 0 for one in answers)
        yield _agrees("tokens", "all generated tokens trained", f"{total:,}", len(answers))
