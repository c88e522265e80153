"""TRL's records: completions tables (parquet), and lines from ``contrib/trl_records.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.data.reading import Row
from posttrain.errors import DataError
from posttrain.runs.diagnosis.others.rows import (
    ForeignAnswer,
    ForeignRecords,
    files_of,
    number_under,
    numbers_under,
    rows_of_records,
    text_under,
)

WHAT = "TRL's completions folder, a single file from it, or the output folder of contrib/trl_records.py"
OF_THE_TABLE = ("step", "prompt", "completion", "advantage")
OF_LINES = ("batch", "place", "prompt", "completion", "rewards")


def read_trl(path: Path) -> ForeignRecords:
    """Read completions from TRL's GRPO, or a trainer with the same log format, given a file or folder.

    Tables hold the latest batch at each logging step. A batch logged twice is read once.

    Raises:
        UsageError: no such file. DataError: a damaged line, or a missing column, by name.
    """
    files = files_of(path, (".jsonl", ".parquet"), WHAT)
    lines = [one for one in files if one.suffix == ".jsonl"]
    if lines:
        return _of_lines(lines)
    answers: list[ForeignAnswer] = []
    last: list[ForeignAnswer] = []
    batch = 0
    for file in files:
        rows = rows_of_records(file)
        parts = _reward_columns(rows, file)
        table = [_of_table(row, parts, batch) for row in rows]
        if [replace(one, step=0, batch=0) for one in table] == [replace(one, step=0, batch=0) for one in last]:
            continue
        answers += table
        last = table
        batch += 1
    missing = ["log-probabilities and token counts (recorded by contrib/trl_records.py)"]
    if any(one.advantage is None for one in answers):
        missing.insert(0, "advantage")
    return ForeignRecords(answers, missing)


def _reward_columns(rows: Sequence[Row], file: Path) -> list[str]:
    """Find reward columns: numeric columns that TRL itself does not write."""
    names = list(rows[0].data)
    for name in ("prompt", "completion"):
        if name not in names:
            raise DataError(file, f"{name}: missing column. Found: {', '.join(names[:12])}. Give {WHAT}")
    found = []
    for name in names:
        values = [row.data.get(name) for row in rows]
        kinds = {type(x) for x in values if x is not None}
        if name not in OF_THE_TABLE and kinds and kinds <= {int, float}:
            found.append(name)
    if not found:
        raise DataError(file, f"no reward column. Found: {', '.join(names[:12])}. Give {WHAT}")
    return found


def _of_table(row: Row, parts: Sequence[str], batch: int) -> ForeignAnswer:
    return ForeignAnswer(
        batch,
        int(number_under(row, "step") or 0),
        text_under(row, "prompt"),
        text_under(row, "completion"),
        {name: number_under(row, name) for name in parts},
        advantage=number_under(row, "advantage"),
    )


def _of_lines(files: Sequence[Path]) -> ForeignRecords:
    """Merge the lines from all processes, ordered by batch and place."""
    by_place: list[tuple[int, int, ForeignAnswer]] = []
    seen: set[tuple[int, int]] = set()
    for file in files:
        for row in rows_of_records(file):
            for name in OF_LINES:
                row.refuse_if(not row.has(name), f"{name}: missing key. Write records with contrib/trl_records.py")
            one = _of_line(row)
            place = int(number_under(row, "place") or 0)
            row.refuse_if((one.batch, place) in seen, f"duplicate place {place} in batch {one.batch}")
            seen.add((one.batch, place))
            by_place.append((one.batch, place, one))
    by_place.sort(key=lambda one: one[:2])
    answers = [one for _, _, one in by_place]
    missing = []
    if all(one.sampler is None or one.trainer is None for one in answers):
        missing.append("log-probabilities from sampler and trainer (TRL records both with vLLM)")
    return ForeignRecords(answers, missing)


def _of_line(row: Row) -> ForeignAnswer:
    rewards = row.data["rewards"]
    weights = row.data.get("weights")
    row.refuse_if(not isinstance(rewards, dict) or not rewards, "rewards: expected an object mapping names to numbers")
    row.refuse_if(not isinstance(weights, dict | None), "weights: expected an object mapping names to numbers")
    mask, ids = numbers_under(row, "mask"), numbers_under(row, "ids")
    trained: list[int] | None = None
    if mask is not None:
        trained = [t for t, x in enumerate(mask) if x]
        row.refuse_if(ids is not None and len(ids) != len(mask), "ids: the length must match mask")
    epoch = number_under(row, "epoch")
    size = _whole(row, "group_size")
    row.refuse_if(size is not None and size < 1, f"group_size: expected 1 or more answers per prompt, not {size}")
    return ForeignAnswer(
        int(number_under(row, "batch") or 0),
        int(number_under(row, "step") or 0),
        text_under(row, "prompt"),
        text_under(row, "completion"),
        {str(name): _inner(row, "rewards", rewards, name) for name in rewards},
        None if weights is None else {str(name): _inner(row, "weights", weights, name) or 0.0 for name in weights},
        number_under(row, "advantage"),
        sampler=_at(row, "sampler", trained),
        trainer=_at(row, "trainer", trained),
        trained=None if trained is None else len(trained),
        written=_num_written(row, ids),
        group_size=size,
        epoch=None if epoch is None else int(epoch),
    )


def _at(row: Row, name: str, places: Sequence[int] | None) -> list[float] | None:
    """Select values at trained positions."""
    values = numbers_under(row, name)
    if values is None or places is None:
        return None
    row.refuse_if(any(t >= len(values) for t in places), f"{name}: shorter than mask")
    return [values[t] for t in places]


def _num_written(row: Row, ids: Sequence[float] | None) -> int | None:
    """Count generated tokens up to the first end token; without one, all tokens count.

    None for completions with tool calls, whose ids include tool output.
    """
    ends = numbers_under(row, "ends")
    if ids is None or ends is None or row.data.get("tools"):
        return None
    for place, token in enumerate(ids):
        if token in ends:
            return place + 1
    return len(ids)


def _inner(row: Row, key: str, numbers: dict[str, object], name: str) -> float | None:
    inside = replace(row, data={f"{key}.{name}": numbers[name]})
    return number_under(inside, f"{key}.{name}")


def _whole(row: Row, name: str) -> int | None:
    value = number_under(row, name)
    if value is None:
        return None
    return int(value)
