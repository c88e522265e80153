"""The parts of a preference row: prompts and answers, as text or as conversations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from posttrain.tasks.messages import add_system
from posttrain.tasks.reader import Dropped, answer_text
from posttrain.tasks.reading import Row
from posttrain.types import Message, Response

SCORE_KEYS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
VERDICTS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}  # as a table of texts has them
# Where the rating of a single answer may stand; it becomes a label by ``data.label_above``.
RATING_KEYS = ("rating", "score")
# Where a prompt may stand; the first of these that a row has.
PROMPT_KEYS = ("prompt", "conversations", "instruction")


def read_pair(
    row: Row, *, scores: tuple[str, str] | None, strip_thinking: bool = False
) -> tuple[tuple[Message, ...], tuple[Response, ...]]:
    """The prompt, and the chosen and the rejected answer with their scores.

    Raises:
        Dropped: something is missing or blank, or the pair states no preference.
        DataError: something has the wrong type.
    """
    for key in ("chosen", "rejected"):
        require(row, key)
    if row.is_text("chosen") != row.is_text("rejected"):
        raise row.fail("'chosen' and 'rejected' must both be text, or both lists of messages")
    if scores is None and (unread := next((key for keys in SCORE_KEYS for key in keys if row.has(key)), None)):
        raise row.fail(
            f"{unread!r} is not read: the first row has no two scores, and scores are for all rows. Take it out of the "
            "row, or name it in task.ignore_keys"
        )
    if row.is_text("chosen"):
        prompt = read_prompt(row)
        chosen, rejected = row.text("chosen"), row.text("rejected")
    else:
        prompt, chosen, rejected = _read_conversations(row)
    chosen, rejected = (answer_text(text, strip_thinking=strip_thinking) for text in (chosen, rejected))
    if chosen == rejected:
        raise Dropped("'chosen' and 'rejected' are the same")
    better, worse = (1.0, 0.0) if scores is None else (read_score(row, key) for key in scores)
    if better == worse:
        raise Dropped("chosen and rejected have the same score")
    if better < worse:
        raise Dropped("chosen has a lower score than rejected")
    return prompt, (Response(chosen, better), Response(rejected, worse))


def score_keys(row: Row) -> tuple[str, str] | None:
    """The keys under which a row has scores, if it has any."""
    return next((keys for keys in SCORE_KEYS if all(row.has(key) for key in keys)), None)


def read_prompt(row: Row) -> tuple[Message, ...]:
    """The prompt as messages.

    It is ``prompt`` (a text is the user's), ShareGPT's ``conversations``, or Alpaca's ``instruction`` with its
    ``input``, where there is one, behind a blank line.

    Raises:
        Dropped: missing or blank.
        DataError: of the wrong type, or it ends with the assistant's turn.
    """
    key = next((key for key in PROMPT_KEYS if row.has(key)), "prompt")
    require(row, key)
    return add_system(row, read_instruction(row) if key == "instruction" else row.asked(key))


def read_instruction(row: Row) -> tuple[Message, ...]:
    """Alpaca's ``instruction``, then its ``input`` (Dolly: ``context``) after a blank line; ``history`` comes before.

    Raises:
        DataError: of the wrong type.
    """
    earlier: list[Message] = []
    history = row.nested("history") if row.has("history") else []
    for pair in history if isinstance(history, list) else [history] if history else []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise row.fail("'history' must be a list of pairs: what was asked, and what was answered")
        earlier += [
            Message("user", row.checked(pair[0], "history")),
            Message("assistant", row.checked(pair[1], "history")),
        ]
    asked = row.text("instruction")
    further = [key for key in ("input", "context") if row.has(key) and not is_blank(row.data[key])]
    return (*earlier, Message("user", "\n\n".join([asked, *(row.text(key) for key in further)])))


def verdict_key(row: Row) -> str:
    """The key under which a row of judged answers has its label or, without one, its rating."""
    return next((key for key in ("label", *RATING_KEYS) if row.has(key)), "label")


def read_judged(
    row: Row, *, key: str = "label", strip_thinking: bool = False
) -> tuple[tuple[Message, ...], tuple[Response, ...]]:
    """A prompt with one answer and its label or rating: ``completion``, or the last of the ``messages``.

    Args:
        row: of a file of such rows.
        key: where the file has its labels or ratings.
        strip_thinking: leave the thinking out of the answer.

    Raises:
        Dropped: something is missing or blank.
        DataError: something has the wrong type, or the row has a label where others have ratings.
    """
    if row.has("completion") or not row.has("messages"):
        messages, text = read_prompt(row), _read_text(row, "completion")
    else:
        require(row, "messages")
        conversation = row.messages("messages")
        if conversation[-1].role != "assistant":
            raise Dropped("'messages' does not end with the assistant's message, which 'label' would be about")
        if len(conversation) == 1:
            raise Dropped("'messages' holds nothing but the assistant's message")
        messages, text = add_system(row, conversation[:-1]), answer_of(row, "messages", conversation[-1])
    if not row.has(key) and row.has(verdict_key(row)):
        raise row.fail(f"{verdict_key(row)!r} stands where the first row has {key!r}; give every row the same")
    score = read_verdict(row, key) if key == "label" else read_score(row, key)
    return messages, (Response(answer_text(text, strip_thinking=strip_thinking), score),)


def read_verdict(row: Row, key: str) -> float:
    """1 or 0 from true, false, 1 or 0.

    Raises:
        Dropped: missing.
        DataError: anything else.
    """
    if not row.has(key):
        raise Dropped(f"{key!r} is missing")
    value = row.data[key]
    value = VERDICTS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if not isinstance(value, int | float) or value not in (0, 1):  # True and False are 1 and 0
        rating = ". A rating stands under 'rating', and data.label_above makes it a label" if key == "label" else ""
        raise row.fail(f"{key!r} must be true, false, 1 or 0; got {value!r}{rating}")
    return float(value)


def read_score(row: Row, key: str) -> float:
    """A score of a file in which every row should have one.

    Raises:
        Dropped: missing.
        DataError: no finite number.
    """
    if not row.has(key):
        raise Dropped(f"{key!r} is missing, and every row needs a score")
    value = row.data[key]
    if isinstance(value, str):  # of a table of texts
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.fail(f"{key!r} must be a finite number; got {value!r}")
    return float(value)


def require(row: Row, key: str) -> None:
    """Drop a row whose ``key`` is missing, null, blank or an empty list, or holds a blank message."""
    value = row.data.get(key)
    if value is None:
        raise Dropped(f"{key!r} is missing")
    if value == [] or is_blank(value):
        raise Dropped(f"{key!r} is blank")
    messages = value if isinstance(value, list) else [value]
    if any(isinstance(item, Mapping) and _is_blank_message(item) for item in messages):
        raise Dropped(f"{key!r} has a blank message")


def _is_blank_message(item: Mapping[str, Any]) -> bool:
    has_use = item.get("tool_calls") or item.get("role") == "tool"  # a call, and a tool's result, may be without text
    return not has_use and is_blank(item.get("content", item.get("value")))


def is_blank(value: Any) -> bool:
    """Whether it is a text of nothing but white space."""
    return isinstance(value, str) and not value.strip()


def _read_text(row: Row, key: str) -> str:
    """An answer: text, or a list of one message of the assistant."""
    require(row, key)
    if row.is_text(key):
        return row.text(key)
    messages = row.messages(key)
    if len(messages) != 1 or messages[0].role != "assistant":
        raise row.fail(f"{key!r} must be text or a list of one message of the assistant")
    return answer_of(row, key, messages[0])


def answer_of(row: Row, key: str, message: Message) -> str:
    """The text of a message that is a given answer.

    Raises:
        DataError: it calls tools, or is not to be trained.
    """
    if message.calls or not message.is_trained:
        what = "calls tools" if message.calls else "has weight 0"
        raise row.fail(f"{key!r}: the answer {what}, and given answers are texts that are trained; leave the row out")
    return message.text


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
    prompt = _whole_prompt(row, chosen[:shared])
    return prompt, answer_of(row, "chosen", chosen[-1]), answer_of(row, "rejected", rejected[-1])


def _whole_prompt(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns of the conversations, or the longer prompt of the row that ends with them."""
    if not any(row.has(key) for key in PROMPT_KEYS) and turns:
        prompt = add_system(row, turns)
    else:
        prompt = read_prompt(row)
        if prompt[len(prompt) - len(turns) :] != turns:
            asked = prompt[1:] if row.has("system") and turns[:1] != prompt[:1] else prompt
            if not _holds(turns, asked):
                raise Dropped("'prompt' is not what the conversations begin with")
            prompt = add_system(row, turns)
    if prompt[-1].role == "assistant":
        raise row.fail(
            "two messages of the assistant follow one another; the last message before an answer must not be his"
        )
    return prompt


def _holds(turns: tuple[Message, ...], prompt: tuple[Message, ...]) -> bool:
    """Whether the prompt's messages stand one behind the other among the turns."""
    width = len(prompt)
    return any(turns[start : start + width] == prompt for start in range(len(turns) - width + 1))
