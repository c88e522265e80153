"""The order of a mixture's rows: exact shares, whole passes, replacement rounds, rest, and what a checkpoint keeps."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.algorithms.curricula import History, Mix
from posttrain.errors import UsageError
from posttrain.randomness import draw_indices
from posttrain.tasks.base import Task, TaskPart
from posttrain.train.sources import PlainOrder, row_order
from posttrain.train.sources.mixed_order import Curriculum, MixedOrder

PARTS = (TaskPart("a", 2.0), TaskPart("b", 1.0))
ROWS = ["a"] * 10 + ["b"] * 7


def make(size: int = 6, curriculum: Curriculum | None = None, **changes: Any) -> MixedOrder:
    settings: dict[str, Any] = {"seed": 3, "purpose": "prompts", "size": size, "parts": PARTS, "part_of": ROWS}
    return MixedOrder(**settings | changes, curriculum=curriculum)


def counts(places: list[int]) -> dict[str, int]:
    return dict(Counter(ROWS[place] for place in places))


def test_a_task_without_parts_is_drawn_as_it_always_was() -> None:
    order = row_order(3, "prompts", 4, Task("t", "train", []), range(10), further=2)
    assert isinstance(order, PlainOrder)
    assert order.turn(5).places == draw_indices(3, "prompts", 20, 4, 10)
    assert order.turn(5).passes == [2, 2, 2, 2]
    assert order.turn(5, 2).places == draw_indices(3, "further prompts", (5 * 2 + 1) * 4, 4, 10)


def test_every_batch_has_its_share_and_every_row_its_turn() -> None:
    order = make()
    turns = [order.turn(batch) for batch in range(35)]
    assert all(counts(turn.places) == {"a": 4, "b": 2} for turn in turns)
    for part, number in (("a", 10), ("b", 7)):
        drawn = [(p, n) for turn in turns for p, n in zip(turn.places, turn.passes, strict=True) if ROWS[p] == part]
        for in_pass in range(len(drawn) // number):
            rows = [p for p, n in drawn if n == in_pass]
            assert len(rows) == len(set(rows)) == number, "every row once in a pass over its part"
    odd = [make(size=4).turn(batch) for batch in range(3)]
    assert [counts(turn.places).get("b", 0) for turn in odd] == [1, 2, 1], "4 of 12: exact over three batches"


def test_a_batch_is_a_function_of_the_seed_and_its_number() -> None:
    straight = [make().turn(batch).places for batch in range(12)]
    order = make()
    assert [order.turn(batch).places for batch in (7, 2, 11, 0, 7)] == [straight[b] for b in (7, 2, 11, 0, 7)]
    assert make(seed=4).turn(0).places != straight[0]
    alone = MixedOrder(3, "prompts", 4, PARTS[:1], ["a"] * 10)
    mine = [p for places in straight[:5] for p in places if ROWS[p] == "a"]
    assert [p for batch in range(5) for p in alone.turn(batch).places] == mine, "b changes nothing in a's order"


def test_replacement_rounds_have_the_same_shares_and_an_order_of_their_own() -> None:
    order = make(further=3)
    first = {batch: order.turn(batch).places for batch in range(7)}
    rounds = {(batch, n): order.turn(batch, n) for batch in range(7) for n in (1, 2, 3)}
    assert all(counts(turn.places) == {"a": 4, "b": 2} for turn in rounds.values())
    drawn = [p for turn in rounds.values() for p in turn.places if ROWS[p] == "b"]
    assert [len(set(drawn[i : i + 7])) for i in range(0, 42, 7)] == [7] * 6, "42 draws are six passes over b's 7"
    assert drawn[:14] != [p for places in first.values() for p in places if ROWS[p] == "b"]
    assert make(further=3).turn(4, 2) == rounds[4, 2], "whatever was asked before"


def test_weights_that_change_are_counted_anew() -> None:
    def curriculum(step: int, history: History) -> Mix:
        return Mix({"b": 0.0} if step < 5 else {"b": 4.0} if step < 9 else {})

    order = make(curriculum=Curriculum(curriculum, steps_per_batch=2))  # batch b begins at step 2b + 1
    shares = [counts(order.turn(batch).places) for batch in range(6)]
    assert shares == [{"a": 6}] * 2 + [{"a": 2, "b": 4}] * 2 + [{"a": 4, "b": 2}] * 2
    assert order.turn(2).passes.count(0) == 4, "b has waited; a is in its second pass"


def rollouts(places: list[int], success: dict[int, float], **changes: Any) -> list[list[Any]]:
    made = {"has_failed": False, "outcome": "right", "reward": 0.0} | changes
    return [[SimpleNamespace(parts={"correct": success.get(p, 0.5)}, **made)] * 2 for p in places]


def resting(history: History) -> dict[int, int]:
    return {p: t.in_pass + 2 for p, t in history.prompts.items() if t.success == 1.0}


def test_prompts_that_rest_are_passed_over_and_counted() -> None:
    solved = {0: 1.0, 1: 1.0, 2: 1.0, 12: 1.0}
    order = make(curriculum=Curriculum(lambda step, history: Mix(resting=resting(history)), frozenset({"prompts"})))
    drawn: list[tuple[int, int]] = []
    skipped: Counter[str] = Counter()
    for batch in range(12):
        turn = order.turn(batch)
        assert counts(turn.places) == {"a": 4, "b": 2}
        drawn += zip(turn.places, turn.passes, strict=True)
        skipped.update(turn.skipped)
        order.record(batch, rollouts(turn.places, solved))
    for place in range(17):
        passes = [n for p, n in drawn if p == place]
        complete = range(4 if place < 10 else 3)
        wanted = [n for n in complete if place not in solved or n % 2 == 0]
        assert [n for n in passes if n in complete] == wanted, place
    assert skipped["a"] >= 3
    assert skipped["b"] >= 1


def test_a_part_that_rests_as_a_whole_is_drawn_from_as_if_it_did_not() -> None:
    order = make(curriculum=Curriculum(lambda step, history: Mix(resting=dict.fromkeys(range(17), 99))))
    plain = make()
    assert [order.turn(batch).places for batch in range(4)] == [plain.turn(batch).places for batch in range(4)]


@pytest.mark.parametrize("reads", [{"parts"}, {"prompts", "parts"}])
def test_a_restored_order_goes_on_as_the_undisturbed_one(reads: set[str]) -> None:
    def curriculum(step: int, history: History) -> Mix:
        rate = history.rate("a", 2) or 0.0
        return Mix({"b": 3.0 if rate > 0.5 else 1.0}, resting(history))

    def advance(order: MixedOrder, batch: int) -> Any:
        turns = [order.turn(batch, attempt) for attempt in range(2)]
        groups = [g for turn in turns for g in rollouts(turn.places, {p: (p % 3) / 2 for p in range(17)})]
        order.record(batch, groups)
        return turns

    settings: dict[str, Any] = {"curriculum": Curriculum(curriculum, frozenset(reads)), "further": 2}
    whole = make(**settings)
    expected, states = [], []
    for batch in range(15):
        expected.append(advance(whole, batch))
        states.append(json.loads(json.dumps(whole.state())))
    assert len({str(turn[0].places) for turn in expected}) == 15
    for stop in (0, 4, 9):
        again = make(**settings)
        again.restore(states[stop])
        assert [advance(again, batch) for batch in range(stop + 1, 15)] == expected[stop + 1 :]
        assert again.state() == whole.state()
    assert make().state() == {}, "what follows from the step needs no state"


def test_a_state_is_not_changed_by_what_is_recorded_later() -> None:
    order = make(curriculum=Curriculum(lambda step, history: Mix(), frozenset({"parts", "prompts"})))
    order.record(0, rollouts(order.turn(0).places, {}))
    state = order.state()
    before = json.dumps(state)
    order.record(1, rollouts(order.turn(1).places, {}))
    assert json.dumps(state) == before


def test_only_what_can_be_graded_counts_as_success() -> None:
    order = make(curriculum=Curriculum(lambda step, history: Mix(), frozenset({"parts"})))
    groups = rollouts(order.turn(0).places, {}, outcome="ungraded")
    with pytest.raises(UsageError, match=r"curriculum: it goes by success \(correct\), and no answer.*curriculum\.by"):
        order.record(0, groups)
    groups[0] = rollouts([0], {0: 1.0})[0]
    order.record(0, groups)
    assert order.history.batches == {"a": [(2.0, 2)]}
    by_reward = make(curriculum=Curriculum(lambda step, history: Mix(), frozenset({"parts"}), by="reward"))
    failed = rollouts(by_reward.turn(0).places, {}, reward=0.25, outcome="ungraded")
    failed[0] = rollouts([0], {}, has_failed=True)[0]
    by_reward.record(0, failed)
    assert by_reward.history.batches == {"a": [(1.5, 6)], "b": [(1.0, 4)]}


def test_a_part_without_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match=r"task\.parts: not one example of part 'b' can be used here"):
        make(part_of=["a"] * 10)
