"""Rewards for exact answers. Verifiable rewards as in DeepSeek-R1 (Guo et al. 2025, section 2.2)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.rewards.answers import parse_quantity, same_answer


@register("reward")
def correct(extracted: str | None, answer: str | None, *, tolerance: Annotated[float, Field(ge=0)] = 0.0) -> float:
    """1 if the extracted answer equals the gold answer, else 0.

    ``r = 1[|x − y| ≤ tolerance]`` where x and y are exact fractions read from the two texts
    (thousands separators, currency signs, %, units in words, ``a/b``, mixed numbers; see
    ``rewards.answers``; nothing is evaluated). A gold answer that is no number is compared as
    text. No extracted answer is wrong, and so is every answer to an example without gold.

    Args:
        tolerance: the largest absolute difference that still counts as equal.

    Source: the accuracy reward of DeepSeek-R1 (Guo et al. 2025), section 2.2.2.
    """
    if extracted is None or answer is None:
        return 0.0
    return 1.0 if same_answer(answer, extracted, tolerance) else 0.0


@register("reward")
def is_number(extracted: str | None) -> float:
    """1 if there is an extracted answer and it states one number (a unit is allowed), else 0.

    ``r = 1[extracted is a quantity]``. It teaches the answer's kind before any answer is right.

    Source: the integer reward of the widely shared GSM8K GRPO notebooks, without its weight of 0.5.
    """
    return 1.0 if extracted is not None and parse_quantity(extracted) is not None else 0.0
