"""Parsing of studio form values. Browsers post null for emptied fields and fields never shown."""

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
    """Chat form values. ``sae``, ``judge`` and models may be ``NOBODY``."""

    question: str
    models: tuple[str, str]
    judge: str
    controls: Controls
    system: str
    sae: str
    features: str
    side: str


def read_chat(values: Sequence[object]) -> ChatForm:
    """Parse the fields in page order.

    Raises:
        UsageError: a number out of range. The message includes the field name.
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
    """Convert a field to text; null becomes empty."""
    if value is None:
        return ""
    return str(value)


def read_number(value: object, name: str, default: float, least: float, most: float) -> float:
    """Parse a number field; empty selects the default.

    Raises:
        UsageError: not a number between ``least`` and ``most``.
    """
    if is_empty(value):
        return default
    number = _number_of(value)
    if not least <= number <= most:
        raise UsageError(f"{name}: {shown(str(value))} is not a number from {least:g} to {most:g}")
    return number


def read_whole(value: object, name: str, default: int | None) -> int | None:
    """Parse an integer field; empty selects the default.

    Raises:
        UsageError: not an integer between 0 and ``LARGEST_WHOLE``.
    """
    if is_empty(value):
        return default
    number = _number_of(value)
    if not 0 <= number <= LARGEST_WHOLE or not number.is_integer():
        raise UsageError(f"{name}: {shown(str(value))} is not a whole number, 0 or more")
    return int(number)


def is_empty(value: object) -> bool:
    """Check if a field is blank."""
    return read_text(value).strip() == ""


def _number_of(value: object) -> float:
    """Convert a number or numeric text to float; NaN otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
