"""The table of verifiable instructions: a pure function of a response for each identifier.

A function's keyword-only parameters are the instruction's arguments, checked by type when a task is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from posttrain.errors import RecipeError, UnknownWord
from posttrain.registry import Entry, explain_validation, suggest

Check = Callable[..., bool]
Relation = Literal["at least", "less than"]
Text = Annotated[str, Field(pattern=r"\S")]  # not blank
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]

INSTRUCTIONS: dict[str, Check] = {}


def instruction(identifier: str) -> Callable[[Check], Check]:
    """Enter the decorated function under its identifier (``keywords:existence``)."""

    def add(check: Check) -> Check:
        assert identifier not in INSTRUCTIONS, f"instruction {identifier!r} exists twice"
        INSTRUCTIONS[identifier] = check
        return check

    return add


def holds(count: int, relation: Relation, bound: int) -> bool:
    """``count >= bound`` for "at least", ``count < bound`` for "less than"."""
    return count >= bound if relation == "at least" else count < bound


def read_arguments(identifier: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of an instruction, checked by type; those that are None count as not given.

    (A table with a column for every argument has many that are None.)

    Raises:
        UnknownWord: no such instruction.
        RecipeError: an argument is missing, unknown or of the wrong type.
    """
    if identifier not in INSTRUCTIONS:
        raise UnknownWord(f"there is no instruction {identifier!r}.{suggest(identifier, INSTRUCTIONS)}")
    kwargs = {name: value for name, value in (arguments or {}).items() if value is not None}
    model = _arguments_model(identifier)
    try:
        checked = model(**kwargs)
    except ValidationError as error:
        label = f"instruction {identifier!r}"
        raise RecipeError(explain_validation(error, list(model.model_fields), label, label)) from None
    return {name: getattr(checked, name) for name in model.model_fields}


@cache
def _arguments_model(identifier: str) -> type[BaseModel]:
    return Entry("instruction", identifier, INSTRUCTIONS[identifier], {}).options_model()
