"""Sources over a scripted engine, for the tests of sources: no model is needed to know what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from posttrain.data.base import Task
from posttrain.data.render import Template
from posttrain.randomness import permutation
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import build_grader
from posttrain.training.batch_fields import BatchFields
from posttrain.training.build import Prompting, build_rollout_source
from posttrain.training.checks import resolve_components
from posttrain.training.sources.rollouts import RolloutSource
from posttrain.types import Batch, Example, Message, Rollout
from posttrain.untrusted import declare_code
from small_runs import make_recipe

DIGITS = "0123456789"


def draw_indices(seed: int, purpose: str, start: int, count: int, size: int) -> list[int]:
    """Items ``start .. start + count`` of an endless sequence of shuffled epochs over ``size`` items."""
    orders = [permutation(seed, purpose, epoch, size).tolist() for epoch in range((start + count) // size + 1)]
    return [item for order in orders for item in order][start : start + count]


def sums(size: int, long: Sequence[int] = ()) -> Task:
    """Items whose solutions differ in length; those in ``long`` have long prompts."""
    examples = []
    for i in range(size):
        question = f"What is {i} plus 1?" + " Think well." * (20 if i in long else 0)
        solution = f"{i} + 1 = {i + 1}." * (1 + i % 3)
        examples.append(Example(f"sum/{i}", (Message("user", question),), str(i + 1), solution))
    return Task("sums", "train", examples, dropped={"blank": 2})


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    """The token ids of every row, without padding."""
    return [tuple(batch.tokens[b, : int(batch.lengths[b])].tolist()) for b in range(batch.num_rows)]


def same_batch(left: Batch, right: Batch) -> bool:
    """Return whether two batches are the same, bit for bit and type for type."""
    fixed = ("tokens", "lengths", "mask", "group", "prefix")
    pairs = [(getattr(left, name), getattr(right, name)) for name in fixed]
    pairs += [(left.fields[name], right.fields.get(name)) for name in left.fields]
    return (
        left.fields.keys() == right.fields.keys()
        and left.rows_per_unit == right.rows_per_unit
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    )


def last_digit(text: str) -> float:
    """A reward: the digit that a scripted answer consists of."""
    return float(text[-1])


def always_the_same(text: str) -> float:
    """A reward without differences."""
    return 0.3


def scripted_digits(tokenizer: Any) -> FakeEngine:
    """Answers with one digit, drawn by the key, and the end token."""
    return FakeEngine([[tokenizer.encode(d)[-1], tokenizer.eos_token_id] for d in DIGITS], logprob=-2.0)


def mostly_uniform(tokenizer: Any, varied: Callable[[tuple[int, ...]], bool]) -> FakeEngine:
    """Prompts for which ``varied`` is true get different answers, the others always a 5."""
    digits = [tokenizer.encode(d)[-1] for d in DIGITS]

    def answer(prompt: tuple[int, ...], key: int) -> list[int]:
        return [digits[key % 10] if varied(prompt) else digits[5], tokenizer.eos_token_id]

    return FakeEngine(answer)


def sampled(
    tokenizer: Any,
    template: Template,
    task: Task,
    *,
    engine: FakeEngine | None = None,
    reward: str = "last_digit",
    **changes: Any,
) -> RolloutSource:
    """A source over a scripted engine, with the streams that need no model."""
    recipe: Recipe = make_recipe("grpo", **changes)
    declare_code(f"small_sources:{reward}")
    grader = build_grader([RewardComponent(name=f"small_sources:{reward}")], template)
    words = resolve_components(recipe)
    needs = words.needs - {"ref_logprobs", "kl_baseline"}
    fields = BatchFields(needs, recipe, SimpleNamespace(replay=None), 1024)  # type: ignore[arg-type]
    engine = engine or scripted_digits(tokenizer)
    return build_rollout_source(words, task, Prompting(tokenizer, 1024, _row_limit(recipe), grader), engine, fields)


def _row_limit(recipe: Recipe) -> int:
    assert recipe.rollout is not None
    return recipe.rollout.within(1024)


def prompts_drawn(source: RolloutSource, cycle: int, rounds: int) -> list[int]:
    """Return the prompts of a batch of several rounds: the first as always, the others in orders of their own."""
    size = source.options.num_prompts
    start = cycle * (source.options.max_rounds - 1) * size
    further = draw_indices(source.seed, "further prompts", start, (rounds - 1) * size, source.num_examples)
    return prompts_at(source, cycle * size, size) + further


def prompts_at(source: RolloutSource, start: int, count: int) -> list[int]:
    """Return the prompts at places ``start`` and following of the source's order."""
    return draw_indices(source.seed, "prompts", start, count, source.num_examples)


def groups_of(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    """Rollouts by prompt."""
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def uniform(rollouts: Sequence[Rollout]) -> bool:
    """Return whether all rewards are equal."""
    return len({r.reward for r in rollouts}) == 1
