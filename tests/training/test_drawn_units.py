"""Supervised rows encoded when drawn: the same batches as rows encoded at startup, replacements, bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_sources import draw_indices, rows_of, same_batch, sums

from posttrain.data.base import ExamplesOnDemand, Task, TaskPart
from posttrain.data.mixture import _mixed, take_turns
from posttrain.data.render.rows import Shape
from posttrain.errors import RecipeError
from posttrain.training.sources import units
from posttrain.training.sources.dataset import SupervisedSource
from posttrain.training.sources.prompts import NUM_PROBED
from posttrain.types import Batch, Example, Message, Response
from refusing import refuses
from small_runs import make_recipe
from supervised_sources import supervised_source

SIZE = NUM_PROBED + 64


def on_demand(whole: Task) -> tuple[Task, list[int]]:
    """The same task on demand, and the items made so far."""
    made: list[int] = []

    def make(item: int) -> Example:
        made.append(item)
        return whole.examples[item]

    return replace(whole, examples=ExamplesOnDemand(len(whole.examples), make)), made


def answered(size: int, scores: Callable[[int], tuple[float, ...]] = lambda i: (1.0, 0.0)) -> Task:
    """Questions with answers of these scores."""
    examples = []
    for i in range(size):
        responses = tuple(Response(f"{i + n} is it", score) for n, score in enumerate(scores(i)))
        examples.append(Example(f"a/{i}", (Message("user", f"What is {i}?"),), responses=responses))
    return Task("answered", "train", examples)


def source_of(
    tokenizer: Any, template: Any, task: Task, shape: Shape = "demonstration", **changes: Any
) -> SupervisedSource:
    changes = {"data": {"batch_size": 16, "max_length": 300}, **changes}
    kind = "sft" if shape == "demonstration" else "judged"
    return supervised_source(make_recipe(kind, **changes), task, template, tokenizer, 1024, shape)


def batches(source: SupervisedSource, steps: int) -> list[Batch]:
    drawn = [source(step).batch for step in range(1, steps + 1)]
    assert all(batch is not None for batch in drawn)
    return drawn  # type: ignore[return-value]


def same(left: Sequence[Batch], right: Sequence[Batch]) -> bool:
    return len(left) == len(right) and all(same_batch(a, b) for a, b in zip(left, right, strict=True))


def length_limit(tokenizer: Any, template: Any) -> int:
    """The longest row of ``sums`` without long prompts."""
    source = source_of(tokenizer, template, sums(SIZE))
    return max(len(row.ids) for unit in source.units for row in unit)


def test_start_encodes_probe_only_and_batches_are_those_of_rows_in_memory(tokenizer, template) -> None:
    task, made = on_demand(sums(SIZE))
    source = source_of(tokenizer, template, task)
    assert sorted(made) == list(range(NUM_PROBED))
    made.clear()
    first = source(1).batch
    later = {place for place in draw_indices(0, "data", 0, 16, SIZE) if place >= NUM_PROBED}
    assert sorted(made) == sorted(later)
    assert len(later) > 0
    in_memory = source_of(tokenizer, template, sums(SIZE))
    assert same([first, *batches(source, 45)[1:]], batches(in_memory, 45)), "more than two passes"
    assert source.num_examples == in_memory.num_examples == SIZE
    assert source.size == in_memory.size
    assert source.length_of(2) == in_memory.length_of(2)


@pytest.mark.parametrize(("shape", "per_example"), [("pair", 1), ("judged", 2)])
def test_pairs_and_judged_answers_are_those_of_rows_in_memory(tokenizer, template, shape: Shape, per_example) -> None:
    task, made = on_demand(answered(SIZE))
    source = source_of(tokenizer, template, task, shape, objective="kto" if shape == "judged" else "dpo")
    assert len(set(made)) == NUM_PROBED
    in_memory = source_of(tokenizer, template, answered(SIZE), shape)
    assert source.num_examples == in_memory.num_examples == SIZE * per_example
    assert source.size == in_memory.size
    assert same(batches(source, 8), batches(in_memory, 8))
    assert source(3).given == in_memory(3).given


def test_row_too_long_within_probe_is_dropped_as_in_memory(tokenizer, template) -> None:
    long = [3, NUM_PROBED + 7, SIZE - 1]
    data = {"batch_size": 16, "max_length": length_limit(tokenizer, template)}
    task, _ = on_demand(sums(SIZE, long))
    source = source_of(tokenizer, template, task, data=data)
    in_memory = source_of(tokenizer, template, sums(SIZE, long), data=data)
    reason = f"longer than data.max_length={data['max_length']}"
    assert source.dropped == in_memory.dropped == {"blank": 2, reason: 3}
    assert same(batches(source, 25), batches(in_memory, 25))
    assert source.take_warnings() == []
    assert source.trained == in_memory.trained


def test_row_too_long_after_probe_is_replaced_by_next_and_reported(tokenizer, template) -> None:
    long = [NUM_PROBED, NUM_PROBED + 1, SIZE - 1]
    data = {"batch_size": SIZE, "max_length": length_limit(tokenizer, template)}
    task, _ = on_demand(sums(SIZE, long))
    source = source_of(tokenizer, template, task, data=data)
    whole = source_of(tokenizer, template, sums(SIZE)).units
    drawn = source(1)
    rows = rows_of(drawn.batch)
    for slot, place in enumerate(draw_indices(0, "data", 0, SIZE, SIZE)):
        usable = {NUM_PROBED: NUM_PROBED + 2, NUM_PROBED + 1: NUM_PROBED + 2, SIZE - 1: 0}.get(place, place)
        assert rows[slot] == tuple(whole[usable][0].ids)
        assert drawn.given[slot].unit == place, "each row once in a pass"
    (warning,) = source.take_warnings()
    assert f"longer than data.max_length={data['max_length']}" in warning
    assert source.take_warnings() == []
    again = source_of(tokenizer, template, task, data=data)
    assert tuple(again.units[NUM_PROBED + 1][0].ids) == tuple(whole[NUM_PROBED + 2][0].ids), "whatever was drawn before"


def test_replacement_stays_within_its_part(tokenizer, template) -> None:
    limit = length_limit(tokenizer, template)
    made, _ = on_demand(sums(SIZE, [SIZE - 1]))
    read = replace(sums(40, [5]), name="read")
    tasks = {"made": made, "read": read}
    examples = _mixed(tasks, take_turns([1.0, 1.0], [SIZE, 40]))
    mixture = Task("mixture", "train", examples, parts=(TaskPart("made", 1.0), TaskPart("read", 1.0)))
    source = source_of(tokenizer, template, mixture, data={"batch_size": 16, "max_length": limit})
    parts = list(source.units.parts)
    assert [parts.count(name) for name in ("made", "read")] == [SIZE, 39]
    (last,) = (place for place, part in enumerate(parts) if part == "made" and place == len(parts) - 1)
    first = parts.index("made")
    assert source.units[last] == source.units[first]


def test_rows_beyond_memory_limit_are_encoded_again(tokenizer, template, monkeypatch: pytest.MonkeyPatch) -> None:
    task, made = on_demand(sums(SIZE))
    source = source_of(tokenizer, template, task)
    whole = batches(source, 20)
    num_made = len(made)
    batches(source, 20)
    assert len(made) == num_made, "kept"
    monkeypatch.setattr(units, "MAX_CACHED_TOKENS", 200)
    bounded, _ = on_demand(sums(SIZE))
    few = source_of(tokenizer, template, bounded)
    assert same(batches(few, 20), whole)
    kept = few.units._drawn.values()
    assert 0 < sum(len(row.ids) for unit in kept for rows in unit for row in rows) <= 200


def test_statistics_of_rows_on_demand_name_their_sample(tokenizer, template) -> None:
    task, _ = on_demand(sums(SIZE))
    source = source_of(tokenizer, template, task)
    sample = source_of(tokenizer, template, replace(sums(SIZE), examples=sums(SIZE).examples[:NUM_PROBED]))
    counts = sample.trained.removesuffix(" (data.train_on response)")
    assert source.trained == f"{counts}, in the first {NUM_PROBED} rows (data.train_on response)"


def test_labels_that_probe_cannot_decide_are_read_at_start(tokenizer, template) -> None:
    late, made = on_demand(answered(SIZE, lambda i: (float(i >= NUM_PROBED),)))
    source = source_of(tokenizer, template, late, "judged", objective="kto")
    assert set(made) == set(range(SIZE))
    assert source.num_examples == SIZE
    none, _ = on_demand(answered(SIZE, lambda i: (1.0,)))
    with refuses(RecipeError, f"all {SIZE} answers are desirable"):
        source_of(tokenizer, template, none, "judged", objective="kto")


def test_rating_after_probe_is_refused_when_drawn(tokenizer, template) -> None:
    rated, _ = on_demand(answered(SIZE, lambda i: (7.0,) if i == SIZE - 1 else (float(i % 2),)))
    source = source_of(tokenizer, template, rated, "judged", objective="kto")
    with refuses(RecipeError, "data.label_above", f"a/{SIZE - 1}"):
        source.units[SIZE - 1]


def test_batch_after_resume_is_that_of_uninterrupted_run(tokenizer, template) -> None:
    """A source that begins at a later step draws the same rows and replacements."""
    long = list(range(NUM_PROBED, SIZE, 3))
    data = {"batch_size": 16, "max_length": length_limit(tokenizer, template)}

    def begun() -> SupervisedSource:
        return source_of(tokenizer, template, on_demand(sums(SIZE, long))[0], data=data)

    straight = begun()
    expected = batches(straight, 30)
    assert straight.take_warnings(), "rows were replaced"
    for step in (3, 14, 30):
        resumed = begun()(step)
        assert same([resumed.batch], [expected[step - 1]])
        assert resumed.given == straight(step).given


def test_replaced_row_is_made_once_however_often_it_is_drawn(tokenizer, template) -> None:
    """The search for a usable row, and for the reason, is not repeated for every draw."""
    long = list(range(NUM_PROBED, SIZE))
    data = {"batch_size": 16, "max_length": length_limit(tokenizer, template)}
    task, made = on_demand(sums(SIZE, long))
    source = source_of(tokenizer, template, task, data=data)
    first = source.units[NUM_PROBED + 10]
    assert first == source.units[0], "the next usable row is the first"
    made.clear()
    for place in range(NUM_PROBED + 10, SIZE):
        assert source.units[place] == first
    assert made == []
    (warning,) = source.take_warnings()
    assert warning.count("longer than data.max_length") == 1
