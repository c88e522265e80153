"""Read stored update records for later checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from posttrain.balances.record import Before, RowSums, SampledAnswer, StepRecord, UpdateFacts
from posttrain.errors import DataError
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.store.updates import WHOLE, RecordedUpdate

# values that differ from the first pass over a batch, stored in every pass
OF_AN_UPDATE = ("weight", "kl_sampler", "kl_reference")
FACTS = "balances"  # key in the ``about`` table


@cache
def _adapter() -> TypeAdapter[UpdateFacts]:
    return TypeAdapter(UpdateFacts)


def write_facts(facts: UpdateFacts) -> str:
    """Serialize run facts for balance checks."""
    return _adapter().dump_json(facts).decode()


def read_facts(store: RolloutStore) -> UpdateFacts | None:
    """Load facts written by ``write_facts``; None for runs from before update records.

    Raises:
        DataError: invalid facts.
    """
    text = store.about(FACTS)
    if text is None:
        return None
    try:
        return _adapter().validate_json(text)
    except ValidationError:
        raise DataError(store.path, "damaged: recipe facts for balance checks are invalid") from None


def read_records(store: RolloutStore) -> Iterator[StepRecord]:
    """Yield update records in order, without token-level values.

    Rows are joined with answers by position. Runs from before update records yield nothing.

    Raises:
        DataError: damaged file.
    """
    facts = read_facts(store)
    if facts is None:
        return
    before = Before()
    answers: list[SampledAnswer] = []
    earlier: dict[int, dict[str, float]] = {}
    for update in store.updates():
        if facts.sampling is not None and update.update == 0:
            keeps = facts.sampling.keeps_unscored
            answers = [recorded_answer(row, keeps) for row in store.training(update.step)]
            earlier = {}
        rows = _sums_of(update, earlier)
        record = StepRecord(update.step, update.update, facts, update.measured, rows, answers, before=before)
        if facts.sampling is None or "changed" in update.measured:
            record = replace(record, facts=_of_given_rows(facts), answers=())
        yield record
        before = record.following()


def _of_given_rows(facts: UpdateFacts) -> UpdateFacts:
    """Drop sampling facts, because the file has no matching rows."""
    return replace(facts, sampling=None)


def recorded_answer(row: RecordedRollout, keeps_unscored: bool = True) -> SampledAnswer:
    """Convert an answer from ``rollouts.db``; ``keeps_unscored``: see ``SamplingFacts``."""
    start = len(row.token_ids) - row.num_tokens
    return SampledAnswer(
        row.prompt_index,
        row.epoch,
        row.rollout_index,
        row.token_ids[:start],
        row.token_ids[start:],
        row.own,
        row.sampler_logprobs,
        row.parts,
        row.reward,
        row.advantage,
        row.finish,
        row.version,
        row.outcome,
        tuple(turn.reward for turn in row.turns),
        takes_part=not is_left_out(row.failures) and (row.is_scored or keeps_unscored),
        skipped=row.skipped,
        is_scored=row.is_scored,
        kept=row.kept,
        replaced=row.replaced,
    )


def is_left_out(failures: Sequence[str]) -> bool:
    """Check if a completion is excluded because too few others in its group finished."""
    return any(failure.startswith("left out: ") for failure in failures)


def _sums_of(update: RecordedUpdate, earlier: dict[int, dict[str, float]]) -> RowSums | None:
    """Convert update columns to tensors. Later passes reuse first-pass columns, matched by answer."""
    columns = {name: list(values) for name, values in update.rows.items()}
    if "answers" not in columns:
        return None
    count = len(columns["answers"])
    if "tokens" in columns:
        for row, place in enumerate(columns["answers"]):
            earlier[int(place)] = {name: float(values[row]) for name, values in columns.items()}

    def column(name: str, missing: float) -> Tensor:
        values = columns.get(name)
        if values is None and name in OF_AN_UPDATE:
            values = [missing] * count
        elif values is None:
            values = [earlier.get(int(place), {}).get(name, missing) for place in columns["answers"]]
        kind = torch.float64
        if name in WHOLE:
            kind = torch.int64
        return torch.tensor([int(x) if name in WHOLE else x for x in values], dtype=kind)

    return RowSums(
        answers=column("answers", -1),
        tokens=column("tokens", 0),
        places=column("places", 0),
        weight=column("weight", math.nan),
        value=column("value", 0.0),
        logprob=column("logprob", 0.0),
        advantage=column("advantage", math.nan),
        uneven=column("uneven", 0.0),
        old=column("old", math.nan),
        reference=column("reference", math.nan),
        kl_sampler=column("kl_sampler", math.nan),
        kl_reference=column("kl_reference", math.nan),
        computed=torch.tensor([bool(x) for x in columns.get("computed", [1] * count)]),
    )


def read_run_records(folder: Path) -> Iterator[StepRecord]:
    """Yield records from a run folder."""
    yield from read_records(RolloutStore(folder / "rollouts.db", read_only=True))
