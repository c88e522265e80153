"""Rewards for answers, their length and the task's own score, by hand."""

from __future__ import annotations

import pytest

from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.rewards.length import overlong
from posttrain.rewards.numeric import correct, is_number
from posttrain.rewards.scored import task_score


def test_correct_compares_values_not_spelling() -> None:
    assert correct("$1,000", "1000") == 1.0
    assert correct("999", "1000") == 0.0
    assert correct("999", "1000", tolerance=1.0) == 1.0
    assert correct("998.9", "1000", tolerance=1.0) == 0.0
    assert correct("Yes", "yes") == 1.0


def test_without_an_extracted_or_gold_answer_nothing_is_correct() -> None:
    assert correct(None, "3") == 0.0
    assert correct("3", None) == 0.0
    assert correct("", "3") == 0.0


def test_is_number() -> None:
    assert is_number("12 apples") == 1.0
    assert is_number("twelve") == 0.0
    assert is_number("1e999999999") == 0.0
    assert is_number(None) == 0.0


def test_overlong_falls_linearly_over_the_cache() -> None:
    """DAPO, equation 13, with L_max = 100 and L_cache = 20."""
    values = [overlong(n, limit=100, cache=20) for n in (1, 80, 81, 90, 100, 101, 1000)]
    assert values == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]


def test_overlong_refuses_a_margin_wider_than_the_limit() -> None:
    with pytest.raises(UsageError, match=r"cache \(30\) is larger than limit \(20\)"):
        overlong(5, limit=20, cache=30)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("overlong", {"limit": 10}, "rewards.0.cache: reward 'overlong' needs this key"),
        ("overlong", {"limit": 10, "cashe": 2, "cache": 1}, "Did you mean 'cache'"),
        ("overlong", {"limit": 0, "cache": 1}, "greater than or equal to 1"),
        ("correct", {"tolerance": -1}, "greater than or equal to 0"),
        ("xml_count", {"trailing": -0.1}, "greater than or equal to 0"),
    ],
)
def test_options_are_checked_by_signature(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry.find("reward", name).bind(options, "rewards.0")


def test_task_score_asks_the_task() -> None:
    meta = {"score": lambda text: 0.25 * len(text)}
    assert task_score("ab", meta) == 0.5
    assert task_score(None, meta) == 0.0
    with pytest.raises(UsageError, match="brings no scorer of its own; use the reward 'correct'"):
        task_score("ab", {})


def test_the_rewards_of_the_house_are_registered() -> None:
    names = {"correct", "xml_format", "xml_soft", "xml_count", "is_number", "overlong", "task_score"}
    assert names <= set(registry.entries("reward"))
