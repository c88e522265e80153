"""Distillation under truncated sampling: teacher and student over the set that sampling kept, in float64 by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import OF_EMBEDDED, allclose, approx, rounding
from posttrain.models.forward.predictions import LOG_ZERO
from posttrain.training.build import prepare
from posttrain.training.step import accumulate
from small_runs import one_layer_recipe, run, same_bits, save_perturbed, saved_tensors, steps_of, untimed

CUT = {"top_p": 0.8, "top_k": 12, "temperature": 1.3}
LARGE = 64  # above every set here


def recipe_of(teacher: dict[str, Any], objective: Any = "distillation", **changes: Any) -> Any:
    """Distillation whose correction reads the sampler, so that it follows its distribution."""
    rollout = CUT | {"old_logprobs": "trainer"} | changes.pop("rollout", {})
    usual: dict[str, Any] = {"correction": "token_tis", "advantage": None, "aggregate": "token_mean"}
    return one_layer_recipe("grpo", objective=objective, teacher=teacher, rollout=rollout, **(usual | changes))


def tables(model: Any, batch: Any) -> list[tuple[int, int, list[int], Tensor]]:
    """(row, token, its set, log-probabilities over the set), from plain modules in float64, row by row."""
    found = []
    for row in range(batch.num_rows):
        length = int(batch.lengths[row])
        logits = model(batch.tokens[row : row + 1, :length], use_cache=False).logits[0].double() / CUT["temperature"]
        for t in batch.mask[row].nonzero()[:, 0].tolist():
            start, count = int(batch.kept.starts[row, t]), int(batch.kept.counts[row, t])
            members = batch.kept.ids[start : start + count].tolist()
            found.append((row, t, members, logits[t - 1, members].log_softmax(-1)))
    return found


def divergence_of(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """The teacher's p, the student's q: log-probabilities over one set."""
    if kind == "forward_kl":
        return (p.exp() * (p - q)).sum()
    if kind == "reverse_kl":
        return (q.exp() * (q - p)).sum()
    middle = ((p.exp() + q.exp()) / 2).log()
    return ((p.exp() * (p - middle)).sum() + (q.exp() * (q - middle)).sum()) / 2


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("tail", [True, False])
def test_divergence_and_gradient_over_sets_are_those_of_float64(tmp_path: Path, kind: str, tail: bool) -> None:
    name = save_perturbed(tmp_path / "teacher")
    objective = {"name": "distillation", "divergence": kind, "tail": tail}
    recipe = recipe_of({"name": name, "top_k": LARGE}, objective)
    parts = prepare(recipe)
    batch: Any = parts.source(1).batch
    assert batch.kept is not None
    assert batch.field("teacher_ids").shape[-1] == int(batch.kept.counts.max()) <= 12
    loss, metrics = accumulate(parts.method, batch, recipe.train)
    found = {name: p.grad.clone() for name, p in parts.parameters if p.grad is not None}
    teacher = prepare(one_layer_recipe("grpo", model={"name": name})).model.double()
    with torch.no_grad():
        of_teacher = tables(teacher, batch)
    student = parts.model.double()
    student.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for (row, t, members, q), (_, _, _, p) in zip(tables(student, batch), of_teacher, strict=True):
        total = total + divergence_of(p, q, kind)
        listed = batch.field("teacher_ids")[row, t].tolist()
        own = batch.field("teacher_candidate_logprobs")[row, t]
        assert sorted(one for one in listed if one >= 0) == members
        assert listed.count(-1) == len(listed) - len(members)
        by_id = dict(zip(listed, own.tolist(), strict=True))
        assert [by_id[one] for one in members] == approx(p.tolist(), abs=OF_EMBEDDED)
    expected = total / int(batch.mask.sum())
    expected.backward()
    assert loss == approx(float(expected.detach()), abs=OF_EMBEDDED)
    assert loss > 0.01
    assert metrics["correction"] == approx(1.0, abs=OF_EMBEDDED)
    assert metrics["teacher_mass"] == approx(1.0, abs=1e-5)
    for parameter_name, parameter in student.named_parameters():
        size = max(1.0, float(parameter.grad.abs().max()))
        bound = rounding(torch.float32, size=size, terms=1000, condition=50)
        assert allclose(found[parameter_name].double(), parameter.grad, atol=bound, rtol=0), parameter_name


@pytest.mark.parametrize("support", ["teacher", "student"])
def test_few_candidates_are_the_likeliest_of_the_set_and_the_rest_of_it_is_the_tail(
    tmp_path: Path, support: str
) -> None:
    name = save_perturbed(tmp_path / "teacher")
    recipe = recipe_of({"name": name, "top_k": 2, "support": support})
    parts = prepare(recipe)
    batch: Any = parts.source(1).batch
    loss, _ = accumulate(parts.method, batch, recipe.train)
    teacher = prepare(one_layer_recipe("grpo", model={"name": name})).model.double()
    total = 0.0
    with torch.no_grad():
        pairs = zip(tables(parts.model.double(), batch), tables(teacher, batch), strict=True)
        for (_, _, _, q), (_, _, _, p) in pairs:
            best = (p if support == "teacher" else q).topk(min(2, len(p))).indices
            shares = []
            for table in (q, p):
                rest = (1.0 - table[best].exp().sum()).clamp(min=0.0)
                shares.append(torch.cat([table[best].exp(), rest[None]]))
            own, theirs = shares
            if len(p) > 2:
                total += float((own * (own.log() - theirs.log())).sum())
            else:
                total += float((own[:-1] * (own[:-1].log() - theirs[:-1].log())).sum())
    assert loss == approx(total / int(batch.mask.sum()), abs=OF_EMBEDDED)


def test_token_alone_in_its_set_teaches_nothing(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    recipe = recipe_of({"name": name, "top_k": LARGE}, rollout={"top_k": 1})
    parts = prepare(recipe)
    batch: Any = parts.source(1).batch
    assert batch.field("teacher_ids").shape[-1] == 1
    loss, _ = accumulate(parts.method, batch, recipe.train)
    assert loss == approx(0.0, abs=1e-6)
    for name, parameter in parts.parameters:
        assert allclose(parameter.grad, torch.zeros_like(parameter), atol=1e-6, rtol=0), name


def test_gradient_over_sets_does_not_depend_on_the_split_into_micro_batches(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    found = []
    for tokens in (8192, 40):
        recipe = recipe_of({"name": name, "top_k": LARGE}, train={"micro_batch_tokens": tokens})
        parts = prepare(recipe)
        batch: Any = parts.source(1).batch
        accumulate(parts.method, batch, recipe.train)
        assert float(batch.field("teacher_candidate_logprobs").min()) == LOG_ZERO, "small sets are filled up"
        found.append({name: p.grad.clone() for name, p in parts.parameters if p.grad is not None})
    for parameter, gradient in found[0].items():
        bound = rounding(torch.float32, size=float(gradient.abs().max()), terms=1000, condition=50)
        assert allclose(gradient, found[1][parameter], atol=bound, rtol=0), parameter


def test_self_distillation_under_truncation_resumes_to_the_bit(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "grpo",
        rollout=CUT | {"label_above": 0.25},
        objective={"name": "sdpo", "ratio_cap": 2.0},
        teacher={"name": "self", "top_k": 20},
        advantage=None,
        train={"steps": 4, "num_minibatches": 2, "save_every": 1, "lr": 1e-3},
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=3)
    run(cut, recipe, resume=True)
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    assert untimed(cut) == untimed(whole)
    steps = steps_of(whole)
    assert any(step["divergence"] > 1e-3 for step in steps)
    assert all(step["student_mass"] <= 1.0 + 1e-5 for step in steps)


def test_objective_that_does_not_follow_the_sampler_compares_whole_distributions(tmp_path: Path) -> None:
    name = save_perturbed(tmp_path / "teacher")
    parts = prepare(recipe_of({"name": name, "top_k": LARGE}, correction=None, rollout={"old_logprobs": "sampler"}))
    batch: Any = parts.source(1).batch
    assert batch.kept is None
    assert batch.field("teacher_ids").shape[-1] == LARGE
