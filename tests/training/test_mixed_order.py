"""The order of a mixture's rows: exact shares, whole passes, replacement rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from small_sources import draw_indices

from posttrain.data.base import TaskPart
from posttrain.errors import UsageError
from posttrain.training.sources import RowOrder
from refusing import refuses

PARTS = (TaskPart("a", 2.0), TaskPart("b", 1.0))
ROWS = ["a"] * 10 + ["b"] * 7


def make(size: int = 6, **changes: Any) -> RowOrder:
    settings: dict[str, Any] = {"seed": 3, "purpose": "prompts", "size": size, "parts": PARTS, "rows": ROWS}
    return RowOrder(**settings | changes)


def counts(places: list[int]) -> dict[str, int]:
    return dict(Counter(ROWS[place] for place in places))


def test_a_task_without_parts_is_drawn_as_it_always_was() -> None:
    order = RowOrder(3, "prompts", 4, (), range(10), further=2)
    assert order.round_of(5).places == draw_indices(3, "prompts", 20, 4, 10)
    assert order.round_of(5).epochs == [2, 2, 2, 2]
    assert order.round_of(5, 2).places == draw_indices(3, "further prompts", (5 * 2 + 1) * 4, 4, 10)


def test_every_batch_has_its_share_and_every_row_its_turn() -> None:
    order = make()
    turns = [order.round_of(batch) for batch in range(35)]
    assert all(counts(turn.places) == {"a": 4, "b": 2} for turn in turns)
    for part, number in (("a", 10), ("b", 7)):
        drawn = [(p, n) for turn in turns for p, n in zip(turn.places, turn.epochs, strict=True) if ROWS[p] == part]
        for in_pass in range(len(drawn) // number):
            rows = [p for p, n in drawn if n == in_pass]
            assert len(rows) == len(set(rows)) == number, "every row once in a pass over its part"
    odd = [make(size=4).round_of(batch) for batch in range(3)]
    assert [counts(turn.places).get("b", 0) for turn in odd] == [1, 2, 1], "4 of 12: exact over three batches"


def test_a_batch_is_a_function_of_the_seed_and_its_number() -> None:
    straight = [make().round_of(batch).places for batch in range(12)]
    order = make()
    assert [order.round_of(batch).places for batch in (7, 2, 11, 0, 7)] == [straight[b] for b in (7, 2, 11, 0, 7)]
    assert make(seed=4).round_of(0).places != straight[0]
    alone = RowOrder(3, "prompts", 4, PARTS[:1], ["a"] * 10)
    mine = [p for places in straight[:5] for p in places if ROWS[p] == "a"]
    assert [p for batch in range(5) for p in alone.round_of(batch).places] == mine, "b changes nothing in a's order"


def test_replacement_rounds_have_the_same_shares_and_an_order_of_their_own() -> None:
    order = make(further=3)
    first = {batch: order.round_of(batch).places for batch in range(7)}
    rounds = {(batch, n): order.round_of(batch, n) for batch in range(7) for n in (1, 2, 3)}
    assert all(counts(turn.places) == {"a": 4, "b": 2} for turn in rounds.values())
    drawn = [p for turn in rounds.values() for p in turn.places if ROWS[p] == "b"]
    assert [len(set(drawn[i : i + 7])) for i in range(0, 42, 7)] == [7] * 6, "42 draws are six passes over b's 7"
    assert drawn[:14] != [p for places in first.values() for p in places if ROWS[p] == "b"]
    assert make(further=3).round_of(4, 2) == rounds[4, 2], "whatever was asked before"


def test_a_part_without_a_row_is_refused() -> None:
    with refuses(UsageError, "task.parts", "'b'"):
        make(rows=["a"] * 10)
