"""Faults of a run, found by rechecking the balances of its recorded updates.

The files may be untrusted, so inconsistent records raise a single error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.balances.checks import check_balances
from posttrain.balances.findings import EXPLANATIONS, Explanation
from posttrain.balances.record import StepRecord, UpdateFacts
from posttrain.errors import DataError
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.diagnosis.metric_curves import FirstLoss, UpdateCurves
from posttrain.store.rollouts import RolloutStore
from posttrain.training.records.stored_records import read_facts, read_records

MOST_ANSWERS = 1_000_000  # per batch, beyond any real run
LONGEST_TEXT = 200  # characters of a name read from a file
UNKNOWN = Explanation(
    ("a balance from a different posttrain version",), "run doctor with the version that trained this run"
)
# Errors raised by computing with inconsistent numbers.
MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(slots=True)
class UpdatesRead:
    """Faults by balance, and recorded curves. ``has_facts``: the run keeps update records."""

    has_facts: bool = False
    faults: dict[str, RunFinding] = field(default_factory=dict)
    curves: UpdateCurves = field(default_factory=UpdateCurves)


def read_updates(path: Path) -> UpdatesRead:
    """Recheck the balances for every update in a ``rollouts.db``.

    Balances over individual tokens cannot be rechecked from a file. They count as faults if the run recorded a
    violation.

    Raises:
        DataError: the file is damaged.
    """
    read = UpdatesRead()
    store = RolloutStore(path, read_only=True)
    facts = read_facts(store)
    if facts is None:
        return read
    _check_facts(facts, path)
    read.has_facts = True
    measured: dict[str, list[tuple[int, float]]] = {}
    first_losses: list[FirstLoss] = []
    count = 0
    for record in _records(store, path):
        count += 1
        for name, value in record.measured.items():
            measured.setdefault(name, []).append((record.step, value))
        for one in [*_without_answers(record, facts), *_checked(record, path)]:
            _add(read.faults, one)
        if record.is_first and record.rows is not None and record.facts.advantage is not None:
            sizes = [abs(x) for x in record.rows.advantage.tolist() if math.isfinite(x)]
            if sizes and "loss" in record.measured:
                first_losses.append(FirstLoss(record.step, record.measured["loss"], math.fsum(sizes) / len(sizes)))
    for check, steps in store.count_updates()[1].items():
        if check not in read.faults:
            read.faults[check] = _found_by_run(check[:LONGEST_TEXT], steps)
    max_grad_norm: float | None = None
    if facts.optimizer is not None:
        max_grad_norm = facts.optimizer.max_grad_norm
    read.curves = UpdateCurves(facts.updates, count, max_grad_norm, first_losses, measured)
    return read


def _check_facts(facts: UpdateFacts, path: Path) -> None:
    """Refuse implausible sizes before allocating anything that large."""
    sizes = [facts.updates, facts.num_minibatches]
    if facts.sampling is not None:
        sizes += [facts.sampling.num_prompts, facts.sampling.group_size]
        sizes.append(facts.sampling.num_prompts * facts.sampling.group_size)
        if facts.sampling.num_examples is not None:
            sizes.append(min(facts.sampling.num_examples, 1))
    if facts.num_given is not None:
        sizes.append(min(facts.num_given, 1))
    if not all(1 <= size <= MOST_ANSWERS for size in sizes):
        raise DataError(path, "damaged: recorded batch sizes are out of range")


def _records(store: RolloutStore, path: Path) -> Iterator[StepRecord]:
    try:
        yield from read_records(store)
    except MISFITS as error:
        raise _misfit(path, "the update records", error) from None


def _checked(record: StepRecord, path: Path) -> list[RunFinding]:
    try:
        found = check_balances(record)
    except MISFITS as error:
        raise _misfit(path, f"the record of update {record.step}", error) from None
    return [
        RunFinding("fault", one.check, one.step, one.expected, one.found, one.decided_by, one.causes) for one in found
    ]


def _without_answers(record: StepRecord, facts: UpdateFacts) -> Iterator[RunFinding]:
    """Report updates on sampled completions whose completions are missing from the file."""
    is_sampled = facts.sampling is not None and "changed" not in record.measured
    if is_sampled and record.rows is not None and len(record.rows) and not record.answers:
        yield RunFinding(
            "fault",
            "answers",
            record.step,
            "the answers used for training",
            "none in rollouts.db",
            "count rows per step in rollouts.db",
            ("rows were deleted", "the run was resumed with a different rollouts.db"),
        )


def _misfit(path: Path, what: str, error: BaseException) -> DataError:
    return DataError(path, f"damaged: {what} and the answers are inconsistent ({type(error).__name__})")


def _add(faults: dict[str, RunFinding], found: RunFinding) -> None:
    """Keep the first finding per balance, and count repetitions."""
    first = faults.get(found.check)
    if first is None:
        faults[found.check] = found
    else:
        faults[found.check] = replace(first, num_updates=first.num_updates + 1)


def _found_by_run(check: str, steps: Sequence[int]) -> RunFinding:
    explained = EXPLANATIONS.get(check, UNKNOWN)
    return RunFinding(
        "fault",
        check,
        steps[0],
        "a satisfied balance",
        "a violation detected during training in token-level values, which are not stored (see log.txt)",
        explained.decided_by,
        explained.causes,
        len(steps),
    )
