"""Sources: rows as a function of the step, masks, minibatches, pending batches, dynamic sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_runs import make_recipe
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import UsageError
from posttrain.models.load import TINY
from posttrain.randomness import draw_indices
from posttrain.recipe import Recipe, RewardWord
from posttrain.render import Template, encode_prompt, encode_response
from posttrain.rollout import build_grader
from posttrain.tasks.base import Task
from posttrain.train.sources import RolloutSource, SupervisedSource
from posttrain.types import Batch, Example, Message


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def template() -> Template:
    return registry.find("template", "r1_zero").bind({"preamble": ""})()


def sums(size: int, long: Sequence[int] = ()) -> Task:
    """Items whose solutions differ in length; those in ``long`` have long prompts."""
    examples = []
    for i in range(size):
        question = f"What is {i} plus 1?" + " Think well." * (20 if i in long else 0)
        solution = f"{i} + 1 = {i + 1}." * (1 + i % 3)
        examples.append(Example(f"sum/{i}", (Message("user", question),), str(i + 1), solution))
    return Task("sums", "train", examples, dropped={"blank": 2})


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(batch.tokens[b, : int(batch.lengths[b])].tolist()) for b in range(batch.num_rows)]


def same_batch(left: Batch, right: Batch) -> bool:
    fixed = ("tokens", "lengths", "mask", "group", "prefix")
    streams = left.streams.keys() == right.streams.keys()
    return (
        streams
        and all(torch.equal(getattr(left, name), getattr(right, name)) for name in fixed)
        and all(torch.equal(left.streams[name], right.streams[name]) for name in left.streams)
    )


# --- supervised ---


def supervised(tokenizer, template, task: Task, context_tokens: int = 1024, **changes: Any) -> SupervisedSource:
    return SupervisedSource(make_recipe("sft", **changes), task, template, tokenizer, context_tokens)


@pytest.mark.parametrize("train_on", ["response", "all"])
def test_what_is_trained(tokenizer, template, train_on: str) -> None:
    task = sums(6)
    source = supervised(tokenizer, template, task, data={"batch": 6, "train_on": train_on})
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
    source = supervised(tokenizer, template, task, data={"batch": 4})
    stream = [rows_of(source(step).batch) for step in range(1, 6)]
    again = supervised(tokenizer, template, task, data={"batch": 4})
    assert [rows_of(again(step).batch) for step in (4, 2, 5, 1, 3)] == [stream[i] for i in (3, 1, 4, 0, 2)]
    flat = [row for batch in stream for row in batch]
    assert len(set(flat[:10])) == len(set(flat[10:])) == 10  # every row once an epoch, epochs in other orders
    assert flat[:10] != flat[10:]
    other = supervised(tokenizer, template, task, data={"batch": 4}, train={"seed": 1})
    assert rows_of(other(1).batch) != stream[0]
    assert source.pending(3) is None


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
        ({"data": {"max_tokens": limit}}, 1024, f"longer than data.max_tokens={limit}"),
        ({"data": {"max_tokens": 999}}, limit, f"longer than the model's context={limit}"),
    ):
        source = supervised(tokenizer, template, task, context, **change)
        assert source.dropped == {"blank": 2, name: too_long}
        assert source.num_examples == 9 - too_long
        seen = {n for step in range(1, 10) for n in source(step).batch.lengths.tolist()}
        assert seen == kept
    prompts = sorted(len(encode_prompt(tokenizer, template, e.messages)) for e in task.examples)
    limited = supervised(tokenizer, template, task, prompt={"max_prompt_tokens": prompts[-2]})
    assert limited.dropped == {"blank": 2, f"prompt longer than {prompts[-2]} tokens": 1}
    with pytest.raises(UsageError, match=r"task 'sums': no row is left.*longer than data\.max_tokens=2': 9"):
        supervised(tokenizer, template, task, data={"max_tokens": 2})


# --- rollouts ---

DIGITS = "0123456789"


def scripted_digits(tokenizer) -> ScriptedEngine:
    """Answers with one digit, drawn by the key, and the end token."""
    return ScriptedEngine([[tokenizer.encode(d)[-1], tokenizer.eos_token_id] for d in DIGITS], logprob=-2.0)


def last_digit(text: str) -> float:
    return float(text[-1])


def always_the_same(text: str) -> float:
    return 0.3


def sampled(
    tokenizer, template, task: Task, *, engine=None, reward: str = "last_digit", **changes: Any
) -> RolloutSource:
    """A source over a scripted engine; ``annotated`` counts the calls of its annotator."""
    recipe: Recipe = make_recipe("grpo", **changes)
    grader = build_grader([RewardWord(name=f"test_sources:{reward}")], template)
    assert recipe.advantage is not None
    advantage = registry.find("advantage", recipe.advantage.name).bind(recipe.advantage.options)

    def annotate(batch: Batch) -> Batch:
        batch.streams["old_logprobs"] = batch.streams["sampler_logprobs"]
        return batch

    engine = engine or scripted_digits(tokenizer)
    return RolloutSource(recipe, task, grader, tokenizer, engine, 1024, advantage, annotate)


def prompts_at(source: RolloutSource, start: int, count: int) -> list[int]:
    return draw_indices(source.seed, "prompts", start, count, source.num_examples)


def test_rows_masks_and_streams_of_a_rollout_batch(tokenizer, template) -> None:
    task = sums(9)
    source = sampled(tokenizer, template, task, rollout={"prompts": 2, "group": 3}, advantage={"name": "centered"})
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
        assert rollout.advantage == pytest.approx(expected, abs=1e-12)
        assert batch.streams["advantages"][b].tolist() == pytest.approx([expected if on else 0.0 for on in trained])
        assert batch.streams["sampler_logprobs"][b].tolist() == [-2.0 if on else 0.0 for on in trained]
    assert draw.metrics["reward"] == pytest.approx(sum(float(r.text[-1]) for r in draw.rollouts) / 6)


def test_rollouts_are_a_function_of_seed_and_step(tokenizer, template) -> None:
    task = sums(9)
    first, second = (sampled(tokenizer, template, task, rollout={"prompts": 4, "group": 2}) for _ in range(2))
    draws = [first(step) for step in (1, 2, 3)]
    later = second(3)
    assert same_batch(later.batch, draws[2].batch)
    assert later.rollouts == draws[2].rollouts
    stream = [r.prompt_index for draw in draws for r in draw.rollouts if r.rollout_index == 0]
    assert stream == prompts_at(first, 0, 12)
    assert sorted(stream[:9]) == list(range(9))
    epochs = [r.epoch for draw in draws for r in draw.rollouts if r.rollout_index == 0]
    assert epochs == [0] * 9 + [1] * 3  # the third batch reaches into the next epoch
    keys = [key for call in first.engine.calls for row in call[1] for key in row]  # type: ignore[attr-defined]
    assert len(set(keys)) == len(keys) == 24


def test_prompts_that_are_too_long_are_dropped_and_counted(tokenizer, template) -> None:
    task = sums(9, long=(1, 4))
    limit = len(encode_prompt(tokenizer, template, task.examples[0].messages))
    source = sampled(tokenizer, template, task, prompt={"max_prompt_tokens": limit}, rollout={"prompts": 7})
    assert source.dropped == {"blank": 2, f"prompt longer than {limit} tokens": 2}
    assert sorted({r.prompt_index for r in source(1).rollouts}) == [0, 2, 3, 5, 6, 7, 8]
    with pytest.raises(UsageError, match=r"task 'sums': no prompt is left to sample from; dropped: .*: 9"):
        sampled(tokenizer, template, task, prompt={"max_prompt_tokens": 3})


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 3), (2, 3), (3, 1)])
def test_every_prompt_is_in_one_minibatch_of_each_epoch(tokenizer, template, epochs: int, minibatches: int) -> None:
    source = sampled(
        tokenizer,
        template,
        sums(40),
        rollout={"prompts": 6, "group": 2},
        train={"epochs": epochs, "minibatches": minibatches},
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


def test_a_pending_batch_comes_back_bit_for_bit(tokenizer, template) -> None:
    changes: dict[str, Any] = {"rollout": {"prompts": 4, "group": 3}, "train": {"epochs": 2, "minibatches": 2}}
    source = sampled(tokenizer, template, sums(30), **changes)
    for step in (1, 2):
        source(step)
    pending = source.pending(2)
    assert pending is not None
    assert {name for name in pending if name.startswith("stream.")} == {
        "stream.advantages", "stream.sampler_logprobs", "stream.old_logprobs",
    }  # fmt: skip
    resumed = sampled(tokenizer, template, sums(30), **changes)
    resumed.restore({name: tensor.clone() for name, tensor in pending.items()})
    for step in (3, 4, 5):
        assert same_batch(resumed(step).batch, source(step).batch), step
    assert len(resumed.engine.calls) == 1  # type: ignore[attr-defined] # the batch of step 5 alone
    assert source.pending(4) is None
    assert source.pending(8) is None
    resumed.restore(None)


# --- dynamic sampling ---


def mostly_uniform(tokenizer, varied: Callable[[tuple[int, ...]], bool]) -> ScriptedEngine:
    """Prompts for which ``varied`` is true get different answers, the others always a 5."""
    digits = [tokenizer.encode(d)[-1] for d in DIGITS]

    def answer(prompt: tuple[int, ...], key: int) -> list[int]:
        return [digits[key % 10] if varied(prompt) else digits[5], tokenizer.eos_token_id]

    return ScriptedEngine(answer)


def uniform(rollouts: Sequence[Any]) -> bool:
    return len({r.reward for r in rollouts}) == 1


def groups_of(rollouts: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def test_groups_are_drawn_until_enough_of_them_vary(tokenizer, template) -> None:
    task = sums(50)
    even = {tuple(encode_prompt(tokenizer, template, e.messages)) for i, e in enumerate(task.examples) if i % 2 == 0}
    rollout = {"prompts": 4, "group": 6, "drop_uniform_groups": True, "max_rounds": 8}
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
    assert draw.metrics["accepted_groups"] == 4 / len(groups)
    # what is reported is about all that was sampled, else the reward would be that of the survivors
    assert draw.metrics["uniform_groups"] == pytest.approx(1 - len(varied) / len(groups))
    assert draw.metrics["reward"] == pytest.approx(sum(r.reward for r in draw.rollouts) / len(draw.rollouts))
    # the next batch does not depend on how many rounds this one took
    assert [g[0].prompt_index for g in groups] == prompts_at(source, 0, 4 * rounds)
    following = groups_of(source(2).rollouts, 6)
    assert [g[0].prompt_index for g in following] == prompts_at(source, 32, len(following))


def test_the_bound_fills_the_batch_with_uniform_groups(tokenizer, template) -> None:
    task = sums(50)
    source = sampled(
        tokenizer,
        template,
        task,
        reward="always_the_same",
        rollout={"prompts": 3, "group": 7, "drop_uniform_groups": True, "max_rounds": 2},
    )
    draw = source(1)
    assert len(source.engine.calls) == 2  # type: ignore[attr-defined]
    assert len(draw.rollouts) == 2 * 3 * 7
    assert draw.metrics["accepted_groups"] == 0.0
    assert draw.metrics["uniform_groups"] == 1.0
    assert draw.batch.num_rows == 21
    assert draw.batch.streams["advantages"].abs().max() == 0.0  # they add no gradient
    assert draw.metrics["advantage_std"] == 0.0


def test_without_dynamic_sampling_one_round_is_drawn(tokenizer, template) -> None:
    source = sampled(tokenizer, template, sums(50), reward="always_the_same", rollout={"prompts": 3, "group": 2})
    draw = source(1)
    assert len(draw.rollouts) == 6
    assert "accepted_groups" not in draw.metrics
    assert draw.metrics["uniform_groups"] == 1.0


def flattening(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.mean(dim=1)


def test_an_advantage_of_another_shape_is_refused(tokenizer, template) -> None:
    source = sampled(tokenizer, template, sums(9), advantage={"name": "test_sources:flattening"})
    with pytest.raises(UsageError, match=r"advantage: .*shape \(4,\) for rewards of shape \(4, 4\)"):
        source(1)
