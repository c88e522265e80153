"""Descriptions of data, counted by hand."""

from __future__ import annotations

from collections import Counter

from posttrain.data.base import Task, describe_task, percentile
from posttrain.types import Example, Message, Response


def words(text: str) -> int:
    return len(text.split())


def ask(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def test_lengths_answers_and_kinds() -> None:
    examples = [
        Example("a", ask("one two three"), answer="4", solution="so four", meta={"level": 1, "id": "x1"}),
        Example("b", (Message("system", "be brief"), *ask("one")), answer="4", meta={"level": 2, "id": "x2"}),
        Example("c", ask("one two three"), answer="5", solution="five", meta={"level": 2, "id": "x3"}),
    ]
    found = describe_task(Task("t", "train", examples), words, n=10)
    assert (found.num_examples, found.num_read, found.repeated_prompts) == (3, 3, 1)
    assert found.lengths == {"prompt": [3, 3, 3], "solution": [2, 1]}
    assert found.longest == [5, 3, 4]
    assert [found.over(limit) for limit in (2, 3, 4, 5)] == [3, 2, 1, 0]
    assert found.answers == Counter({"4": 2, "5": 1})
    assert found.turns == Counter({1: 2, 2: 1})
    assert found.graders == Counter({"numeric": 3})
    assert found.kinds == {"level": Counter({"2": 2, "1": 1}), "id": Counter({"x1": 1, "x2": 1, "x3": 1})}


def test_a_key_with_one_value_or_with_very_many_is_no_breakdown() -> None:
    examples = [Example(f"{i}", ask("q"), meta={"title": f"t{i}", "same": 1, "half": i % 2}) for i in range(31)]
    assert set(describe_task(Task("t", "train", examples), words, n=100).kinds) == {"half"}


def test_pairs() -> None:
    pairs = [
        (Response("long and good", 3.0), Response("bad", 1.0)),
        (Response("bad but long", 0.0), Response("good", 1.0)),
        (Response("the same", 1.0), Response("the  same ", 0.0)),
    ]
    examples = [Example(f"{i}", ask(f"q {i}"), responses=pair) for i, pair in enumerate(pairs)]
    found = describe_task(Task("t", "train", examples), words, n=10)
    assert (found.num_pairs, found.identical_pairs, found.longer_chosen) == (3, 1, 1.5)
    assert found.lengths == {"prompt": [2, 2, 2], "chosen": [3, 1, 2], "rejected": [1, 3, 2]}
    assert found.margins == [2.0, 1.0, 1.0]
    assert found.longest == [5, 5, 4]
    assert found.labels == {}


def test_judged_answers_and_steps() -> None:
    steps = Response("a b", 0.0, ("a", " b"), (1, 0))
    examples = [
        Example("j", ask("q"), responses=(Response("x", 1.0), Response("y z", 0.0), Response("w", 0.0))),
        Example("s", ask("q"), responses=(steps,)),
    ]
    found = describe_task(Task("t", "train", examples), words, n=10)
    assert found.labels == {"answers": Counter({"0": 3, "1": 1}), "steps": Counter({"1": 1, "0": 1})}
    assert found.num_pairs == 0
    assert found.lengths["response"] == [1, 2, 1, 2]


def test_percentiles_are_values_that_occur() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (0.0, 0.25, 0.26, 0.5, 0.75, 1.0)] == [1, 1, 2, 2, 3, 4]
