"""Where the answer stands in a graded text. One rule per template; each says None when there is none."""

from __future__ import annotations

import re

from posttrain.graders.answers import last_boxed, last_number
from posttrain.graders.grading import is_blank

_CLOSING = re.compile(r"</(think|reasoning)>")
_OPENING = re.compile(r"\s*<(think|reasoning)>")
# How worked solutions end where nothing is tagged or boxed: GSM8K's mark, and the sentence of most instruction data.
_LAST_LINE = re.compile(
    r"(?:\A|\n)####[ \t]*(\S[^\n]*)\s*\Z|(?i:\bthe (?:final )?answer is):?[ \t]*(\S[^\n]*?)\.?\s*\Z"
)


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


def written_answer(text: str) -> str | None:
    """The first complete ``<answer>``, else the last box, else the last number, of what follows the thinking."""
    _, _, rest = text.rpartition("</think>")
    return _first_complete(rest, "answer") or boxed_answer(rest) or last_number(rest)


def split_thinking(text: str) -> tuple[str, str] | None:
    """(thinking, what follows it) of a response that is thought before it is said, in either pair of tags.

    The opening tag may be missing, for in some formats it ends the prompt. None where no thinking closes.
    """
    closing = _CLOSING.search(text)
    if closing is None:
        return None
    opening = _OPENING.match(text)
    start = opening.end() if opening is not None and opening[1] == closing[1] else 0
    return text[start : closing.start()], text[closing.end() :]


def split_response(text: str) -> tuple[str, str | None]:
    """(reasoning, answer) of a whole response, however it marks the two; the answer is None where it marks none.

    Behind the thinking it is the first complete ``<answer>``, else the last box, else everything. Without thinking
    it is the ``<answer>`` that follows the reasoning, the last box (which stays in the reasoning), or what the last
    line gives as the answer (``#### 42``, ``The answer is 42.``). Thinking that never closes was cut off: no answer.
    """
    parts = split_thinking(text)
    if parts is not None:
        thinking, said = parts
        answer = _first_complete(said, "answer") or boxed_answer(said)
        return thinking.strip(), answer or (None if is_blank(said) else said.strip())
    if _OPENING.match(text):
        return text.strip(), None
    tagged = _first_complete(text, "answer")
    if tagged is not None:
        return text.partition("<answer>")[0].strip(), tagged
    boxed = boxed_answer(text)
    if boxed is not None:
        return text.strip(), boxed
    last = _LAST_LINE.search(text)
    if last is None:
        return text.strip(), None
    return text[: last.start()].strip(), (last[1] or last[2]).strip()
