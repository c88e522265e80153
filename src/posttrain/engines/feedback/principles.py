"""A file of principles: what an answer should be like, asked of the model itself or checked by a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain import registry
from posttrain.errors import RecipeError, RunFailure, UsageError
from posttrain.file_kinds import kind_of_file
from posttrain.graders.behaviour import Objection
from posttrain.recipes.document import Content, Document
from posttrain.recipes.sections import Section, Word
from posttrain.types import Example

Way = Literal["revise", "label"]
Said = Annotated[str, Field(pattern=r"\S")]


class PrincipleSection(Section):
    """One principle: a ``rule``, or what the model is asked.

    ``critique`` and ``revise`` are requests that follow an answer (Bai et al. 2022b, section 3.1); ``prefer`` asks
    which of two answers is the better one (section 4.1). ``rule``: a word of the kind ``principle`` instead of these.
    """

    name: Said
    rule: Word | None = None
    critique: Said | None = None
    revise: Said | None = None
    prefer: Said | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        asks = [key for key in ("critique", "revise", "prefer") if getattr(self, key) is not None]
        if self.rule is not None and asks:
            raise ValueError(
                f"a rule asks the model nothing; leave out {', '.join(asks)}, or make two principles of it"
            )
        if (self.critique is None) != (self.revise is None):
            raise ValueError("'critique' and 'revise' belong together; give both")
        if self.rule is None and not asks:
            raise ValueError("give a 'rule', or 'critique' and 'revise', or 'prefer'")
        return self


class PrinciplesContent(Content):
    """A file of principles."""

    label: ClassVar[str] = "a file of principles"
    extensible: ClassVar[bool] = False
    principles: Annotated[list[PrincipleSection], Field(min_length=1)]


@dataclass(frozen=True)
class Principle:
    """A principle that can be used. ``rule`` is None where the model is asked."""

    asked: PrincipleSection
    rule: Callable[[str, Example], Any] | None = None

    @property
    def name(self) -> str:
        return self.asked.name

    def objection(self, text: str, example: Example) -> Objection | None:
        """What the rule says against a text.

        Raises:
            RunFailure: the rule failed, or gave something else.
        """
        assert self.rule is not None, "a principle that the model is asked about has no rule"
        where = f"principle {self.name!r}"
        objection = registry.call(where, self.rule, text, example)
        if objection is not None and not isinstance(objection, Objection):
            raise RunFailure(f"{where}: a rule gives an Objection or None; got {registry.describe_result(objection)}")
        return objection


def read_principles(path: str, way: Way) -> list[Principle]:
    """The principles of a file that can be used in a way, in its order.

    Raises:
        UsageError: no file.
        RecipeError: with file, line and key; or a principle that does not say what that way needs.
        UnknownWord: a rule that there is not.
    """
    kind = kind_of_file(path)
    if kind != "file":
        what = "no such file" if kind == "nothing" else f"this is a {kind}"
        raise UsageError(f"--principles {path}: {what}; give a YAML file of principles (docs/data.md shows one)")
    document: Document[PrinciplesContent] = Document.load(PrinciplesContent, path)
    usable = []
    names: set[str] = set()
    for index, asked in enumerate(document.check().principles):
        key = f"principles.{index}"
        where = f"{document.line_of(key)}{key}"
        if asked.name in names:
            raise RecipeError(f"{where}.name: {asked.name!r} is the name of two principles; give each its own")
        names.add(asked.name)
        if asked.rule is not None:
            entry = registry.find("principle", asked.rule.name, f"{where}.rule")
            usable.append(Principle(asked, entry.bind(asked.rule.options, f"{where}.rule")))
        elif way == "revise" and asked.critique is None:
            raise RecipeError(f"{where}: to revise answers it needs 'critique' and 'revise', or a 'rule'")
        elif way == "label" and asked.prefer is None:
            raise RecipeError(f"{where}: to label answers it needs 'prefer', or a 'rule'")
        else:
            usable.append(Principle(asked))
    return usable
