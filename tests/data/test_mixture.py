"""Several tasks as one: turns by weight, what is held out, one kind, and the report of each part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeness import approx
from made_up_items import make_item
from posttrain.data.base import Task, build_task, choose_task, held_out_task, num_repeated
from posttrain.data.mixture import next_turn, take_turns
from posttrain.errors import DataError, UsageError
from posttrain.evaluation.items import break_down, summarize
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component
from posttrain.types import Example, Message
from posttrain.untrusted import declare_code
from refusing import refuses

EASY: dict[str, Any] = {"name": "stories", "max_steps": 1, "size": 30}
HARD: dict[str, Any] = {"name": "stories", "min_steps": 2, "size": 60}


def mix(*parts: dict[str, Any]) -> Task:
    return build_task(Component(name="mixture", parts=list(parts)))


def names_of(task: Task) -> list[str]:
    return [example.meta["part"] for example in task.examples]


def turns_of(weights: list[float], n: int) -> list[int]:
    turns, order = [0] * len(weights), []
    for _ in range(n):
        order.append(next_turn(weights, turns))
        turns[order[-1]] += 1
    return order


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), st.integers(1, 4))
def test_turns_are_exact_over_every_window_of_the_sum_of_weights(weights: list[int], windows: int) -> None:
    order = turns_of([float(w) for w in weights], windows * sum(weights))
    assert [order.count(part) for part in range(len(weights))] == [windows * w for w in weights]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=2), st.integers(1, 200))
def test_turns_of_two_parts_are_never_a_whole_one_off(weights: list[float], n: int) -> None:
    order = turns_of(weights, n)
    for part in (0, 1):
        assert abs(order.count(part) - n * weights[part] / sum(weights)) < 1


def test_turns_worked_by_hand() -> None:
    # 2:1 → w / (2t + 1): 2, 1 | 2/3, 1 | 2/3, 1/3 | 2/5, 1/3 | 2/7, 1/3 | 2/7, 1/5
    assert turns_of([2.0, 1.0], 6) == [0, 1, 0, 0, 1, 0]
    assert turns_of([1.0, 0.0, 1.0], 4) == [0, 2, 0, 2]
    assert take_turns([1, 1], [1, 4]) == [0, 1, 1, 1, 1]
    assert take_turns([1, 3], [2, 3]) == [1, 0, 1, 1, 0]


def test_examples_are_those_of_the_parts_and_say_whose_they_are() -> None:
    task = mix({"task": EASY, "name": "easy", "weight": 2}, {"task": HARD, "name": "hard"})
    assert [(part.name, part.weight) for part in task.parts] == [("easy", 2), ("hard", 1)]
    assert names_of(task)[:6] == ["easy", "hard", "easy", "easy", "hard", "easy"]
    assert names_of(task).count("easy") == 30
    assert len(task.examples) == 90
    own = [example for example in task.examples if example.meta["part"] == "easy"]
    for example, alone in zip(own, build_task(Component(**EASY)).examples, strict=True):
        assert example.id == f"easy/{alone.id}"
        assert (example.messages, example.answer, example.grader) == (alone.messages, alone.answer, alone.grader)
        assert example.meta == {"part": "easy", **alone.meta}
    assert len({example.id for example in task.examples}) == 90
    assert (task.split, task.dropped, num_repeated(task.examples)) == ("train", {}, 0)
    assert task.worked is not None, "both are stories, which can tell"


def test_what_is_held_out_is_of_every_part(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(200)))
    parts = [
        {"task": {"name": "jsonl", "path": str(file), "size": 50}, "name": "rows"},
        {"task": {"name": "stories", "size": 200}, "weight": 3},
    ]
    word = Component(name="mixture", parts=parts)
    trained, held_out = build_task(word), build_task(held_out_task(word))
    assert names_of(trained).count("rows") == 50
    assert held_out.split == "validation"
    num_rows = len(build_task(Component(name="jsonl", path=str(file), split="validation")).examples)
    assert names_of(held_out).count("rows") == num_rows > 5
    assert names_of(held_out)[:8].count("rows") == 2, "in turns by weight"
    questions = {e.messages for e in trained.examples if e.meta["part"] == "rows"}
    assert not questions & {e.messages for e in held_out.examples}

    recipe = load_recipe("tiny/grpo", [("task", json.dumps({"name": "mixture", "parts": parts}))]).resolve()
    request = choose_task(None, "runs/x", recipe.task)
    splits = [part["task"]["split"] for part in request.options["parts"]]
    assert splits == ["test", "test"], "a file of rows has a test part"
    assert build_task(choose_task(Component(name="", split="train"), "runs/x", recipe.task)).split == "train"
    named = build_task(choose_task(Component(name="mixture", parts=[{"task": EASY}]), "tiny", None))
    assert (named.split, len(named.examples)) == ("test", 30)


@pytest.mark.usefixtures("quick_stories")
def test_parts_of_different_kinds_are_one_message() -> None:
    pairs = {"task": {"name": "stories", "responses": "pair"}, "name": "pairs"}
    steps = {"task": {"name": "stories", "responses": "steps"}, "name": "steps"}
    text = {"task": {"name": "stories", "style": "document"}, "name": "text"}
    for other, kind in ((pairs, "pairs"), (steps, "labeled steps"), (text, "raw text")):
        with pytest.raises(UsageError, match=rf"same kind.*stories: questions; {other['name']}: {kind}\."):
            mix({"task": "stories"}, other)


def with_a_part() -> Task:
    """A task whose examples have a fact of that name."""
    return Task("own", "train", [Example("own/0", (Message("user", "1?"),), "1", meta={"part": 3})])


def no_examples() -> Task:
    return Task("none", "train", [])


def test_tasks_of_ones_own_that_do_not_fit_are_reported() -> None:
    declare_code(["test_mixture:with_a_part", "test_mixture:no_examples"])
    with refuses(UsageError, "task.parts", "'with_a_part'", "'part'"):
        names_of(mix({"task": EASY}, {"task": "test_mixture:with_a_part"}))
    with refuses(UsageError, "task.parts.0.task", "'none'"):
        mix({"task": "test_mixture:no_examples", "name": "none"})
    with refuses(DataError, "part 'rows'", "nowhere.jsonl"):
        mix({"task": EASY}, {"task": {"name": "jsonl", "path": "nowhere.jsonl"}, "name": "rows"})


def test_accuracy_is_reported_by_part_next_to_the_whole() -> None:
    task = mix({"task": EASY, "name": "easy"}, {"task": HARD, "name": "hard"})
    items = [make_item(0, "r", part="easy"), make_item(1, "r", part="easy"), make_item(2, "w", part="easy")]
    items += [make_item(3, "w", part="hard"), make_item(4, "u", part="hard"), make_item(5, "", part="hard")]
    assert task.shares is not None
    results = summarize(items, task)
    assert results["accuracy"] == approx(2 / 5), "but the ungraded; a prompt that did not fit is wrong"
    assert (results["easy:accuracy"], results["easy:accuracy_n"]) == (approx(2 / 3), 3)
    assert (results["hard:accuracy"], results["hard:accuracy_n"]) == (0.0, 2)
    assert results["easy:accuracy_low"] < 2 / 3 < results["easy:accuracy_high"]
    assert break_down(items)["part"]["easy"]["n"] == 3
    ungraded = [make_item(0, "u", part="easy"), make_item(1, "r", part="hard")]
    assert "easy:accuracy" not in task.shares(ungraded)
