"""A rollout as a row of ``rollouts.db``, and back."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.types import Example, Rollout

COLUMNS = (
    "step",
    "epoch",
    "prompt_index",
    "rollout_index",
    "example_id",
    "prompt",
    "completion",
    "answer",
    "parts",
    "reward",
    "advantage",
    "num_tokens",
    "finish",
    "mean_sampler_logprob",
    "extracted",
    "outcome",
    "token_ids",
)
# What a column holds where it is no text, and which may be empty.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "step", "epoch", "prompt_index", "rollout_index", "num_tokens"), int),
    **dict.fromkeys(("reward", "advantage", "mean_sampler_logprob"), float),
    "token_ids": bytes,
}
_OPTIONAL = {"answer", "advantage", "mean_sampler_logprob", "extracted", "token_ids"}


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One row of ``rollouts.db``.

    ``id`` counts the rows of its table from 1. ``parts`` are the unweighted rewards by name.
    ``mean_sampler_logprob`` is the mean over the completion's tokens (None for an empty one).
    ``extracted`` and ``outcome``: the answer that was graded and what the grader said (``""`` in a file of an
    earlier posttrain). ``token_ids`` are those of the prompt and, the last ``num_tokens`` of them, of the completion as
    sampled (None in such a file). ``evaluation`` names the evaluation that sampled it; None for a training rollout.
    """

    id: int
    step: int
    epoch: int
    prompt_index: int
    rollout_index: int
    example_id: str
    prompt: str
    completion: str
    answer: str | None
    parts: dict[str, float]
    reward: float
    advantage: float | None
    num_tokens: int
    finish: str
    mean_sampler_logprob: float | None
    extracted: str | None = None
    outcome: str = ""
    token_ids: tuple[int, ...] | None = None
    evaluation: str | None = None


def to_row(rollout: Rollout) -> tuple[Any, ...]:
    logprobs = rollout.completion.logprobs
    return (
        rollout.step,
        rollout.epoch,
        rollout.prompt_index,
        rollout.rollout_index,
        _storable(rollout.example.id),
        _storable(prompt_text(rollout.example)),
        _storable(rollout.text),
        None if rollout.example.answer is None else _storable(rollout.example.answer),
        json.dumps({name: float(value) for name, value in rollout.parts.items()}, allow_nan=False),
        float(rollout.reward),
        None if rollout.advantage is None else float(rollout.advantage),
        len(rollout.completion.ids),
        rollout.completion.finish,
        math.fsum(logprobs) / len(logprobs) if logprobs else None,
        None if rollout.extracted is None else _storable(rollout.extracted),
        rollout.outcome,
        _pack_ids((*rollout.prompt_ids, *rollout.completion.ids)),
    )


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def read_row(row: Mapping[str, Any], path: Path) -> RecordedRollout:
    """A row as it stands in the file ``path``, which may be a stranger's: SQLite keeps any type in any column.

    Raises:
        DataError: a value is of another type than this package writes.
    """
    for name, value in row.items():
        allowed = _TYPES.get(name, str)
        if not isinstance(value, allowed) and not (value is None and name in _OPTIONAL):
            raise DataError(path, f"damaged: {name} of row {row['id']!r} is {type(value).__name__}; move it away")
    packed = row["token_ids"]
    try:
        ids = None if packed is None else struct.unpack(f"<{len(packed) // 4}i", packed)
        parts = {str(name): float(value) for name, value in json.loads(row["parts"]).items()}
    except (struct.error, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(path, f"damaged: row {row['id']} ({type(error).__name__}: {error}); move it away") from None
    return RecordedRollout(**{**row, "parts": parts, "token_ids": ids})


def prompt_text(example: Example) -> str:
    """What was asked, for a reader: the message, or all of them with their roles."""
    messages = example.messages
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _storable(text: str) -> str:
    """``text`` with lone surrogates (which UTF-8 cannot hold) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
