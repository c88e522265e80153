"""Worker process function that scores answers to reasoning-gym questions (``graders.sandbox``).

Entries are sent as JSON with tags for tuples, dates and non-string keys, and restored exactly. The worker cannot
regenerate them: some datasets iterate over sets, so each process would generate different questions.
"""

from __future__ import annotations

import json
import math
from datetime import date, datetime
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset

TARGET = "posttrain.data.verifiable.reasoning_gym_scoring:score_entry"
_MARKS: dict[str, Any] = {
    "#dict": dict, "#tuple": tuple, "#set": set, "#frozenset": frozenset,
    "#date": date.fromisoformat, "#datetime": datetime.fromisoformat,
}  # fmt: skip


def score_entry(item: list[Any]) -> float:
    """Score an answer with its dataset's scorer. ``item`` is ``[[dataset, settings, entry], answer]`` as JSON.

    Raises:
        ValueError: non-finite score.
        Exception: any error in the scorer.
    """
    (name, settings, entry), answer = item
    value = float(_make(name, settings).score_answer(answer=answer, entry=load_plain(entry)))
    if not math.isfinite(value):
        raise ValueError(f"the score is {value}")
    return value


@lru_cache(maxsize=32)  # splits draw from multiple seeds
def _make(name: str, settings: str) -> Any:
    return create_dataset(name, **load_plain(settings))


def dump_plain(value: object) -> str:
    """Serialize plain values as JSON, preserving types for ``load_plain``.

    Raises:
        TypeError: unsupported type.
    """
    return json.dumps(_mark(value))


def load_plain(text: str) -> Any:
    """Restore a value from ``dump_plain``."""
    return json.loads(text, object_hook=_unmark)


def _mark(value: object) -> object:
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("#") for key in value):
            return {str(key): _mark(one) for key, one in value.items()}
        return {"#dict": [[_mark(key), _mark(one)] for key, one in value.items()]}
    if isinstance(value, list):
        return [_mark(one) for one in value]
    if isinstance(value, tuple | set | frozenset):
        return {f"#{type(value).__name__}": [_mark(one) for one in value]}
    if isinstance(value, date):  # and datetime
        return {f"#{type(value).__name__}": value.isoformat()}
    if isinstance(value, str | int | float) or value is None:
        return value
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return _mark(value.tolist())
    raise TypeError(f"the entry holds {type(value).__name__}, which JSON cannot represent")


def _unmark(value: dict[str, object]) -> object:
    mark = next(iter(value), "")
    if mark in _MARKS:
        return _MARKS[mark](value[mark])
    return value
