"""Values that keys of sections and options of components may hold, whatever their types let through."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from posttrain.option_types import LARGEST_COUNT, Few, Options, Seed, Tokens, Unread
from posttrain.strict_yaml import OldTruth


class Some(Options):
    count: int = 1
    share: float = 0.5
    flag: bool = False
    either: bool | float = 0.0
    name: str = ""
    seed: Seed = 0
    few: Few = 1
    tokens: Tokens = 1
    numbers: list[int] = Field(default_factory=list)
    pair: tuple[float, float] | None = None
    limited: Annotated[int, Field(ge=0)] | None = None
    choice: Literal[2, 3] = 2
    free: dict[str, Any] = Field(default_factory=dict)
    recipe: Annotated[dict[str, Any], Unread()] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", True, "number, and true"),
        ("numbers", [1, True], "Input should be"),
        ("limited", True, "Input should be"),
        ("count", LARGEST_COUNT + 1, "at most 1,000,000,000"),
        ("count", 1e30, "at most 1,000,000,000"),
        ("few", 65_537, "equal to 65536"),
        ("seed", -1, "equal to 0"),
        ("share", float("nan"), "finite number"),
        ("name", "\ud800", "a surrogate pair"),
        ("free", {"a": [OldTruth("no")]}, "true or false"),
    ],
)
def test_what_is_refused_with_its_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Some.model_validate({key: value})
    assert caught.value.errors()[0]["loc"][0] == key
    assert message in caught.value.errors()[0]["msg"]


def test_what_is_taken() -> None:
    taken = Some.model_validate(
        {"count": "8", "share": 1, "flag": OldTruth("yes"), "either": True, "name": OldTruth("no"), "seed": 10**30,
         "few": 65_536, "pair": [0, 1], "free": {"a": [1, None, "x", True]}, "recipe": {"a": OldTruth("no"), "b": True}}
    )  # fmt: skip
    assert (taken.count, taken.share, taken.flag, taken.either, taken.name) == (8, 1.0, True, True, "no")
    assert (taken.seed, taken.few, taken.pair) == (10**30, 65_536, (0.0, 1.0))
    assert taken.free == {"a": [1, None, "x", True]}
