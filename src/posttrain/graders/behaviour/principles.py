"""Rules as principles: what is wrong with an answer, and the answer put right, without a model.

A rule is a function of the answer's text and its example, registered in the kind ``principle``; its keyword-only
parameters are its options. It returns None where the answer keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.types import Example

Phrase = Annotated[str, Field(pattern=r"\S")]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
_WORD = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")
_EQUATION = re.compile(r"[0-9]\s*(?:[-+*/×·÷−]\s*[0-9][0-9.,]*\s*)+=\s*-?[0-9]")


@dataclass(frozen=True, slots=True)
class Objection:
    """What a rule says against an answer. ``revision``: the answer put right; None where the rule cannot do that."""

    critique: str
    revision: str | None


@register("principle")
def at_most_words(text: str, example: Example, *, limit: Annotated[int, Field(ge=1)]) -> Objection | None:
    """No more than ``limit`` words (runs of anything but white space).

    Put right: the whole sentences at the beginning that fit, or the first ``limit`` words where none does.
    """
    words = list(_WORD.finditer(text))
    if len(words) <= limit:
        return None
    ends = [word.end() for word in words[:limit] if _SENTENCE_END.search(word[0])]
    kept = text[: ends[-1] if ends else words[limit - 1].end()]
    return Objection(f"It has {len(words)} words, and at most {limit} are asked for.", kept)


@register("principle")
def without_phrases(text: str, example: Example, *, phrases: Phrases, instead: str = "") -> Objection | None:
    """None of the ``phrases``, in any case, as words of their own.

    Put right: each is replaced by ``instead``; with nothing instead, so is the white space behind it.

    Args:
        phrases: words, or several in a row, with one blank between them for any white space.
        instead: what stands in their place.
    """
    ways = sorted((r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(ways)})(?!\w)", re.IGNORECASE)
    used = [match[0] for match in pattern.finditer(text)]
    if not used:
        return None
    named = ", ".join(repr(" ".join(phrase.split())) for phrase in dict.fromkeys(used))
    behind = "" if instead else r"\s*"
    replaced = re.compile(pattern.pattern + behind, re.IGNORECASE).sub(lambda _: instead, text)
    return Objection(f"It says {named}.", replaced)


@register("principle")
def closes_tags(text: str, example: Example, *, tags: Phrases) -> Objection | None:
    """Every one of the ``tags`` that is opened (``<note>``) is closed (``</note>``), the inner before the outer.

    Put right: what is open at the end is closed there. A closing tag that closes nothing is not put right.
    """
    names = "|".join(map(re.escape, tags))
    opened: list[str] = []
    for slash, name in re.findall(rf"<(/?)({names})>", text):
        if not slash:
            opened.append(name)
        elif opened and opened[-1] == name:
            opened.pop()
        else:
            return Objection(f"It closes <{name}> where that is not what is open.", None)
    if not opened:
        return None
    closing = "".join(f"</{name}>" for name in reversed(opened))
    return Objection(f"It does not close {', '.join(f'<{name}>' for name in opened)}.", text + closing)


@register("principle")
def shows_working(text: str, example: Example) -> Objection | None:
    """A calculation stands in the answer: an equation of numbers, ``3 + 4 = 7``.

    Put right: the example's worked solution is said before it, where the task has one.
    """
    if _EQUATION.search(text):
        return None
    worked = example.solution is not None and _EQUATION.search(example.solution) is not None
    return Objection("It does not say how it comes to its answer.", f"{example.solution} {text}" if worked else None)
