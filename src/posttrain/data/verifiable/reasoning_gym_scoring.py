"""Scoring of an answer to a reasoning-gym question, in a worker process (``graders.sandbox``).

An entry travels as JSON in which tuples, dates and keys that are no text are marked, and comes back as it was. It is
not made again in the worker: some data sets walk through sets, so that another process makes other questions.
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
    """The data set's own score of an answer; ``item`` is ``[[data set, settings, entry], answer]``, these as JSON.

    Raises:
        ValueError: the score is not finite.
        Exception: any error of the data set's scorer.
    """
    (name, settings, entry), answer = item
    value = float(_make(name, settings).score_answer(answer=answer, entry=load_plain(entry)))
    if not math.isfinite(value):
        raise ValueError(f"the score is {value}")
    return value


@lru_cache(maxsize=32)  # a split draws from several seeds
def _make(name: str, settings: str) -> Any:
    return create_dataset(name, **load_plain(settings))


def dump_plain(value: object) -> str:
    """Plain values as JSON; ``load_plain`` gives them back, with their types.

    Raises:
        TypeError: something else is among them.
    """
    return json.dumps(_mark(value))


def load_plain(text: str) -> Any:
    """The value that ``dump_plain`` was given."""
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
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return _mark(value.tolist())
    raise TypeError(f"an entry holds {type(value).__name__}, which JSON has not")


def _unmark(value: dict[str, object]) -> object:
    mark = next(iter(value), "")
    if mark in _MARKS:
        return _MARKS[mark](value[mark])
    return value
