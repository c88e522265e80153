"""Where the answer stands in a graded text. One rule per template; each says None when there is none."""

from __future__ import annotations

from posttrain.graders.answers import last_boxed, last_number
from posttrain.graders.blank import is_blank


def tagged_answer(text: str, reasoning: str, answer: str) -> str | None:
    """The first complete answer after the reasoning closes.

    Looks behind the first ``</reasoning>``; without it there is no answer. Answer tags inside the
    reasoning, reversed tags and an answer that never closes do not count. Of nested answers it
    is the innermost. White space around is dropped, a blank answer is none, and text after the
    closing tag is no part of it.
    """
    _, closed, rest = text.partition(f"</{reasoning}>")
    return _first_complete(rest, answer) if closed else None


def _first_complete(text: str, tag: str) -> str | None:
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = 0
    while (end := text.find(closing, start)) >= 0:
        begin = text.rfind(opening, start, end)
        if begin >= 0:
            answer = text[begin + len(opening) : end].strip()
            return None if is_blank(answer) else answer
        start = end + len(closing)
    return None


def boxed_answer(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}``; a blank one is no answer."""
    answer = last_boxed(text)
    return None if answer is None or is_blank(answer) else answer


def chat_answer(text: str) -> str | None:
    """The first complete ``<answer>``, or else the last number, of what follows the thinking.

    Thinking ends at the last ``</think>``; a text that opens ``<think>`` and never closes it was cut
    off and has no answer.
    """
    _, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    return _first_complete(rest, "answer") or last_number(rest)
