"""AOT: the ranks are of the whole batch of an update, whatever its micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from closeness import approx, assert_close, rounding
from posttrain.algorithms.masks import shift_by_rank
from posttrain.training.build import prepare
from posttrain.training.step import accumulate
from posttrain.types import Batch
from small_runs import one_layer_recipe


def test_shift_by_rank_by_hand() -> None:
    policy = torch.tensor([3.0, -1.0, 0.5, 2.0])
    reference = torch.tensor([0.0, 4.0, 1.0, -2.0])  # sorted -2, 0, 1, 4: of ranks 3, 0, 1, 2
    assert shift_by_rank(policy, reference).tolist() == [0.0 - 4.0, 4.0 + 2.0, 1.0 - 0.0, -2.0 - 1.0]
    assert shift_by_rank(policy[:1], reference[:1]).tolist() == [0.0]


def second_update(**train: Any) -> tuple[float, list[torch.Tensor], Batch, Any]:
    """Loss, gradients and batch of the second update, after one with a large rate."""
    objective = {"name": "aot", "beta": 0.5, "label_smoothing": 0.1}
    recipe = one_layer_recipe("judged", objective=objective, model={"dtype": "fp64"}, train={"steps": 2, "lr": 1e-2})
    parts = prepare(recipe)
    first = parts.source(1).batch
    assert first is not None
    accumulate(parts.learning(), first, recipe.train)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    batch = parts.source(2).batch
    assert batch is not None
    loss, _ = accumulate(parts.learning(), batch, recipe.train.model_copy(update=train))
    return loss, [p.grad for _, p in parts.parameters if p.grad is not None], batch, parts


def test_aot_is_the_loss_of_sorted_margins_and_does_not_depend_on_the_split() -> None:
    """TRL 1.16.0's ``aot``: both margins sorted over the batch, by autograd through the sort; here pair by pair."""
    loss, gradients, batch, parts = second_update()
    other, others, _, _ = second_update(micro_batch_rows=2)
    assert other == approx(loss, rel=1e-9)
    assert bool((batch.field("transport_shift") != 0).any())
    for p in parts.model.parameters():
        p.grad = None
    logprobs = parts.policy(batch, "none").logprobs
    sums = torch.where(batch.mask, logprobs, 0.0).sum(dim=1)
    reference = torch.where(batch.mask, batch.field("ref_logprobs"), 0.0).double().sum(dim=1)
    delta = (sums[0::2] - sums[1::2]).sort().values - (reference[0::2] - reference[1::2]).sort().values
    expected = (-0.9 * logsigmoid(0.5 * delta) - 0.1 * logsigmoid(-0.5 * delta)).mean()
    expected.backward()
    theirs = [p.grad for _, p in parts.parameters if p.grad is not None]
    assert float(expected) == approx(loss, rel=1e-5)  # fields are fp32
    largest = max(float(one.abs().max()) for one in theirs)
    bound = rounding(torch.float32, size=largest, terms=int(batch.mask.sum()))
    for one, two, three in zip(gradients, others, theirs, strict=True):
        assert_close(one, two, atol=bound, rtol=0)
        assert_close(one, three, atol=bound, rtol=0)
