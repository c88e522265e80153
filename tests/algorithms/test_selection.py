"""Selections by hand: ties, nothing to select, units in order, and how the words relate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain import registry
from posttrain.algorithms.selection import (
    Units,
    above,
    balanced,
    best_and_worst,
    best_of,
    choose_units,
    every,
    right_and_wrong,
)
from posttrain.errors import RecipeError, RunFailure, UsageError
from refusing import refuses


def rewards(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def rows(*places: tuple[int, int]) -> Units:
    """Units of one row each."""
    return [(place,) for place in places]


THREE = rewards([0.2, 1.0, 0.2, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.1, 1.2, 0.1])


def test_every() -> None:
    assert every(rewards([0.0, 1.0], [2.0, 0.0])) == rows((0, 0), (0, 1), (1, 0), (1, 1))


def test_best_of() -> None:
    assert best_of(THREE) == rows((0, 1), (1, 0), (2, 2))  # of equal ones the first
    assert best_of(THREE, keep=2) == rows((0, 1), (0, 3), (1, 0), (1, 1), (2, 0), (2, 2))  # in order of sampling
    assert best_of(THREE, keep=3)[:3] == rows((0, 0), (0, 1), (0, 3))
    assert best_of(THREE, keep=9) == every(THREE)
    assert best_of(THREE, keep=2, above=0.5) == rows((0, 1), (0, 3), (2, 2))  # 0.5 itself is not above
    assert best_of(THREE, above=1.2) == []
    assert best_of(THREE, above=-1.0) == best_of(THREE)


def test_above() -> None:
    assert above(THREE, threshold=0.5) == rows((0, 1), (0, 3), (2, 2))
    assert above(THREE, threshold=1.2) == []
    assert above(THREE, threshold=-0.1) == every(THREE)
    assert above(rewards([-2.0, -1.0]), threshold=-1.5) == rows((0, 1))


def test_best_and_worst() -> None:
    assert best_and_worst(THREE) == [((0, 1), (0, 0)), ((2, 2), (2, 1))]  # no pair of equal rewards
    assert best_and_worst(rewards([1.0, 1.0])) == []
    assert best_and_worst(rewards([3.0])) == []
    assert best_and_worst(rewards([-1.0, -2.0])) == [((0, 0), (0, 1))]


def test_right_and_wrong() -> None:
    many = rewards([1.0, 0.0, 0.5, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert right_and_wrong(many) == [((0, 0), (0, 1))]  # 0.5 is not above 0.5
    assert right_and_wrong(many, num_pairs=2) == [((0, 0), (0, 1)), ((0, 3), (0, 2))]
    assert right_and_wrong(many, num_pairs=9) == right_and_wrong(many, num_pairs=2)  # each answer once
    assert right_and_wrong(many, threshold=1.0) == [((0, 4), (0, 0))]
    assert right_and_wrong(many, threshold=2.0) == []


def test_balanced_has_the_rows_of_right_and_wrong() -> None:
    assert balanced(rewards([1.0, 0.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]), keep=2) == rows((0, 0), (0, 1), (0, 3), (0, 2))
    assert balanced(rewards([1.0, 1.0])) == []


TABLES = st.integers(1, 6).flatmap(
    lambda group: st.lists(
        st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), min_size=group, max_size=group), min_size=1, max_size=5
    )
)


@given(table=TABLES, threshold=st.sampled_from([-1.0, 0.0, 0.5, 2.0]), most=st.integers(1, 4))
def test_what_holds_for_every_table(table: list[list[float]], threshold: float, most: int) -> None:
    given_rewards = rewards(*table)
    pairs = right_and_wrong(given_rewards, threshold=threshold, num_pairs=most)
    assert balanced(given_rewards, threshold=threshold, keep=most) == [(place,) for pair in pairs for place in pair]
    assert all(table[n][a] > threshold >= table[n][b] for (n, a), (_, b) in pairs)
    correct = [sum(r > threshold for r in row) for row in table]
    counts = [sum(pair[0][0] == n for pair in pairs) for n in range(len(table))]
    assert counts == [min(most, r, len(row) - r) for r, row in zip(correct, table, strict=True)]
    assert len(above(given_rewards, threshold=threshold)) == sum(correct)
    kept = best_of(given_rewards, keep=most, above=threshold)
    assert set(kept) <= set(above(given_rewards, threshold=threshold))
    assert len(kept) == sum(min(most, r) for r in correct)
    for n, row in enumerate(table):
        left_out = [r for g, r in enumerate(row) if ((n, g),) not in kept and r > threshold]
        assert all(row[g] >= r for ((m, g),) in kept if m == n for r in left_out)
    extremes = best_and_worst(given_rewards)
    assert [n for (n, _), _ in extremes] == [n for n, row in enumerate(table) if max(row) > min(row)]
    assert all(table[n][a] == max(table[n]) and table[n][b] == min(table[n]) for (n, a), (_, b) in extremes)
    for units in (pairs, kept, extremes):
        places = [place for unit in units for place in unit]
        assert len(set(places)) == len(places)
        assert [n for n, _ in places] == sorted(n for n, _ in places)
        assert all(len({n for n, _ in unit}) == 1 for unit in units)  # a pair answers one prompt


def test_levels_say_how_many_rows_a_unit_has() -> None:
    for name, entry in registry.entries("selection").items():
        options = {"threshold": 0.5} if name == "above" else {}
        units = entry.bind(options)(THREE)
        assert units
        assert {len(unit) for unit in units} == {{"row": 1, "pair": 2}[entry.traits["level"]]}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("above", {}, "rollout.select.threshold"),
        ("best_of", {"keep": 0}, "rollout.select.keep"),
        ("right_and_wrong", {"num_pairs": 0}, "rollout.select.num_pairs"),
        ("balanced", {"num_pairs": 2}, "rollout.select.num_pairs"),
        ("every", {"keep": 2}, "rollout.select.keep"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with refuses(RecipeError, message):
        registry.find("selection", name).bind(options, "rollout.select")


def test_choices_of_a_users_function_are_checked() -> None:
    two = rewards([0.0, 1.0], [2.0, 3.0])
    assert choose_units(every, two, 1) == every(two)
    assert choose_units(best_and_worst, two, 2) == [((0, 1), (0, 0)), ((1, 1), (1, 0))]
    assert choose_units(lambda given: [], two, 2) == []
    wrong: list[tuple[Any, int]] = [
        (None, 1),
        ("all", 1),
        ([(0, 0)], 1),  # a place is no unit
        ([((0, 2),)], 1),  # nor is there a third sample
        ([((0, -1),)], 1),
        ([([0, 1],)], 1),
        ([((0, 0),)], 2),
        ([((0, 0), (0, 1))], 1),
    ]
    for units, rows_per_unit in wrong:
        with pytest.raises(UsageError, match=rf"rollout\.select: .* each a tuple of {rows_per_unit} place"):
            choose_units(lambda given, units=units: units, two, rows_per_unit)
    with refuses(RunFailure, "rollout.select"):
        choose_units(lambda given: 1 / 0, two, 1)
