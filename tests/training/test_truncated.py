"""Answers that a limit cut off: masked out of the loss and of all that divides it, or paid a penalty."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_sources import groups_of, rows_of, same_batch, sampled, sums

from closeness import OF_EMBEDDED, allclose, approx, assert_close, rounding
from posttrain import registry
from posttrain.recipes.recipe import Recipe
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.training.build import prepare
from posttrain.training.sources import TrainBatch
from posttrain.training.sources.rollouts import ALL_MASKED
from posttrain.training.step import accumulate
from posttrain.types import Batch
from posttrain.untrusted import declare_code
from small_runs import one_layer_recipe

# Answers of a group of four, whose reward is the last digit: of three tokens at most, so that the third is cut off.
GROUP = ("7.", "3.", "9999", "11.")
FOUR = {"num_prompts": 1, "group_size": 4, "max_tokens": 3, "mask_truncated": True}


def in_order(tokenizer: Any, *groups: tuple[str, ...]) -> FakeEngine:
    """The answers of these groups, prompt by prompt in the order in which they are sampled; a point is the end."""
    digits = {d: tokenizer.encode(d)[-1] for d in "0123456789"} | {".": tokenizer.eos_token_id}
    answers = [text for group in groups for text in group]
    return FakeEngine(lambda prompt, key: [digits[d] for d in answers.pop(0)], logprob=-2.0)


def advantages_of(batch: Batch) -> list[list[float]]:
    return [row[mask].tolist() for row, mask in zip(batch.field("advantages"), batch.mask, strict=True)]


@pytest.mark.parametrize(
    ("aggregate", "weights"),
    [
        ("token_mean", [[1 / 7] * 2, [1 / 7] * 2, [1 / 7] * 3]),
        ("sequence_mean", [[1 / 6] * 2, [1 / 6] * 2, [1 / 9] * 3]),
        ({"name": "constant", "length": 3}, [[1 / 9] * 2, [1 / 9] * 2, [1 / 9] * 3]),
    ],
)
def test_what_is_masked_counts_in_no_denominator_and_in_the_baseline(
    tokenizer, template, aggregate: Any, weights: list[list[float]]
) -> None:
    words = {"advantage": "centered", "aggregate": aggregate, "objective": "reinforce"}
    source = sampled(tokenizer, template, sums(1), engine=in_order(tokenizer, GROUP), rollout=FOUR, **words)
    draw = source(1)
    assert [(r.reward, r.completion.finish) for r in draw.rollouts] == [
        (7.0, "stop"), (3.0, "stop"), (9.0, "length"), (1.0, "stop"),
    ]  # fmt: skip
    assert [r.advantage for r in draw.rollouts] == [2.0, -2.0, 4.0, -4.0]  # the mean of all four is 5
    assert draw.batch is not None
    assert advantages_of(draw.batch) == [[2.0] * 2, [-2.0] * 2, [-4.0] * 3]
    info = {name: draw.metrics[name] for name in ("masked", "truncated", "selected", "reward")}
    assert info == {"masked": 0.25, "truncated": 0.25, "selected": 0.75, "reward": 5.0}
    word = registry.find("aggregation", name_of(aggregate)).bind(options_of(aggregate))
    each = word(draw.batch.mask)
    rows = [row[mask].tolist() for row, mask in zip(each, draw.batch.mask, strict=True)]
    assert rows == [approx(row) for row in weights]


@pytest.mark.parametrize("words", [{"objective": "reinforce", "advantage": "centered"}, {"objective": "grpo"}])
def test_batch_of_which_all_is_masked_names_the_option_that_masked_it(
    tokenizer, template, words: dict[str, Any]
) -> None:
    cut = ("9999", "8888", "7777", "6666")
    source = sampled(tokenizer, template, sums(1), engine=in_order(tokenizer, cut), rollout=FOUR, **words)
    draw = source(1)
    assert (draw.batch, draw.metrics["masked"], draw.metrics["selected"]) == (None, 1.0, 0.0)
    assert source.take_warnings() == [ALL_MASKED]
    assert "rollout.mask_truncated" in ALL_MASKED
    assert "rollout.select" not in ALL_MASKED


def name_of(word: Any) -> str:
    return word if isinstance(word, str) else word["name"]


def options_of(word: Any) -> dict[str, Any]:
    return {} if isinstance(word, str) else {k: v for k, v in word.items() if k != "name"}


# --- the gradient ---

TEXTS = [" 7 </answer>", " it is 12 </think> <answer> 3 </answer>", " 9", " 4567890123456789012"]
WORDS: dict[str, dict[str, Any]] = {
    "reinforce": {"objective": "reinforce", "advantage": "centered", "aggregate": "token_mean"},
    "ppo": {"objective": "ppo", "advantage": {"name": "gae", "bootstrap": True}},
    "dpo": {"objective": "dpo"},
}


def cut_recipe(words: str, *, masks: bool, **train: Any) -> Recipe:
    declare_code("choosing_engine:choosing")
    engine = {"name": "choosing_engine:choosing", "texts": TEXTS}
    rollout = {"engine": engine, "num_prompts": 4, "group_size": 4, "max_tokens": 12, "mask_truncated": masks}
    return one_layer_recipe("grpo", rollout=rollout, train=train, **WORDS[words])


def gradients(recipe: Recipe, batch: Batch | None = None) -> tuple[TrainBatch, float, list[torch.Tensor]]:
    """Return the gradients of the first batch, or of this one."""
    parts = prepare(recipe)
    draw = parts.source(1)
    batch = draw.batch if batch is None else batch
    assert batch is not None
    loss, _ = accumulate(parts.learning(), batch, recipe.train)
    return draw, loss, [p.grad for _, p in parts.parameters if p.grad is not None]


def check_gradients(ours: list[torch.Tensor], theirs: list[torch.Tensor], batch: Batch) -> None:
    """Compare sums over tokens: what rounds the largest of them comes back to every parameter before it."""
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    bound = rounding(torch.float32, size=largest, terms=int(batch.lengths.sum()))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, atol=bound, rtol=0)


@pytest.mark.parametrize("words", ["ppo", "dpo"])
def test_the_batch_is_the_one_without_the_masked_rows(words: str) -> None:
    """Credit, whitening included, is computed over all; streams and gradient are those of the rows that are left."""
    whole, _, _ = gradients(cut_recipe(words, masks=False))
    assert whole.batch is not None
    by_row = {r.prompt_ids + r.completion.ids: r.completion.finish for r in whole.rollouts}
    ended = [by_row[row] == "stop" for row in rows_of(whole.batch)]
    each = whole.batch.rows_per_unit
    kept = [b for b in range(len(ended)) if all(ended[b // each * each : b // each * each + each])]
    assert 1 < len(kept) < len(ended)
    draw, loss, ours = gradients(cut_recipe(words, masks=True))
    assert draw.batch is not None
    rest = whole.batch.select(kept)
    for name in ("tokens", "lengths", "mask", "group", "prefix"):
        assert torch.equal(getattr(draw.batch, name), getattr(rest, name)), name
    assert draw.batch.fields.keys() == rest.fields.keys()
    for name, stream in rest.fields.items():  # a pass over other rows differs in the last bits
        assert allclose(draw.batch.fields[name], stream, atol=OF_EMBEDDED), name
    assert draw.metrics["masked"] == 1 - len(kept) / len(ended)
    _, expected, theirs = gradients(cut_recipe(words, masks=False), rest)
    assert loss == approx(expected, abs=OF_EMBEDDED)
    assert len(ours) == len(theirs) > 0
    check_gradients(ours, theirs, whole.batch)
    assert any(float(a.abs().sum()) > 0 for a in ours)
    _, in_pieces, of_pieces = gradients(cut_recipe(words, masks=True, micro_batch_rows=each))
    assert in_pieces == approx(loss, abs=OF_EMBEDDED)
    check_gradients(of_pieces, ours, whole.batch)


def test_the_gradient_is_worked_by_hand() -> None:
    recipe = cut_recipe("reinforce", masks=True)
    parts = prepare(recipe)
    draw = parts.source(1)
    assert draw.batch is not None
    loss, _ = accumulate(parts.method, draw.batch, recipe.train)
    ours = [p.grad.clone() for p in parts.model.parameters()]
    parts.model.zero_grad()
    groups = groups_of(draw.rollouts, 4)
    total = sum(r.completion.num_own for r in draw.rollouts if r.completion.finish == "stop")
    by_hand = torch.zeros(())
    for group in groups:
        mean = sum(r.reward for r in group) / 4
        for rollout in group:
            if rollout.completion.finish == "stop":
                ids, start = [*rollout.prompt_ids, *rollout.completion.ids], len(rollout.prompt_ids)
                logits = parts.model(torch.tensor([ids])).logits[0, start - 1 : -1] / 1.5
                logprobs = logits.log_softmax(-1)[range(len(ids) - start), ids[start:]]
                by_hand = by_hand - (rollout.reward - mean) * logprobs.sum() / total
    by_hand.backward()
    assert loss == approx(float(by_hand.detach()), abs=OF_EMBEDDED)
    check_gradients(ours, [p.grad for p in parts.model.parameters()], draw.batch)


# --- nothing left ---


def test_groups_are_drawn_until_something_is_left_of_them(tokenizer, template) -> None:
    """A group whose rewards differ is as good as uniform when all of it was cut off."""
    rollout = FOUR | {"num_prompts": 2, "group_size": 2, "drop_uniform_groups": True}
    engine = in_order(tokenizer, ("9999", "1111"), ("5.", "5."), ("2.", "7."), ("8.", "6666"))
    draw = sampled(tokenizer, template, sums(9), engine=engine, rollout=rollout)(1)
    assert draw.metrics["accepted_groups"] == 0.5
    assert draw.batch is not None
    assert rows_of(draw.batch) == [r.prompt_ids + r.completion.ids for r in draw.rollouts[4:7]]
    assert draw.metrics["masked"] == 0.25


def test_minibatches_and_a_resumed_run_are_of_what_is_left(tokenizer, template) -> None:
    rollout = FOUR | {"num_prompts": 2, "group_size": 2}
    train = {"ppo_epochs": 2, "num_minibatches": 2}

    def make() -> Any:
        engine = in_order(tokenizer, ("1.", "2."), ("3333", "4444"), *[("5.", "6.")] * 2)
        return sampled(tokenizer, template, sums(9), engine=engine, rollout=rollout, train=train)

    source, resumed = make(), make()
    draws = [source(1), source(2)]
    sizes = sorted(0 if draw.batch is None else draw.batch.num_rows for draw in draws)
    assert sizes == [0, 2]  # of the second prompt nothing is left, and it is in no part
    resumed.restore(source.rollout_buffer(2), json.loads(json.dumps(source.state())))
    for step in (3, 4):
        left, right = source(step).batch, resumed(step).batch
        assert (left is None) == (right is None)
        assert left is None or same_batch(left, right)
