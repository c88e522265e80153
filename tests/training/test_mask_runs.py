"""Masks in a run: no split changes them, their divisor is what the recipe says, and a run with them resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_sources import sampled, sums
from test_truncated import FOUR, GROUP, in_order

from closeness import OF_EMBEDDED, approx, assert_close, rounding
from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.training.build import prepare
from posttrain.training.checks import resolve_components
from posttrain.training.step import accumulate
from posttrain.types import Batch
from posttrain.untrusted import declare_code
from refusing import refuses
from small_runs import one_layer_recipe, run, saved_tensors, untimed

FEW = {"max_tokens": 8}
OFF_POLICY = {"name": "off_policy_sequence", "threshold": 1e-4}
METHODS: dict[str, dict[str, Any]] = {
    "top_entropy": {"masks": ["top_entropy"]},
    "kept tokens alone": {"masks": [{"name": "top_entropy", "divisor": "kept"}], "aggregate": "sequence_mean"},
    "both": {"masks": ["top_entropy", OFF_POLICY], "regularize": {"kl_coef": 0.1}},
    "clip_cov": {"objective": {"name": "clip_cov", "share": 0.2, "cov_low": 0.01}},
    "kl_cov": {"objective": {"name": "kl_cov", "share": 0.2}},
}


def whole_recipe(changes: Mapping[str, Any], **train: Any) -> Recipe:
    train = {"num_minibatches": 2, "ppo_epochs": 2, "steps": 3, "lr": 1e-3} | train
    return one_layer_recipe("grpo", model={"dtype": "fp64"}, rollout=FEW, train=train, **changes)


def third_update(changes: Mapping[str, Any], **train: Any) -> tuple[Batch, list[torch.Tensor]]:
    """The batch and the gradients of the third update of a batch of answers, after two with one split."""
    recipe = whole_recipe(changes)
    parts = prepare(recipe)
    batch: Batch | None = None
    for step in (1, 2, 3):
        options = recipe.train.model_copy(update=train) if step == 3 else recipe.train
        if step == 3:
            parts.source.batch_fields.recipe = recipe.model_copy(update={"train": options})
        batch = parts.source(step).batch
        assert batch is not None
        accumulate(parts.learning(), batch, options)
        if step < 3:
            parts.optimizer.step()
            parts.optimizer.zero_grad()
    assert batch is not None
    return batch, [p.grad for _, p in parts.parameters if p.grad is not None]


@pytest.mark.parametrize("method", METHODS)
def test_masks_do_not_depend_on_the_split_into_micro_batches(method: str) -> None:
    """In float64, and the numbers that decide rounded to fp32: the same tokens, and gradients equal up to rounding."""
    batch, gradients = third_update(METHODS[method])
    other, others = third_update(METHODS[method], micro_batch_rows=1)
    names = {"unmasked", "counted", "clip_cov_tokens", "kl_cov_tokens"} & batch.fields.keys()
    assert names
    for name in names:
        assert torch.equal(batch.field(name), other.field(name)), name
        share = float(batch.field(name)[batch.mask].mean())
        assert 0.0 < share < 1.0, name
    largest = max(float(one.abs().max()) for one in gradients)
    assert largest > 1e-6
    bound = rounding(torch.float32, size=largest, terms=int(batch.mask.sum()))  # fields are fp32
    for one, two in zip(gradients, others, strict=True):
        assert_close(one, two, atol=bound, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_run_with_masks_resumes_to_the_bit(method: str, tmp_path: Path) -> None:
    changes = METHODS[method] | {"rollout": FEW}
    recipe = one_layer_recipe("grpo", train={"num_minibatches": 2, "ppo_epochs": 2, "steps": 5}, **changes)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "stopped", recipe, stop_after=2)
    run(tmp_path / "stopped", recipe, resume=True)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")
    whole, again = (saved_tensors(tmp_path / name, 5) for name in ("whole", "stopped"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_draw_of_clip_cov_is_a_function_of_seed_step_and_row() -> None:
    recipe = whole_recipe(METHODS["clip_cov"])
    parts = prepare(recipe)
    fields = parts.source.batch_fields
    batch = parts.source(1).batch
    assert batch is not None
    drawn = [fields.before_step(batch, step).field("clip_cov_tokens") for step in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], batch.field("clip_cov_tokens"))


# --- the divisor ---


def masked_half(policy_entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Leaves out every second row."""
    kept = torch.zeros_like(mask)
    kept[::2] = True
    return kept


def no_truth(policy_entropy: torch.Tensor) -> torch.Tensor:
    return policy_entropy


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", {"name": "constant", "length": 8}])
def test_divisor_kept_is_the_loss_of_the_batch_without_the_masked_rows(aggregate: Any) -> None:
    declare_code("test_mask_runs:masked_half")
    losses: dict[str, float] = {}
    for divisor in ("kept", "all"):
        mask = {"name": "test_mask_runs:masked_half", "divisor": divisor}
        recipe = one_layer_recipe("grpo", rollout=FEW, masks=[mask], aggregate=aggregate, objective="reinforce")
        parts = prepare(recipe)
        batch = parts.source(1).batch
        assert batch is not None
        losses[divisor], metrics = accumulate(parts.learning(), batch, recipe.train)
        left_out = float(batch.mask[1::2].sum() / batch.mask.sum())
        assert metrics["masked_tokens"] == approx(left_out)
        _, metrics = accumulate(parts.learning(), batch, recipe.train, idle_rows="skip")
        assert metrics["computed_rows"] <= batch.num_rows / 2, "rows that a mask leaves out are not computed ..."
        assert metrics["masked_tokens"] == approx(left_out), "... and counted"
    plain = one_layer_recipe("grpo", rollout=FEW, aggregate=aggregate, objective="reinforce")
    parts = prepare(plain)
    batch = parts.source(1).batch
    assert batch is not None
    half, _ = accumulate(parts.learning(), batch.select(range(0, batch.num_rows, 2)), plain.train)
    assert losses["kept"] == approx(half, rel=1e-5)
    share = 1 - left_out if aggregate == "token_mean" else 0.5
    assert losses["all"] == approx(half * share, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "kept", "of_all"),
    [
        ("token_mean", [1 / 7, 1 / 7, 1 / 7], [1 / 10, 1 / 10, 1 / 10]),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 9], [1 / 8, 1 / 8, 1 / 12]),
        ({"name": "constant", "length": 3}, [1 / 9] * 3, [1 / 12] * 3),
    ],
)
def test_truncated_divisor_counts_answers_that_are_masked(
    tokenizer, template, aggregate: Any, kept: list[float], of_all: list[float]
) -> None:
    """Answers of 2, 2, 3 and 3 tokens, the third of which is cut off: it has no loss, and ``all`` counts it."""
    for divisor, expected in (("kept", kept), ("all", of_all)):
        words = {"advantage": "centered", "aggregate": aggregate, "objective": "reinforce"}
        rollout = FOUR | {"truncated_divisor": divisor}
        source = sampled(tokenizer, template, sums(1), engine=in_order(tokenizer, GROUP), rollout=rollout, **words)
        batch = source(1).batch
        assert batch is not None
        entry = {"name": aggregate} if isinstance(aggregate, str) else dict(aggregate)
        weigh = registry.find("aggregation", entry.pop("name")).bind(entry)
        weights = weigh(batch.mask)
        rows = [float(row[mask][0]) for row, mask in zip(weights, batch.mask, strict=True)]
        if divisor == "all":
            assert batch.field("left_out").tolist() == [0.0, 0.0, 1.0, 0.0]
            del rows[2]
        assert rows == approx(expected)


def test_rows_that_are_only_divided_by_scale_the_loss_and_nothing_else() -> None:
    """10 of 32 rows are trained on: with ``all`` the loss is 10/32 of that with ``kept``."""
    for aggregate in ("sequence_mean", {"name": "constant", "length": 8}):
        recipe = one_layer_recipe("grpo", rollout=FEW | {"num_prompts": 8}, aggregate=aggregate)
        parts = prepare(recipe)
        batch = parts.source(1).batch
        assert batch is not None
        assert batch.num_rows == 32
        kept, _ = accumulate(parts.learning(), batch.select(range(22, 32)), recipe.train)
        batch.fields["left_out"] = (torch.arange(32) < 22).float()
        of_all, metrics = accumulate(parts.learning(), batch, recipe.train, idle_rows="skip")
        largest = float(batch.field("advantages").abs().max())
        bound = OF_EMBEDDED * largest * 10 / 32  # of a ratio near 1, times its advantage and the weight of its row
        assert abs(kept) > 100 * bound
        assert of_all == approx(kept * 10 / 32, abs=bound)
        assert metrics["computed_rows"] <= 10


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": "ppo"}, ("masks", "ppo")),
        ({"objective": "dpo"}, ("masks", "dpo")),
        ({"objective": "cross_entropy"}, ("masks", "cross_entropy")),
    ],
)
def test_masks_refuse_objectives_without_a_policy_term_of_tokens(changes: dict[str, Any], named: tuple[str]) -> None:
    recipe = one_layer_recipe("grpo", masks=["top_entropy"], **changes)
    with refuses(RecipeError, *named):
        resolve_components(recipe)


def test_masks_refuse_bad_keys_by_name() -> None:
    base = one_layer_recipe("grpo").dump()
    for masks, named in (
        ([{"name": "top_entropy", "share": 0}], "masks.0.share"),
        ([{"name": "top_entropy", "divisor": "rows"}], "masks.0.divisor"),
        ([{"name": "top_entropy", "sare": 0.1}], "masks.0.sare"),
        ([{"name": "top_entropi"}], "top_entropy"),
    ):
        with pytest.raises(UsageError, match=named.replace(".", r"\.")):
            validate_recipe(base | {"masks": masks}).resolve()
    with refuses(RecipeError, "masks", "rollout"):
        one_layer_recipe("sft", masks=["top_entropy"])


def test_mask_that_gives_no_truth_values_is_refused() -> None:
    declare_code("test_mask_runs:no_truth")
    recipe = one_layer_recipe("grpo", rollout=FEW, masks=["test_mask_runs:no_truth"])
    with refuses(UsageError, "masks", "torch.bool"):
        prepare(recipe).source(1)
