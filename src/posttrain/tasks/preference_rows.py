"""The parts of a preference row: prompts and answers, as text or as conversations."""

from __future__ import annotations

import math
from typing import Any

from posttrain.tasks.reading import Row
from posttrain.types import Message, Response

SCORE_KEYS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
)


class Dropped(Exception):
    """A row that is left out and counted; the text is the reason, the same for all such rows."""


def read_pair(row: Row, *, scores: tuple[str, str] | None) -> tuple[tuple[Message, ...], tuple[Response, ...]]:
    """The prompt, and the chosen and the rejected answer with their scores.

    Raises:
        Dropped: something is missing or blank, or the pair states no preference.
        DataError: something has the wrong type.
    """
    for key in ("chosen", "rejected"):
        _present(row, key)
    if isinstance(row.data["chosen"], str) != isinstance(row.data["rejected"], str):
        raise row.fail("'chosen' and 'rejected' must both be text, or both lists of messages")
    if isinstance(row.data["chosen"], str):
        prompt = read_prompt(row)
        chosen, rejected = row.text("chosen"), row.text("rejected")
    else:
        prompt, chosen, rejected = _read_conversations(row)
    if chosen == rejected:
        raise Dropped("'chosen' and 'rejected' are the same")
    better, worse = (1.0, 0.0) if scores is None else (_read_score(row, key) for key in scores)
    if better == worse:
        raise Dropped("chosen and rejected have the same score")
    if better < worse:
        raise Dropped("chosen has a lower score than rejected")
    return prompt, (Response(chosen, better), Response(rejected, worse))


def score_keys(row: Row) -> tuple[str, str] | None:
    """The keys under which a row has scores, if it has any."""
    return next((keys for keys in SCORE_KEYS if all(row.has(key) for key in keys)), None)


def read_prompt(row: Row) -> tuple[Message, ...]:
    """``prompt`` as messages: a text is the user's.

    Raises:
        Dropped: missing or blank.
        DataError: of the wrong type, or it ends with the assistant's turn.
    """
    _present(row, "prompt")
    if isinstance(row.data["prompt"], str):
        return (Message("user", row.text("prompt")),)
    messages = row.messages("prompt")
    if messages[-1].role == "assistant":
        raise row.fail("'prompt' ends with the assistant's message, which the answers would have to continue")
    return messages


def read_text(row: Row, key: str) -> str:
    """An answer: text, or a list of one message of the assistant.

    Raises:
        Dropped: missing or blank.
        DataError: of the wrong type or role.
    """
    _present(row, key)
    if isinstance(row.data[key], str):
        return row.text(key)
    messages = row.messages(key)
    if len(messages) != 1 or messages[0].role != "assistant":
        raise row.fail(f"{key!r} must be text or a list of one message of the assistant")
    return messages[0].content


def _read_conversations(row: Row) -> tuple[tuple[Message, ...], str, str]:
    """The turns that both conversations share, and the answers behind them."""
    chosen, rejected = row.messages("chosen"), row.messages("rejected")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if len(chosen) != shared + 1 or len(rejected) != shared + 1:
        raise Dropped("'chosen' and 'rejected' part before their last message")
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise row.fail("'chosen' and 'rejected' must end with the assistant's message")
    return _whole_prompt(row, chosen[:shared]), chosen[-1].content, rejected[-1].content


def _whole_prompt(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns of the conversations, or the longer ``prompt`` that ends with them."""
    if not row.has("prompt") and turns:
        prompt = turns
    else:
        prompt = read_prompt(row)
        if prompt[len(prompt) - len(turns) :] != turns:
            if not _holds(turns, prompt):
                raise Dropped("'prompt' is not what the conversations begin with")
            prompt = turns
    if prompt[-1].role == "assistant":
        raise row.fail(
            "two messages of the assistant follow one another; the last message before an answer must not be his"
        )
    return prompt


def _holds(turns: tuple[Message, ...], prompt: tuple[Message, ...]) -> bool:
    """Whether the prompt's messages stand one behind the other among the turns."""
    width = len(prompt)
    return any(turns[start : start + width] == prompt for start in range(len(turns) - width + 1))


def _read_score(row: Row, key: str) -> float:
    if not row.has(key):
        raise Dropped(f"{key!r} is missing, which the first row has")
    value = row.data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.fail(f"{key!r} must be a finite number; got {value!r}")
    return float(value)


def _present(row: Row, key: str) -> None:
    """Drop a row whose ``key`` is missing, null, blank or an empty list, or holds a blank message."""
    value = row.data.get(key)
    if value is None:
        raise Dropped(f"{key!r} is missing")
    if value == [] or _is_blank(value):
        raise Dropped(f"{key!r} is blank")
    if isinstance(value, list) and any(isinstance(item, dict) and _is_blank(item.get("content")) for item in value):
        raise Dropped(f"{key!r} has a blank message")


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()
