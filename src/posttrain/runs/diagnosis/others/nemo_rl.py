"""NeMo RL's records: ``train_data_step{N}.jsonl``, one completion per line, each value wrapped in a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.data.reading import Row
from posttrain.errors import DataError
from posttrain.runs.diagnosis.others.rows import (
    ForeignAnswer,
    ForeignRecords,
    files_of,
    number_in,
    number_under,
    numbers_under,
    rows_of_records,
    text_under,
)

WHAT = "a file such as train_data_step1.jsonl, or its folder"
NEEDED = ("rewards",)
SAME = 1e-5  # tolerance between advantages within one completion


def read_nemo_rl(path: Path) -> ForeignRecords:
    """Read completions from a NeMo RL GRPO run, given a file or folder. Step numbers come from file names.

    Log-probabilities and advantages are per token, including the prompt. ``token_loss_mask`` marks trained tokens.

    Raises:
        UsageError: no such file. DataError: a damaged line, or a missing column, by name.
    """
    answers: list[ForeignAnswer] = []
    missing: set[str] = set()
    for batch, file in enumerate(files_of(path, (".jsonl",), WHAT)):
        for row in rows_of_records(file):
            for name in NEEDED:
                if not row.has(name):
                    there = ", ".join(list(row.data)[:12])
                    raise DataError(file, f"{name}: missing key. Found: {there}. Give {WHAT}", row.line)
            one, lacking = _answer(row, batch, number_in(file))
            answers.append(one)
            missing.update(lacking)
    return ForeignRecords(answers, sorted(missing))


def _answer(row: Row, batch: int, step: int) -> tuple[ForeignAnswer, list[str]]:
    tokens = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")
    columns = {name: numbers_under(row, name) for name in tokens}
    lacking = [name for name, values in columns.items() if values is None]
    length = number_under(row, "input_lengths")
    ids, mask = columns["token_ids"], columns["token_loss_mask"]
    if ids is None:
        lacking.append("prompts (identified by token_ids)")
    trained: list[int] | None = None
    if mask is not None:
        trained = [t for t, x in enumerate(mask) if x]
        for name, values in columns.items():
            wrong = values is not None and name != "token_loss_mask" and len(values) not in (len(mask), 1)
            row.refuse_if(wrong, f"{name}: the length must match token_loss_mask, which has {len(mask):,}")
    advantages = _at(columns["advantages"], trained)
    uneven = False
    if advantages:
        uneven = max(advantages) - min(advantages) > SAME * max(1.0, abs(advantages[0]))
    prompt, answer = _texts(row, ids, trained, length)
    dropped = number_under(row, "sample_loss_mask") == 0
    found = ForeignAnswer(
        batch,
        step,
        prompt,
        answer,
        {"reward": number_under(row, _reward_key(row))},
        advantage=None if not advantages or dropped else advantages[0],
        uneven=uneven,
        sampler=_at(columns["generation_logprobs"], trained),
        trainer=_at(columns["prev_logprobs"], trained),
        trained=None if trained is None or length is None else sum(t < length for t in trained),
        written=None if trained is None or length is None else len(trained),
    )
    return found, lacking


def _reward_key(row: Row) -> str:
    """Choose the rewards used for training: dynamic sampling logs its kept rewards in a separate column."""
    if row.has("filtered_rewards"):
        return "filtered_rewards"
    return "rewards"


def _at(values: Sequence[float] | None, places: Sequence[int] | None) -> list[float] | None:
    if values is None or places is None:
        return None
    if len(values) == 1:
        return [values[0]] * len(places)
    return [values[t] for t in places]


def _texts(
    row: Row, ids: Sequence[float] | None, trained: Sequence[int] | None, length: float | None
) -> tuple[str, str]:
    """Split token ids into prompt and completion at the first trained token; fall back to the full content."""
    if ids is not None and trained:
        end = len(ids)
        if length is not None:
            end = int(length)
        return json.dumps([int(x) for x in ids[: trained[0]]]), json.dumps([int(x) for x in ids[trained[0] : end]])
    if row.has("content"):
        return "", text_under(row, "content")
    return "", ""
