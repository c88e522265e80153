"""Items with known outcomes, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.evaluation.items import Item, ItemSample

OUTCOMES = {"r": "right", "w": "wrong", "n": "no_answer", "u": "ungraded", "t": "timeout"}


def make_sample(outcome: str, text: str = "", **changes: Any) -> ItemSample:
    """``outcome`` by its letter; an answer in format of ten tokens unless something else is said."""
    word = OUTCOMES[outcome]
    correct = float(word == "right")
    settings: dict[str, Any] = {
        "text": text,
        "extracted": None if word == "no_answer" else {"right": "1"}.get(word, "2"),
        "outcome": word,
        "num_tokens": 10,
        "finish": "stop",
        "reward": correct,
        "in_format": word != "no_answer",
        "parts": {"correct": correct},
    }
    return ItemSample(**settings | changes)


def make_item(index: int, outcomes: str, **meta: Any) -> Item:
    """An item whose samples have these outcomes: ``rrwn``."""
    samples = tuple(make_sample(outcome) for outcome in outcomes)
    return Item(f"made/{index}", index, f"What is {index}?", "1", meta, samples)


def make_items(outcomes: Sequence[str]) -> list[Item]:
    """One item for each text of outcomes."""
    return [make_item(index, text) for index, text in enumerate(outcomes)]
