"""Gold answers: text, numbers, or lists of accepted alternatives, optionally encoded as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress

from posttrain.data.reading import Row
from posttrain.option_types import shown_with_type

# QA datasets store answers as objects, with aliases or passage positions.
_FURTHER_SPELLINGS = ("aliases",)
_OF_OBJECTS = ("value", "text", "answer")


def golds_of(row: Row, key: str) -> list[str]:
    """Read all accepted gold answers from ``key``, without duplicates. Returns at least one.

    Lists, including JSON-encoded ones, contain alternatives. JSON lists of multiple numbers stay unparsed, since they
    denote a tuple, list or interval. If alternatives were parsed from text, the original string is accepted too.

    Raises:
        DataError: missing, blank, non-finite, boolean, or unsupported type.
    """
    row.need(key)
    value = row.data[key]
    if isinstance(value, str):
        found = _of_text(row, key, row.checked(value, key))
    else:
        found = [_text(row, key, one) for one in _entries(row, key, value)]
    return list(dict.fromkeys(found))


def _of_text(row: Row, key: str, text: str) -> list[str]:
    """Read gold answers from a string, decoding JSON if possible."""
    if text.strip()[0] not in '["{':
        return [text]
    value: object = text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if isinstance(value, str):  # not JSON, or a JSON string
        if value.strip():
            return [value]
        return [text]
    entries = value
    if isinstance(value, Mapping):
        entries = _entries_of_object(value)
    if not isinstance(entries, list) or not entries or not all(_is_plain(one) for one in entries):
        return [text]
    if len(entries) > 1 and not any(isinstance(one, str) for one in entries):
        return [text]
    found = [_text(row, key, one) for one in entries]
    if len(found) == 1 and isinstance(value, list):
        return found
    return [*found, text]


def _entries(row: Row, key: str, value: object) -> list[object]:
    """Read gold answers from non-text values."""
    if isinstance(value, Mapping):
        found = _entries_of_object({k: v for k, v in value.items() if v is not None})
    elif isinstance(value, list | tuple):
        found = list(value)
    else:
        found = [value]
    if not found:
        raise row.fail(f"{key!r} must be text, a number, or a list of these; got {shown_with_type(value)}")
    return found


def _entries_of_object(value: Mapping[str, object]) -> list[object]:
    """Read gold answers from an object with a single value, or with known keys and aliases."""
    answer = None
    if len(value) == 1:
        (answer,) = value.values()
    elif any(key in value for key in (*_FURTHER_SPELLINGS, "answer_start")):
        answer = next((value[key] for key in _OF_OBJECTS if key in value), None)
    if answer is None:
        return []
    found = [answer]
    if isinstance(answer, list):
        found = list(answer)
    for key in _FURTHER_SPELLINGS:
        spellings = value.get(key)
        if isinstance(spellings, list):
            found += spellings
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _text(row: Row, key: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise row.fail(f"{key!r} must be a finite number or text; got {value!r}")
        return repr(value)
    return row.checked(value, key)
