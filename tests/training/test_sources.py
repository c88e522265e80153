"""Sources: rows as a function of the step, masks, minibatches, rollout buffers, dynamic sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from small_sources import (
    draw_indices,
    groups_of,
    mostly_uniform,
    prompts_at,
    prompts_drawn,
    rows_of,
    sampled,
    sums,
    uniform,
)

from closeness import approx
from posttrain.data.base import Task
from posttrain.data.render import encode_plain, encode_prompt, encode_response
from posttrain.data.render.rows import Shape
from posttrain.errors import RecipeError, UsageError
from posttrain.training.sources.dataset import SupervisedSource
from posttrain.types import Example, Message, Response
from refusing import refuses
from small_runs import make_recipe
from supervised_sources import supervised_source

# --- supervised ---


def supervised(tokenizer, template, task: Task, context_tokens: int = 1024, **changes: Any) -> SupervisedSource:
    return supervised_source(make_recipe("sft", **changes), task, template, tokenizer, context_tokens)


@pytest.mark.parametrize("train_on", ["response", "all"])
def test_what_is_trained(tokenizer, template, train_on: str) -> None:
    task = sums(6)
    source = supervised(tokenizer, template, task, data={"batch_size": 6, "train_on": train_on})
    batch = source(1).batch
    expected = {}
    for item in task.examples:
        prompt = encode_prompt(tokenizer, template, item.messages)
        response = encode_response(tokenizer, template, item)
        assert response[-1] == tokenizer.eos_token_id
        first = len(prompt) if train_on == "response" else 1
        expected[(*prompt, *response)] = first
    assert set(rows_of(batch)) == set(expected)
    for b, ids in enumerate(rows_of(batch)):
        n, first = len(ids), expected[ids]
        trained = batch.mask[b].tolist()
        assert trained == [first <= t < n for t in range(batch.tokens.shape[1])]
        assert trained[n - 1]  # the end token
        assert ids[n - 1] == tokenizer.eos_token_id
    assert len(set(batch.lengths.tolist())) > 1


def test_the_rows_are_a_function_of_seed_and_step(tokenizer, template) -> None:
    task = sums(10)
    source = supervised(tokenizer, template, task, data={"batch_size": 4})
    stream = [rows_of(source(step).batch) for step in range(1, 6)]
    again = supervised(tokenizer, template, task, data={"batch_size": 4})
    assert [rows_of(again(step).batch) for step in (4, 2, 5, 1, 3)] == [stream[i] for i in (3, 1, 4, 0, 2)]
    flat = [row for batch in stream for row in batch]
    assert len(set(flat[:10])) == len(set(flat[10:])) == 10  # every row once an epoch, epochs in other orders
    assert flat[:10] != flat[10:]
    other = supervised(tokenizer, template, task, data={"batch_size": 4}, train={"seed": 1})
    assert rows_of(other(1).batch) != stream[0]
    assert source.rollout_buffer(3) is None


def test_rows_that_are_too_long_are_dropped_and_counted(tokenizer, template) -> None:
    task = sums(9, long=(4,))
    lengths = [
        len(encode_prompt(tokenizer, template, e.messages)) + len(encode_response(tokenizer, template, e))
        for e in task.examples
    ]
    limit = sorted(lengths)[5]
    too_long = sum(n > limit for n in lengths)
    assert 0 < too_long < 9
    kept = {n for n in lengths if n <= limit}
    for change, context, name in (
        ({"data": {"max_length": limit}}, 1024, f"longer than data.max_length={limit}"),
        ({"data": {"max_length": 999}}, limit, f"longer than the model's context={limit}"),
    ):
        source = supervised(tokenizer, template, task, context, **change)
        assert source.dropped == {"blank": 2, name: too_long}
        assert source.num_examples == 9 - too_long
        seen = {n for step in range(1, 10) for n in source(step).batch.lengths.tolist()}
        assert seen == kept
    prompts = sorted(len(encode_prompt(tokenizer, template, e.messages)) for e in task.examples)
    limited = supervised(tokenizer, template, task, prompt={"max_prompt_tokens": prompts[-2]})
    assert limited.dropped == {"blank": 2, f"prompt longer than {prompts[-2]} tokens": 1}
    with refuses(UsageError, "'sums'", "data.max_length"):
        supervised(tokenizer, template, task, data={"max_length": 2})


# --- given answers ---


def answered(size: int) -> Task:
    """Items with two answers each, the better one second; those at 3 and 4 say nothing, that at 5 is long."""
    examples = []
    for i in range(size):
        better, worse = Response(f"It is {i + 1}.", 0.25 * (i + 4)), Response(f"Say {i}, or more.", 0.25)
        if i == 3:
            better = Response(better.text, 0.25)
        if i == 4:
            better = Response(worse.text, 2.0)
        if i == 5:
            worse = Response(worse.text * 30, 0.25)
        steps = (f"{i} and 1. ", f"So {i + 1}.")
        labelled = Response("".join(steps), 0.0, steps, (i % 2, 1))
        question = Message("user", f"What is {i} plus 1?" + " Think." * i)
        examples.append(
            Example(f"given/{i}", (question,), str(i + 1), responses=(worse, better, labelled)[: 2 + i % 2])
        )
    return Task("answered", "train", examples)


def given(tokenizer, template, task: Task, shape: Shape, **changes: Any) -> SupervisedSource:
    return supervised_source(make_recipe("judged", **changes), task, template, tokenizer, 1024, shape=shape)


def test_size_and_scores_say_their_units(tokenizer, template) -> None:
    task = answered(9)
    pairs = given(tokenizer, template, task, "pair", objective="dpo")
    steps = given(tokenizer, template, task, "steps", objective="process")
    judged = given(tokenizer, template, task, "judged", objective="outcome", data={"label_above": 0.5})
    assert pairs.size is None  # one of an example
    assert "tokens are trained" in pairs.trained
    assert steps.size == f"{steps.num_examples} solutions of 9 examples"
    num_steps = sum(len(row.step_labels) for unit in steps.units for row in unit)
    assert steps.trained.startswith(f"{num_steps} labelled steps in {steps.num_examples} solutions")
    assert judged.size == f"{judged.num_examples} answers of 9 examples"
    assert "answers are scored" in judged.trained
    assert "tokens are trained" not in steps.trained + judged.trained
    reward = given(tokenizer, template, task, "pair", objective="bradley_terry")
    assert reward.trained == f"{2 * reward.num_examples} answers are scored, each at its last token"


def encoded(tokenizer, template, item: Example, text: str) -> tuple[tuple[int, ...], int]:
    prompt = encode_prompt(tokenizer, template, item.messages)
    return (*prompt, *encode_plain(tokenizer, text), tokenizer.eos_token_id), len(prompt)


def pairs_task(size: int) -> Task:
    """As ``answered``, without the answers in steps."""
    task = answered(size)
    examples = [Example(e.id, e.messages, e.answer, responses=e.responses[:2]) for e in task.examples]
    return Task(task.name, task.split, examples)


def test_pairs_of_given_answers(tokenizer, template) -> None:
    task = pairs_task(9)
    source = given(tokenizer, template, task, "pair", data={"batch_size": 4, "max_length": 200})
    assert source.dropped == {
        "all responses have the same score": 1,
        "chosen and rejected are the same tokens": 1,
        "longer than data.max_length=200": 1,  # the pair, not the one of its rows that is too long
    }
    kept = [e for i, e in enumerate(task.examples) if i not in (3, 4, 5)]
    assert source.num_examples == 6
    for step in (1, 2, 3):
        places = draw_indices(0, "data", 4 * (step - 1), 4, 6)
        batch = source(step).batch
        assert batch.rows_per_unit == 2
        assert batch.num_rows == 8
        assert batch.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for u, place in enumerate(places):
            worse, better = kept[place].responses
            for b, response in ((2 * u, better), (2 * u + 1, worse)):
                ids, start = encoded(tokenizer, template, kept[place], response.text)
                assert rows_of(batch)[b] == ids
                assert int(batch.prefix[b]) == start
                assert batch.mask[b].tolist() == [start <= t < len(ids) for t in range(batch.mask.shape[1])]
            assert batch.fields["margins"][2 * u : 2 * u + 2].tolist() == [better.score - worse.score] * 2


def test_labels_of_pairs_are_of_the_better_and_the_worse_answer(tokenizer, template) -> None:
    task = pairs_task(4)  # scores 1.0, 1.25, 1.5 against 0.25, and one pair of equal scores
    source = given(tokenizer, template, task, "judged", data={"batch_size": 6})
    batch = source(1).batch
    assert source.num_examples == 6
    assert source.dropped == {"both answers in a pair have the same score": 2}
    assert batch.rows_per_unit == 1
    expected = {}
    for item in task.examples[:3]:
        for response in item.responses:
            ids, start = encoded(tokenizer, template, item, response.text)
            expected[ids] = (start, float(response.score >= 1.0))
    assert set(rows_of(batch)) == set(expected)
    for b, ids in enumerate(rows_of(batch)):
        start, label = expected[ids]
        assert batch.fields["labels"][b] == label
        assert batch.mask[b].tolist() == [start <= t < len(ids) for t in range(batch.mask.shape[1])]
        assert int(batch.prefix[b]) == start  # where its prompt ends: answers to other prompts are put behind it
    assert len(set(batch.group.tolist())) == 6


def rated(*scores: Sequence[float]) -> Task:
    """Items with one answer for each of the scores."""
    examples = [
        Example(f"rated/{i}", (Message("user", "Hi"),), responses=tuple(Response(f"{i} {s}", s) for s in item))
        for i, item in enumerate(scores)
    ]
    return Task("rated", "train", examples)


@pytest.mark.parametrize(
    ("scores", "label_above", "labels"),
    [
        ([(7, 1), (8, 1), (9, 1), (7, 1)], None, [1, 0] * 4),  # a rating of 1 is not the label 1
        ([(9, 7), (2, 1)], 6.5, [1, 1, 0, 0]),
        ([(1,), (0,)], None, [1, 0]),
        ([(1, 1, 0)], None, [1, 1, 0]),
        ([(7,), (3,), (5,)], 5, [1, 0, 0]),
        ([(-1,), (1,)], 0, [0, 1]),
    ],
)
def test_labels_follow_pairs_labels_or_the_threshold(tokenizer, template, scores, label_above, labels) -> None:
    data = {"batch_size": len(labels), "label_above": label_above}
    source = given(tokenizer, template, rated(*scores), "judged", data=data)
    assert [row.score for (row,) in source.units] == labels


@pytest.mark.parametrize(
    ("scores", "label_above", "message"),
    [
        ([(7,), (1,)], None, "data.label_above"),
        ([(7,), (9,)], 10, "data.label_above"),
        ([(1,), (1,)], None, "answers are desirable"),
    ],
)
def test_ratings_without_threshold_and_one_label_are_refused(tokenizer, template, scores, label_above, message) -> None:
    with refuses(RecipeError, message):
        given(tokenizer, template, rated(*scores), "judged", data={"label_above": label_above})


def test_labelled_steps_are_trained_at_their_ends_alone(tokenizer, template) -> None:
    task = answered(4)
    source = given(tokenizer, template, task, "steps", data={"batch_size": 2})
    assert source.dropped == {"no labelled steps": 8}
    assert source.num_examples == 2
    batch = source(1).batch
    by_row = {encoded_steps(tokenizer, template, e): e for e in task.examples if len(e.responses) == 3}
    assert set(rows_of(batch)) == set(by_row)
    for b, ids in enumerate(rows_of(batch)):
        item = by_row[ids]
        steps = item.responses[2].steps
        start = len(encode_prompt(tokenizer, template, item.messages))
        first = start + len(encode_plain(tokenizer, steps[0])) - 1
        second = first + len(encode_plain(tokenizer, steps[1]))
        assert batch.mask[b].nonzero()[:, 0].tolist() == [first, second]
        assert batch.fields["step_labels"][b, [first, second]].tolist() == list(item.responses[2].step_labels)
        assert set(batch.fields) == {"step_labels"}


def encoded_steps(tokenizer, template, item: Example) -> tuple[int, ...]:
    prompt = encode_prompt(tokenizer, template, item.messages)
    steps = (i for step in item.responses[2].steps for i in encode_plain(tokenizer, step))
    return (*prompt, *steps, tokenizer.eos_token_id)


# --- rollouts ---


def test_rows_masks_and_streams_of_a_rollout_batch(tokenizer, template) -> None:
    task = sums(9)
    source = sampled(
        tokenizer, template, task, rollout={"num_prompts": 2, "group_size": 3}, advantage={"name": "centered"}
    )
    draw = source(1)
    batch = draw.batch
    assert [r.prompt_index for r in draw.rollouts] == [p for p in prompts_at(source, 0, 2) for _ in range(3)]
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1]
    for b, rollout in enumerate(draw.rollouts):
        prompt = len(rollout.prompt_ids)
        assert rollout.prompt_ids == tuple(encode_prompt(tokenizer, template, rollout.example.messages))
        assert rows_of(batch)[b] == rollout.prompt_ids + rollout.completion.ids
        assert rollout.completion.ids[-1] == tokenizer.eos_token_id
        trained = [prompt <= t < prompt + 2 for t in range(batch.tokens.shape[1])]
        assert batch.mask[b].tolist() == trained
        assert int(batch.prefix[b]) == prompt
        group = draw.rollouts[3 * (b // 3) : 3 * (b // 3) + 3]
        expected = float(rollout.text[-1]) - sum(float(r.text[-1]) for r in group) / 3
        assert rollout.advantage == approx(expected, abs=1e-12)
        assert batch.fields["advantages"][b].tolist() == approx([expected if on else 0.0 for on in trained])
        assert batch.fields["sampler_logprobs"][b].tolist() == [-2.0 if on else 0.0 for on in trained]
    assert draw.metrics["reward"] == approx(sum(float(r.text[-1]) for r in draw.rollouts) / 6)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 3), (2, 3), (3, 1)])
def test_every_prompt_is_in_one_minibatch_of_each_epoch(tokenizer, template, epochs: int, minibatches: int) -> None:
    source = sampled(
        tokenizer,
        template,
        sums(40),
        rollout={"num_prompts": 6, "group_size": 2},
        train={"ppo_epochs": epochs, "num_minibatches": minibatches},
    )
    updates = epochs * minibatches
    orders = []
    for cycle in range(2):
        first = source(cycle * updates + 1)
        whole = Counter(rows_of(source._batch)) if source._batch is not None else Counter()
        draws = [first, *(source(cycle * updates + u) for u in range(2, updates + 1))]
        assert [draw.fresh for draw in draws] == [True] + [False] * (updates - 1)
        assert [len(draw.rollouts) for draw in draws] == [12] + [0] * (updates - 1)
        assert sum(whole.values()) == 12
        for epoch in range(epochs):
            parts = [draw.batch for draw in draws[epoch * minibatches : (epoch + 1) * minibatches]]
            assert sum((Counter(rows_of(part)) for part in parts), Counter()) == whole
            assert all(part.num_rows == 12 // minibatches for part in parts)
            for part in parts:  # groups stay whole
                assert set(Counter(part.group.tolist()).values()) == {2}
            orders.append(tuple(part.group.tolist()[0] for part in parts))
    assert len(source.engine.calls) == 2  # type: ignore[attr-defined]
    if epochs > 1 and minibatches > 1:
        assert len(set(orders)) > 1  # epochs are cut in different ways


# --- dynamic sampling ---


def test_groups_are_drawn_until_enough_of_them_vary(tokenizer, template) -> None:
    task = sums(50)
    even = {tuple(encode_prompt(tokenizer, template, e.messages)) for i, e in enumerate(task.examples) if i % 2 == 0}
    rollout = {"num_prompts": 4, "group_size": 6, "drop_uniform_groups": True, "max_rounds": 8}
    source = sampled(tokenizer, template, task, engine=mostly_uniform(tokenizer, even.__contains__), rollout=rollout)
    draw = source(1)
    groups = groups_of(draw.rollouts, 6)
    rounds = len(groups) // 4
    assert 1 < rounds <= 8
    varied = [group for group in groups if not uniform(group)]
    # the batch: the first four that vary, in the order in which they were drawn
    expected = [r.prompt_ids + r.completion.ids for group in varied[:4] for r in group]
    assert rows_of(draw.batch) == expected
    assert [[r.advantage is not None for r in group] for group in varied[:4]] == [[True] * 6] * 4
    assert all(r.advantage is None for group in groups for r in group if uniform(group))
    assert draw.metrics["accepted_groups"] == len(varied) / len(groups)
    # what is reported is about all that was sampled, else the reward would be that of the survivors
    assert draw.metrics["uniform_groups"] == approx(1 - len(varied) / len(groups))
    assert draw.metrics["reward"] == approx(sum(r.reward for r in draw.rollouts) / len(draw.rollouts))
    # the next batch does not depend on how many rounds this one took
    assert [g[0].prompt_index for g in groups] == prompts_drawn(source, 0, rounds)
    following = groups_of(source(2).rollouts, 6)
    assert [g[0].prompt_index for g in following] == prompts_drawn(source, 1, len(following) // 4)


def test_the_bound_fills_the_batch_with_uniform_groups(tokenizer, template) -> None:
    task = sums(50)
    source = sampled(
        tokenizer,
        template,
        task,
        reward="always_the_same",
        rollout={"num_prompts": 3, "group_size": 7, "drop_uniform_groups": True, "max_rounds": 2},
    )
    draw = source(1)
    assert len(source.engine.calls) == 2  # type: ignore[attr-defined]
    assert len(draw.rollouts) == 2 * 3 * 7
    assert draw.metrics["accepted_groups"] == 0.0
    assert draw.metrics["uniform_groups"] == 1.0
    assert draw.batch.num_rows == 21
    assert draw.batch.fields["advantages"].abs().max() == 0.0  # they add no gradient
    assert draw.metrics["advantage_std"] == 0.0
