"""Gold answers of rows: a text or a number, several of which each is right, or the JSON text of one of these."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress

from posttrain.data.reading import Row
from posttrain.option_types import shown_with_type

# Objects of question answering: an answer with its other spellings, or with its places in a passage.
_FURTHER_SPELLINGS = ("aliases",)
_OF_OBJECTS = ("value", "text", "answer")


def golds_of(row: Row, key: str) -> list[str]:
    """Return the gold answers under ``key``, each of which is right, without repetitions; at least one.

    A list of texts or numbers, or its JSON text, is several answers. The JSON text of two numbers or more stays one
    text: it is a tuple, a list or an interval. Where several are read out of a text, the text is right, too.

    Raises:
        DataError: missing, blank, not finite, true or false, or of another shape.
    """
    row.need(key)
    value = row.data[key]
    if isinstance(value, str):
        found = _of_text(row, key, row.checked(value, key))
    else:
        found = [_text(row, key, one) for one in _entries(row, key, value)]
    return list(dict.fromkeys(found))


def _of_text(row: Row, key: str, text: str) -> list[str]:
    """The gold answers of a text, which may be the JSON text of something."""
    if text.strip()[0] not in '["{':
        return [text]
    value: object = text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if isinstance(value, str):  # no JSON text, or that of a text
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
    """The answers of a value that is no text."""
    if isinstance(value, Mapping):
        found = _entries_of_object({k: v for k, v in value.items() if v is not None})
    elif isinstance(value, list | tuple):
        found = list(value)
    else:
        found = [value]
    if not found:
        raise row.fail(f"{key!r} must be a text, a number or a list of these; got {shown_with_type(value)}")
    return found


def _entries_of_object(value: Mapping[str, object]) -> list[object]:
    """The answers of an object: of its one key, or of a key that is called so, with its other spellings."""
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
