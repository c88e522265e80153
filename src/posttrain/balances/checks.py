"""All balances of a record."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.balances.advantages import PerAnswer, expected_advantages
from posttrain.balances.findings import Imbalance, Reading, imbalance_of
from posttrain.balances.masks import read_masks
from posttrain.balances.of_answers import read_answers
from posttrain.balances.of_losses import read_loss
from posttrain.balances.of_routing import read_routing
from posttrain.balances.of_rows import read_row_balances
from posttrain.balances.of_updates import read_update
from posttrain.balances.record import StepRecord


def read_balances(record: StepRecord) -> Iterator[Reading]:
    """Yield every balance a record allows, closest to the root cause first."""
    advantages: PerAnswer | None = None
    yield from read_answers(record)
    if record.rows is not None:
        advantages = record.advantages
        if record.answers and advantages is None:
            advantages = expected_advantages(record)
        yield from read_row_balances(record, advantages)
        yield from read_masks(record)
        yield from read_loss(record, advantages)
        yield from read_routing(record)
    yield from read_update(record)


def check_balances(record: StepRecord) -> list[Imbalance]:
    """List violated balances, at most one per check. Empty if everything balances."""
    found: dict[str, Imbalance] = {}
    for reading in read_balances(record):
        if not reading.holds and reading.check not in found:
            found[reading.check] = imbalance_of(reading, record.step)
    return list(found.values())
