"""Prompts of a task that makes its examples on demand are made and encoded when they are drawn, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_sources import prompts_at, sampled, sums

from posttrain.data.base import ExamplesOnDemand, Task, TaskPart
from posttrain.data.mixture import _mixed, take_turns
from posttrain.data.render import encode_prompt
from posttrain.errors import UsageError
from posttrain.store.rollouts import RolloutStore
from posttrain.training.records.stored_records import recorded_answer
from posttrain.training.records.update_records import sampled_answer
from posttrain.training.sources.prompts import NUM_PROBED, Prompts
from posttrain.types import Example

SIZE = 2 * NUM_PROBED


def on_demand(size: int, long: Sequence[int] = ()) -> tuple[Task, list[int]]:
    """The task ``sums`` on demand, and the items that were made of it so far."""
    whole = sums(size, long)
    made: list[int] = []

    def make(item: int) -> Example:
        made.append(item)
        return whole.examples[item]

    return replace(whole, examples=ExamplesOnDemand(size, make)), made


def indices_drawn(source: Any, steps: int) -> list[int]:
    """Return the index of every prompt of the first ``steps`` batches."""
    drawn = []
    for step in range(1, steps + 1):
        groups = source(step).rollouts
        drawn += [groups[i].prompt_index for i in range(0, len(groups), source.options.group_size)]
    return drawn


def limit_of(tokenizer: Any, template: Any) -> int:
    """Return a limit between the prompts of ``sums`` and its long ones."""
    short, long = sums(SIZE, [0]).examples[-1], sums(1, [0]).examples[0]
    lengths = [len(encode_prompt(tokenizer, template, each.messages)) for each in (short, long)]
    assert lengths[0] + 1 < lengths[1]
    return lengths[0] + 1


def test_start_of_task_on_demand_makes_probe_only(tokenizer, template) -> None:
    task, made = on_demand(SIZE)
    source = sampled(tokenizer, template, task)
    assert sorted(set(made)) == list(range(NUM_PROBED))
    assert source.num_examples == SIZE
    made.clear()
    source(1)
    assert sorted(made) == sorted(prompts_at(source, 0, source.options.num_prompts))


def test_prompts_on_demand_are_those_of_same_rows_in_memory(tokenizer, template) -> None:
    task, _ = on_demand(SIZE)
    assert indices_drawn(sampled(tokenizer, template, task), 5) == indices_drawn(
        sampled(tokenizer, template, sums(SIZE)), 5
    )


def test_too_long_prompt_within_probe_drops_as_rows_in_memory_do(tokenizer, template) -> None:
    long = [3, NUM_PROBED + 7, SIZE - 1]
    task, _ = on_demand(SIZE, long)
    prompt = {"max_prompt_tokens": limit_of(tokenizer, template)}
    lazy = sampled(tokenizer, template, task, prompt=prompt)
    eager = sampled(tokenizer, template, sums(SIZE, long), prompt=prompt)
    assert lazy.dropped == eager.dropped == {"blank": 2, f"prompt longer than {prompt['max_prompt_tokens']} tokens": 3}
    assert lazy.num_examples == SIZE - 3
    assert indices_drawn(lazy, 5) == indices_drawn(eager, 5)
    assert lazy.take_warnings() == []


def test_too_long_prompt_behind_probe_is_replaced_by_next_and_counted(tokenizer, template) -> None:
    long = list(range(NUM_PROBED, SIZE, 2))
    task, _ = on_demand(SIZE, long)
    limit = limit_of(tokenizer, template)
    source = sampled(tokenizer, template, task, prompt={"max_prompt_tokens": limit})
    steps = 8
    places = prompts_at(source, 0, steps * source.options.num_prompts)
    drawn = indices_drawn(source, steps)
    met = sorted(set(places) & set(long))
    assert len(met) >= 2
    expected = []
    for place in places:
        expected.append((place + (place in long)) % SIZE)
    assert drawn == expected
    assert sorted(source.prompts.replaced) == met
    (warning,) = source.take_warnings()
    assert f"more than {limit} tokens (prompt.max_prompt_tokens)" in warning
    assert source.take_warnings() == []


def test_replaced_prompt_counts_as_visited_in_place_of_its_replacement(tokenizer, template, tmp_path: Path) -> None:
    long = list(range(NUM_PROBED, SIZE, 2))
    task, _ = on_demand(SIZE, long)
    source = sampled(tokenizer, template, task, prompt={"max_prompt_tokens": limit_of(tokenizer, template)})
    places = prompts_at(source, 0, 8 * source.options.num_prompts)
    store = RolloutStore(tmp_path / "rollouts.db")
    answers = []
    for step in range(1, 9):
        rollouts = source(step).rollouts
        store.record(rollouts)
        answers += [sampled_answer(rollout) for rollout in rollouts[:: source.options.group_size]]
    assert [answer.visited for answer in answers] == places
    assert [answer.prompt_index for answer in answers] != places
    stored = [recorded_answer(row).visited for row in store.training()]
    assert stored[:: source.options.group_size] == places
    assert sorted(store.epochs_of_prompts()) == sorted(places)


def test_replacement_does_not_depend_on_what_was_drawn_before(tokenizer, template) -> None:
    long = [*range(NUM_PROBED, NUM_PROBED + 40), SIZE - 1]
    task, _ = on_demand(SIZE, long)
    limit = limit_of(tokenizer, template)
    whole = Prompts(task, tokenizer, template, 1024, limit)
    in_order = [whole.draw(place).index for place in range(SIZE)]
    for place in (NUM_PROBED + 39, NUM_PROBED, SIZE - 1):
        assert Prompts(task, tokenizer, template, 1024, limit).draw(place).index == in_order[place]
    assert in_order[NUM_PROBED] == NUM_PROBED + 40
    assert in_order[SIZE - 1] == 0


def test_stored_prompt_that_cannot_have_been_drawn_is_refused(tokenizer, template) -> None:
    task, _ = on_demand(SIZE, [SIZE - 1])
    prompts = Prompts(task, tokenizer, template, 1024, limit_of(tokenizer, template))
    assert prompts.at(4).example == task.examples[4]
    for index in (SIZE - 1, SIZE):
        with pytest.raises(LookupError):
            prompts.at(index)


def test_task_on_demand_of_which_no_prompt_fits_is_refused(tokenizer, template) -> None:
    task, _ = on_demand(SIZE)
    with pytest.raises(UsageError, match="no prompts left to sample from") as refused:
        sampled(tokenizer, template, task, prompt={"max_prompt_tokens": 2})
    assert f"{SIZE} × prompt longer than 2 tokens" in str(refused.value)


def test_mixture_reads_rows_in_memory_and_replaces_within_part(tokenizer, template) -> None:
    made_long = [NUM_PROBED + 1, SIZE - 1]
    made, items = on_demand(SIZE, made_long)
    read = replace(sums(40, [5]), name="read")
    tasks = {"made": made, "read": read}
    examples = _mixed(tasks, take_turns([1.0, 1.0], [SIZE, 40]))
    parts = (TaskPart("made", 1.0), TaskPart("read", 1.0))
    mixture = Task("mixture", "train", examples, parts=parts)
    prompts = Prompts(mixture, tokenizer, template, 1024, limit_of(tokenizer, template))
    assert sorted(set(items)) == list(range(NUM_PROBED))
    assert sum(prompts.dropped.values()) == 1
    assert [prompts.parts.count(name) for name in ("made", "read")] == [SIZE, 39]
    drawn = [prompts.draw(place) for place in range(len(prompts.indices))]
    assert [prompt.example.meta["part"] for prompt in drawn] == list(prompts.parts)
    by_id = {prompt.example.id for prompt in drawn}
    assert by_id == {f"made/sum/{i}" for i in range(SIZE) if i not in made_long} | {
        f"read/sum/{i}" for i in range(40) if i != 5
    }
