"""Thinking in given answers: what stands between ``<think>`` and ``</think>``, and the answer without it."""

from __future__ import annotations

import re

from posttrain.tasks.reader import Dropped

_TAG = re.compile(r"</?think>")


def remove_thinking(text: str) -> str | None:
    """The text without its thinking; None where a ``<think>`` never closes.

    Every block goes, with the blocks inside it. A ``</think>`` that closes nothing ends thinking that was opened
    in the prompt, as the chat templates of some models do: all before it goes as well. White space
    around what is left is dropped.
    """
    kept: list[str] = []
    depth = position = 0
    for tag in _TAG.finditer(text):
        if depth == 0:
            kept.append(text[position : tag.start()])
        if tag.group() == "<think>":
            depth += 1
        elif depth > 0:
            depth -= 1
        else:
            kept.clear()
        position = tag.end()
    if depth > 0:
        return None
    return "".join([*kept, text[position:]]).strip()


def answer_text(text: str, *, strip_thinking: bool) -> str:
    """A given answer as it is used: as it stands, or without its thinking.

    Raises:
        Dropped: a ``<think>`` that never closes, or nothing but thinking.
    """
    if not strip_thinking:
        return text
    answer = remove_thinking(text)
    if answer is None:
        raise Dropped("a <think> that never closes")
    if not answer:
        raise Dropped("an answer of nothing but thinking")
    return answer
