"""A file of principles: requests for a critique and a revision of an answer, or rules that need no model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from posttrain.errors import RecipeError, UnknownComponent, UsageError
from posttrain.recipes.sections import Section
from posttrain.registry import Entry, explain_validation, suggest
from posttrain.types import Example

Text = Annotated[str, Field(pattern=r"\S")]
Rule = Callable[..., "Objection | None"]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Add a rule under its name: a function of an answer and its example, whose keyword-only parameters are options."""
    RULES[function.__name__] = function
    return function


class PrincipleSection(Section):
    """One principle: a ``rule`` with its options, or the requests ``critique`` and ``revise`` (Bai et al. 2022b)."""

    name: Text
    rule: dict[str, Any] | str | None = None
    critique: Text | None = None
    revise: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        asks = self.critique is not None or self.revise is not None
        if (self.rule is None) != asks or (asks and (self.critique is None or self.revise is None)):
            raise ValueError("give either a 'rule', or both 'critique' and 'revise'")
        return self


class PrinciplesFile(Section):
    """The content of a file of principles."""

    principles: Annotated[list[PrincipleSection], Field(min_length=1)]


@dataclass(frozen=True)
class Principle:
    """A principle that can be used. ``rule`` is None where the model is asked."""

    section: PrincipleSection
    rule: Callable[[str, Example], Objection | None] | None = None

    @property
    def name(self) -> str:
        return self.section.name


@dataclass(frozen=True, slots=True)
class Objection:
    """A rule's objection to an answer. ``revision``: the answer put right; None where the rule cannot do that."""

    critique: str
    revision: str | None


def read_principles(path: str) -> list[Principle]:
    """Return the principles of a YAML file, in its order.

    Raises:
        UsageError: the file cannot be read.
        RecipeError: the file has another content than ``PrinciplesFile``.
        UnknownComponent: a rule does not exist.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        sections = PrinciplesFile.model_validate(content).principles
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--principles {path}: {error}; give a YAML file (contrib/README.md shows one)") from None
    except ValidationError as error:
        keys = [*PrinciplesFile.model_fields, *PrincipleSection.model_fields]
        raise RecipeError(explain_validation(error, keys, path, "a file of principles")) from None
    names = [section.name for section in sections]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise RecipeError(f"{path}: {double!r} is the name of two principles; give each its own")
    return [Principle(section, _bound(section.rule, f"{path}: {section.name!r}.rule")) for section in sections]


def _bound(word: dict[str, Any] | str | None, where: str) -> Callable[[str, Example], Objection | None] | None:
    """Return a rule with its options."""
    if word is None:
        return None
    options = {"name": word} if isinstance(word, str) else dict(word)
    name = str(options.pop("name", ""))
    if name not in RULES:
        raise UnknownComponent(f"{where}: there is no rule {name!r}.{suggest(name, RULES)} Known: {', '.join(RULES)}")
    return Entry("rule", name, RULES[name], {}).bind(options, where)


Phrase = Annotated[str, Field(pattern=r"\S")]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
_WORD = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")
_EQUATION = re.compile(r"[0-9]\s*(?:[-+*/×·÷−]\s*[0-9][0-9.,]*\s*)+=\s*-?[0-9]")


@rule
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


@rule
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


@rule
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


@rule
def shows_working(text: str, example: Example) -> Objection | None:
    """A calculation stands in the answer: an equation of numbers, ``3 + 4 = 7``.

    Put right: the example's worked solution is said before it, where the task has one.
    """
    if _EQUATION.search(text):
        return None
    worked = example.solution is not None and _EQUATION.search(example.solution) is not None
    return Objection("It does not show how it finds its answer.", f"{example.solution} {text}" if worked else None)
