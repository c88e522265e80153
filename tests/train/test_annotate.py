"""Annotation: who computes ``old_logprobs`` and ``ref_logprobs``, and with which weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BASE, make_recipe, run
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.models.load import TINY
from posttrain.recipe import Recipe
from posttrain.train.annotate import needed_streams
from posttrain.train.setup import Parts, prepare
from posttrain.train.update import accumulate, apply_update
from posttrain.types import Batch

LORA = {"adapter": {"rank": 4, "dropout": 0.3}}
TEMPERATURE = BASE["grpo"]["rollout"]["temperature"]
# Two fp32 forwards of a trained model: transformers' own lies up to 2e-5 from a float64 one.
CLOSE = 3e-5


def reference_recipe(**changes: Any) -> Recipe:
    return make_recipe("grpo", objective={"name": "grpo", "kl": 0.1}, **changes)


def update(parts: Parts, recipe: Recipe, step: int, lr: float = 1e-2) -> Batch:
    """One optimizer step; returns its batch."""
    batch = parts.source(step).batch
    torch.manual_seed(step)  # an adapter's dropout draws from it
    loss, _ = accumulate(parts.forward, parts.objective, parts.aggregate, batch, recipe.train)
    apply_update(parts.optimizer, [p for _, p in parts.parameters], lr, 1.0, loss, step)
    return batch


@torch.no_grad()
def plain_logprobs(model: Any, batch: Batch, temperature: float = TEMPERATURE) -> Tensor:
    """Each row alone through a model; 0 where nothing is trained."""
    found = torch.zeros(batch.tokens.shape)
    for b in range(batch.num_rows):
        ids = batch.tokens[b : b + 1, : int(batch.lengths[b])]
        table = (model(ids).logits[0].float() / temperature).log_softmax(-1)
        found[b, 1 : ids.shape[1]] = table[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return torch.where(batch.mask, found, torch.zeros_like(found))


def initial_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_sampler_and_trainer_agree_about_the_old_logprobs(model: dict[str, Any], temperature: float) -> None:
    rollout = {"temperature": temperature, "old_logprobs": "trainer", "max_tokens": 24}
    recipe = make_recipe("grpo", model=model, rollout=rollout)
    parts = prepare(recipe)
    update(parts, recipe, 1, lr=1e-4)
    batch = parts.source(2).batch
    sampler, trainer = batch.streams["sampler_logprobs"], batch.streams["old_logprobs"]
    assert not torch.equal(sampler, trainer)  # computed anew
    assert not trainer.requires_grad
    assert difference(sampler, trainer) < CLOSE
    assert float((sampler - trainer).abs()[batch.mask].mean()) < 2e-6
    expected = plain_logprobs(parts.model, batch, temperature)
    assert difference(trainer, expected) < CLOSE
    assert float(expected.min()) < -1  # the model is sure of some tokens and not of others


def test_the_samplers_own_logprobs_are_taken_as_they_are() -> None:
    batch = prepare(make_recipe("grpo", rollout={"old_logprobs": "sampler"})).source(1).batch
    assert torch.equal(batch.streams["old_logprobs"], batch.streams["sampler_logprobs"])
    assert bool((batch.streams["old_logprobs"][batch.mask] < 0).any())


def test_the_reference_is_the_initial_model_also_after_updates() -> None:
    recipe = reference_recipe()
    parts = prepare(recipe)
    for step in (1, 2, 3):
        batch = update(parts, recipe, step)
        assert difference(batch.streams["ref_logprobs"], plain_logprobs(initial_model(), batch)) < CLOSE, step
    moved = difference(batch.streams["ref_logprobs"], plain_logprobs(parts.model, batch))
    assert moved > 0.1
    assert not any(p is q for p in parts.model.parameters() for _, q in parts.parameters if not q.requires_grad)


def test_the_reference_of_a_fresh_adapter_is_the_base() -> None:
    recipe = reference_recipe(model=LORA)
    parts = prepare(recipe)
    batch = update(parts, recipe, 1)
    assert difference(batch.streams["ref_logprobs"], batch.streams["old_logprobs"]) < CLOSE
    batch = update(parts, recipe, 2)
    assert difference(batch.streams["ref_logprobs"], plain_logprobs(initial_model(), batch)) < CLOSE
    with_adapter = plain_logprobs(parts.model, batch)
    assert difference(batch.streams["ref_logprobs"], with_adapter) > 0.05
    assert difference(plain_logprobs(parts.model, batch), with_adapter) == 0.0  # it is on again


def test_the_reference_of_a_loaded_adapter_is_the_model_with_that_adapter(tmp_path: Path) -> None:
    first = make_recipe("sft", model=LORA, train={"steps": 3, "lr": 1e-2})
    run(tmp_path / "first", first)
    saved = str(tmp_path / "first" / "checkpoints" / "step-000003")
    recipe = reference_recipe(model={"name": saved})
    parts = prepare(recipe)
    assert sum(p.numel() for _, p in parts.parameters) < sum(p.numel() for p in parts.model.parameters()) / 2
    start = prepare(recipe).model
    for step in (1, 2, 3):
        batch = update(parts, recipe, step)
        assert difference(batch.streams["ref_logprobs"], plain_logprobs(start, batch)) < CLOSE, step
    assert difference(batch.streams["ref_logprobs"], plain_logprobs(initial_model(), batch)) > 0.05
    assert difference(batch.streams["ref_logprobs"], plain_logprobs(parts.model, batch)) > 0.05
    assert all(p.grad is None and p.requires_grad for _, p in parts.parameters)


def test_a_resumed_run_keeps_the_reference_of_its_beginning(tmp_path: Path) -> None:
    """The loop's own resume: the checkpoint is restored into the model, not into the reference."""
    from posttrain.train.checkpoint import load_checkpoint, restore_model

    recipe = reference_recipe(train={"steps": 2, "lr": 1e-2})
    run(tmp_path, recipe)
    parts = prepare(recipe)
    found = load_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    restore_model(parts.model, found.path)
    batch = parts.source(3).batch
    assert difference(batch.streams["ref_logprobs"], plain_logprobs(initial_model(), batch)) < CLOSE
    assert difference(batch.streams["old_logprobs"], plain_logprobs(parts.model, batch)) < CLOSE
    assert difference(batch.streams["ref_logprobs"], batch.streams["old_logprobs"]) > 0.1


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("reinforce", {}, {"advantages"}),
        ("grpo", {}, {"advantages", "old_logprobs"}),
        ("grpo", {"kl": 0.0}, {"advantages", "old_logprobs"}),
        ("grpo", {"kl": 1e-6}, {"advantages", "old_logprobs", "ref_logprobs"}),
    ],
)
def test_streams_follow_from_the_options(name: str, options: dict[str, float], needs: set[str]) -> None:
    entry = registry.find("objective", name)
    assert needed_streams(entry, entry.options(options), True) == needs
    parts = prepare(make_recipe("grpo", objective={"name": name} | options))
    assert set(parts.source(1).batch.streams) == needs | {"sampler_logprobs"}


def test_streams_that_nothing_fills_are_refused() -> None:
    entry = registry.Entry("objective", "mine", lambda outputs, batch: None, {"needs": ("old_values",)})
    with pytest.raises(RecipeError, match=r"'mine' needs \['old_values'\], which nothing fills; known: "):
        needed_streams(entry, {}, True)
    supervised = registry.find("objective", "cross_entropy")
    assert needed_streams(supervised, {}, False) == frozenset()
    with pytest.raises(RecipeError, match="give 'rollout', not 'data'"):
        needed_streams(registry.find("objective", "reinforce"), {}, False)


@pytest.mark.parametrize("rows_per_micro", [1, 3])
def test_annotation_does_not_depend_on_micro_batches(rows_per_micro: int) -> None:
    whole = prepare(reference_recipe(rollout={"old_logprobs": "trainer"})).source(1).batch
    pieces = prepare(reference_recipe(rollout={"old_logprobs": "trainer"}, train={"rows_per_micro": rows_per_micro}))
    batch = pieces.source(1).batch
    assert torch.equal(batch.tokens, whole.tokens)
    for name in ("old_logprobs", "ref_logprobs"):
        assert difference(batch.streams[name], whole.streams[name]) < CLOSE
        assert bool((batch.streams[name][batch.mask] < 0).all())
        assert not bool(batch.streams[name][~batch.mask].any())
