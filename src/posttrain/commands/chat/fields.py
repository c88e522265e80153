"""Values of the studio's fields as a browser posts them: null for a field that was emptied or never shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.chat.conversation import Controls
from posttrain.commands.options import shown
from posttrain.errors import UsageError

NOBODY = "(none)"
LARGEST_WHOLE = 2**53  # a browser's numbers are exact up to here


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The values of the chat's fields. ``sae``, ``judge`` and a model may be ``NOBODY``."""

    question: str
    models: tuple[str, str]
    judge: str
    controls: Controls
    system: str
    sae: str
    features: str
    side: str


def read_chat(values: Sequence[object]) -> ChatForm:
    """Read the fields in the order in which the page sends them.

    Raises:
        UsageError: a number that is out of range, with the name of its field.
    """
    question, left, right, judge, system, temperature, top_p, longest, seed, sae, features, side = values
    defaults = Controls()
    controls = Controls(
        temperature=read_number(temperature, "temperature", defaults.temperature, 0.0, 100.0),
        top_p=read_number(top_p, "top p", defaults.top_p, 0.001, 1.0),
        max_tokens=read_whole(longest, "longest reply", 0) or None,
        seed=read_whole(seed, "seed", defaults.seed) or 0,
    )
    return ChatForm(
        question=read_text(question),
        models=(read_text(left) or NOBODY, read_text(right) or NOBODY),
        judge=read_text(judge) or NOBODY,
        controls=controls,
        system=read_text(system),
        sae=read_text(sae) or NOBODY,
        features=read_text(features),
        side=read_text(side) or "left",
    )


def read_text(value: object) -> str:
    """Return the text of a field; empty for null."""
    if value is None:
        return ""
    return str(value)


def read_number(value: object, name: str, default: float, least: float, most: float) -> float:
    """Return the number of a field; the default for an empty one.

    Raises:
        UsageError: no number from ``least`` to ``most``.
    """
    if is_empty(value):
        return default
    number = _number_of(value)
    if not least <= number <= most:
        raise UsageError(f"{name}: {shown(str(value))} is not a number from {least:g} to {most:g}")
    return number


def read_whole(value: object, name: str, default: int | None) -> int | None:
    """Return the whole number of a field; the default for an empty one.

    Raises:
        UsageError: no whole number from 0 to ``LARGEST_WHOLE``.
    """
    if is_empty(value):
        return default
    number = _number_of(value)
    if not 0 <= number <= LARGEST_WHOLE or not number.is_integer():
        raise UsageError(f"{name}: {shown(str(value))} is not a whole number of at least 0")
    return int(number)


def is_empty(value: object) -> bool:
    """Return whether a field holds nothing."""
    return read_text(value).strip() == ""


def _number_of(value: object) -> float:
    """Return a number, or one that is typed as text; NaN for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
