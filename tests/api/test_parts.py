"""The verified parts on plain tensors and texts."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import posttrain as pt
from closeness import allclose, assert_close
from posttrain.algorithms.objectives.surrogate import add_regularizers
from posttrain.errors import UsageError
from posttrain.registry import entries, find
from posttrain.types import Batch, Outputs, Sample, collate
from refusing import refuses
from torch_alone import run_with_torch_alone

ROWS, WIDTH, CANDIDATES = 4, 6, 3
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]]).bool()


def made_up(seed: int = 0) -> dict[str, Tensor]:
    """Every tensor that an objective may read, in float64."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    tensors = {
        name: -numbers(ROWS, WIDTH).exp() for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    tensors |= {name: numbers(ROWS, WIDTH) for name in ("advantages", "returns", "old_values", "scores")}
    tensors["teacher_logprobs"] = -numbers(ROWS, WIDTH).exp()
    for name in ("candidate_logprobs", "teacher_candidate_logprobs"):
        tensors[name] = numbers(ROWS, WIDTH, CANDIDATES + 1).log_softmax(dim=-1)[..., :CANDIDATES]
    tensors["labels"] = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    tensors["has_feedback"] = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    tensors["margins"] = torch.tensor([0.5, 0.5, 0.1, 0.1], dtype=torch.float64)
    tensors["transport_shift"] = torch.tensor([0.5, 0.5, -0.1, -0.1], dtype=torch.float64)
    tensors["kl_baseline"] = torch.full((ROWS,), 0.3, dtype=torch.float64)
    tensors["step_labels"] = (numbers(ROWS, WIDTH) > 0).double()
    for name in ("clip_cov_tokens", "kl_cov_tokens"):
        tensors[name] = (numbers(ROWS, WIDTH) > 0).double()
    return tensors


def arguments_of(name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    parameters = inspect.signature(getattr(pt.losses, name)).parameters
    return {one: tensors[one] for one in parameters if one in tensors} | {"mask": MASK}


def as_trained(name: str, tensors: dict[str, Tensor]) -> Any:
    """The objective as the trainer calls it: on a batch, with log-probabilities that are 0 outside of the mask."""
    entry = find("objective", name)
    samples = [Sample(list(range(WIDTH)), row) for row in MASK.tolist()]
    batch = collate(samples, rows_per_unit=2 if entry.traits["level"] == "pair" else 1)
    batch.fields = {one: tensors[one] for one in tensors}
    outputs = Outputs(
        torch.where(MASK, tensors["logprobs"], 0.0), None, tensors["scores"], tensors["candidate_logprobs"]
    )
    return entry.function(outputs, batch)


OBJECTIVES = sorted(entries("objective"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_equal_the_objective_of_the_trainer(name: str):
    tensors = made_up()
    ours = getattr(pt.losses, name)(**arguments_of(name, tensors))
    expected = as_trained(name, tensors)
    if ours.values.shape == MASK.shape:
        assert torch.equal(ours.values[MASK], expected.values[MASK])
        assert bool((ours.values[~MASK] == 0).all())
    else:
        assert torch.equal(ours.values, expected.values)
    assert ours.metrics.keys() == expected.metrics.keys()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_read_nothing_outside_of_the_mask(name: str):
    tensors = made_up()
    poisoned = {}
    for key, tensor in tensors.items():
        outside = ~MASK if tensor.ndim == 2 else ~MASK[..., None]
        poisoned[key] = tensor.masked_fill(outside, float("nan")) if tensor.ndim > 1 else tensor.clone()
    leaf = next(key for key in inspect.signature(getattr(pt.losses, name)).parameters)
    gradients = []
    for one in (tensors, poisoned):
        one[leaf] = one[leaf].detach().requires_grad_()
        loss = getattr(pt.losses, name)(**arguments_of(name, one))
        loss.values.sum().backward()
        gradients.append(one[leaf].grad)
    assert torch.equal(gradients[0], gradients[1])
    assert bool((gradients[0] != 0).any())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_say_what_they_take_and_mean(name: str):
    function = getattr(pt.losses, name)
    assert function.__doc__ == find("objective", name).doc
    assert "mask" in inspect.signature(function).parameters
    assert name in dir(pt.losses)


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (1, 1, 1, 1)])
def test_micro_batches_with_weights_of_the_whole_batch_add_up_to_one_gradient(sizes: tuple[int, ...]):
    tensors = made_up()
    weights = pt.aggregations.token_mean(MASK)

    def gradient(splits: tuple[int, ...]) -> Tensor:
        logprobs = tensors["logprobs"].clone().requires_grad_()
        ends = [sum(splits[:n]) for n in range(len(splits) + 1)]
        for start, end in pairwise(ends):
            rows = slice(start, end)
            loss = pt.losses.grpo(
                logprobs[rows], old_logprobs=tensors["old_logprobs"][rows], advantages=tensors["advantages"][rows],
                mask=MASK[rows],
            )  # fmt: skip
            (loss.values * weights[rows]).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    assert_close(gradient(sizes), gradient((ROWS,)), rtol=1e-13, atol=1e-15)


def test_losses_take_one_advantage_per_row_and_masks_of_whole_numbers():
    tensors = made_up()
    per_row = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    common = {"old_logprobs": tensors["old_logprobs"]}
    ours = pt.losses.grpo(tensors["logprobs"], advantages=per_row, mask=MASK.int(), **common)
    spread = per_row[:, None].expand(ROWS, WIDTH)
    expected = pt.losses.grpo(tensors["logprobs"], advantages=spread, mask=MASK, **common)
    assert torch.equal(ours.values, expected.values)
    assert bool((ours.values != 0).any())


def test_kl_and_regularize_are_those_of_the_trainer():
    tensors = made_up()
    loss = pt.losses.reinforce(tensors["logprobs"], advantages=tensors["advantages"], mask=MASK)
    entropy = tensors["scores"].abs()
    pair = {"logprobs": tensors["logprobs"], "ref_logprobs": tensors["ref_logprobs"]}
    ours = pt.losses.regularize(loss, mask=MASK, entropy=entropy, kl_coef=0.1, entropy_coef=0.01, **pair)
    kl = pt.losses.kl(**pair, mask=MASK)
    assert_close(ours.values, loss.values + 0.1 * kl - 0.01 * entropy * MASK, rtol=1e-13, atol=1e-15)
    fields = {"ref_logprobs": tensors["ref_logprobs"]}
    lengths = torch.full((ROWS,), WIDTH)
    batch = Batch(MASK.long(), lengths, MASK, lengths, lengths, fields)
    outputs = Outputs(tensors["logprobs"], entropy)
    expected = add_regularizers(loss, outputs, batch, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01)
    assert torch.equal(ours.values[MASK], expected.values[MASK])


REFUSED = {
    "a list": ("grpo", {"logprobs": [[0.0]]}, "logprobs"),
    "another shape": ("grpo", {"advantages": torch.zeros(2, 3)}, "advantages"),
    "a row more": ("kto", {"labels": torch.zeros(5)}, "labels"),
    "complex": ("grpo", {"old_logprobs": torch.zeros(ROWS, WIDTH, dtype=torch.complex64)}, "old_logprobs"),
    "another device": ("grpo", {"advantages": torch.zeros(ROWS, WIDTH, device="meta")}, "advantages"),
    "a mask of weights": ("grpo", {"mask": torch.full((ROWS, WIDTH), 0.5)}, "mask"),
    "a mask of rows": ("grpo", {"mask": torch.ones(ROWS)}, "mask"),
    "an option outside of its range": ("grpo", {"clip_low": -0.1}, "clip_low"),
    "an option that is no number": ("dpo", {"beta": "0.1"}, "beta"),
    "an option that is NaN": ("dpo", {"beta": float("nan")}, "beta"),
    "a choice that is none": ("distillation", {"divergence": "kl"}, "divergence"),
    "an unknown argument": ("grpo", {"old_logprob": 1}, "old_logprobs"),
    "candidates of another number": ("distillation", {"candidate_logprobs": torch.zeros(4, 6, 2)}, "teacher_candidate"),
    "candidates without their dimension": ("distillation", {"candidate_logprobs": torch.zeros(4, 6)}, "candidate"),
    "one score for three classes": ("process", {"num_classes": 3}, "scores"),
    "an optional tensor that is read": ("sdpo", {"old_logprobs": None}, "ratio_cap"),
    "margins that are read": ("bradley_terry", {"margins": None, "margin": True}, "margins"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_argument_is_refused_by_its_name(case: str):
    name, changed, named = REFUSED[case]
    with pytest.raises(UsageError, match=rf"losses\.{name}.*{named}"):
        getattr(pt.losses, name)(**arguments_of(name, made_up()) | changed)


def test_an_odd_row_of_pairs_and_a_missing_tensor_are_refused():
    tensors = made_up()
    with refuses(UsageError, "mask"):
        pt.losses.dpo(tensors["logprobs"][:3], ref_logprobs=tensors["ref_logprobs"][:3], mask=MASK[:3])
    with refuses(UsageError, "advantages"):
        pt.losses.grpo(tensors["logprobs"], mask=MASK)
    with refuses(UsageError, "logprobs"):
        pt.losses.regularize(pt.losses.cross_entropy(tensors["logprobs"], mask=MASK), mask=MASK, kl_coef=0.1)


@pytest.mark.parametrize("group", ["losses", "advantages", "aggregations"])
def test_a_name_that_is_not_there_is_an_attribute_error_with_the_nearest(group: str):
    module = getattr(pt, group)
    near = {"losses": "grpo", "advantages": "normalized", "aggregations": "token_mean"}[group]
    with pytest.raises(AttributeError, match=near):
        getattr(module, f"{near}s")
    assert not hasattr(module, "__wrapped__")


@pytest.mark.parametrize("name", ["centered", "leave_one_out", "mean_scaled", "normalized", "batch_normalized", "raw"])
def test_advantages_of_interleaved_groups_equal_those_of_rows(name: str):
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 3.0]])
    function = getattr(pt.advantages, name)
    expected = function(rewards)
    group = torch.tensor([7, 3, 7, 3, 3, 7])
    interleaved = torch.tensor([1.0, 0.5, 0.0, 0.5, 3.0, 2.0])
    found = function(interleaved, group=group)
    assert found.dtype == torch.float32
    assert_close(found[group == 7], expected[0], rtol=1e-6, atol=1e-7)
    assert_close(found[group == 3], expected[1], rtol=1e-6, atol=1e-7)


def test_advantages_of_uneven_groups_are_relative_to_their_own():
    rewards = torch.tensor([1, 0, 4, 2, 0])
    found = pt.advantages.centered(rewards, torch.tensor([0, 0, 1, 1, 1]))
    assert found.tolist() == [0.5, -0.5, 2.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("leave_one_out", {"group": torch.tensor([0, 0, 0, 1])}, "group 1"),
        ("normalized", {}, "group"),
        ("normalized", {"group": torch.tensor([0, 0])}, "group"),
        ("normalized", {"group": [0, 0, 1, 1]}, "group"),
        ("normalized", {"group": torch.zeros(4), "epsilon": -1.0}, "epsilon"),
        ("mean_scaled", {"group": torch.tensor([0, 0, 1, 1])}, "negative"),
        ("batch_normalized", {"group": torch.tensor([0, 0, 0, 1]), "center": "group"}, "group 1"),
    ],
)
def test_advantages_refuse_by_name(name: str, arguments: dict[str, Any], named: str):
    with pytest.raises(UsageError, match=rf"advantages\.{name}.*{named}"):
        getattr(pt.advantages, name)(torch.tensor([1.0, -1.0, 0.0, 2.0]), **arguments)


def test_batch_normalized_takes_groups_of_unequal_size():
    rewards = torch.tensor([1.0, 0.0, 3.0, 5.0, 4.0], dtype=torch.float64)
    found = pt.advantages.batch_normalized(rewards, torch.tensor([0, 1, 0, 1, 1]), center="group", epsilon=0.0)
    centred = torch.tensor([-1.0, -3.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    assert allclose(found, centred / math.sqrt(16 / 5), atol=1e-12)


def test_advantages_per_token_and_per_turn_equal_the_registered_ones():
    tensors = made_up()
    rewards = torch.where(MASK, tensors["advantages"], 0.0)
    found = pt.advantages.gae(rewards, MASK, tensors["old_values"], gae_lambda=0.9)
    zeros = torch.zeros(ROWS, dtype=torch.float64)
    expected = find("advantage", "gae").function(rewards, MASK, tensors["old_values"], zeros, gae_lambda=0.9)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    with refuses(UsageError, "values"):
        pt.advantages.gae(rewards, MASK)
    with refuses(UsageError, "not trained"):
        pt.advantages.return_to_go(tensors["advantages"], MASK)
    turns = pt.advantages.turn_normalized(rewards, MASK)
    assert torch.equal(turns, find("advantage", "turn_normalized").function(rewards, MASK))


def test_advantages_of_parts_equal_the_registered_ones_and_refuse_by_name():
    parts = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, float("nan")], [1.0, 1.0]])
    group = torch.tensor([7, 2, 2, 7])
    weights = torch.tensor([1.0, 0.25])
    expected = find("advantage", "gdpo").function(parts.double(), weights.double(), group)
    assert torch.equal(pt.advantages.gdpo(parts, group, weights), expected.float())
    unweighted = pt.advantages.gdpo(parts, group)
    assert torch.equal(unweighted, pt.advantages.gdpo(parts, group, torch.ones(2)))
    with refuses(UsageError, "group", "at least 2"):
        pt.advantages.gdpo(parts, torch.tensor([7, 2, 3, 7]))
    with refuses(UsageError, "weights"):
        pt.advantages.gdpo(parts, group, torch.ones(3))
    with refuses(UsageError, "rewards"):
        pt.advantages.gdpo(parts[:, 0], group)


def test_aggregations_equal_the_registered_ones_and_refuse_by_name():
    for name, options in {"token_mean": {}, "sequence_mean": {}, "constant": {"length": 8}, "unit_mean": {}}.items():
        found = getattr(pt.aggregations, name)(MASK.int(), **options)
        assert torch.equal(found, find("aggregation", name).function(MASK, **options))
    assert sorted(dir(pt.aggregations)) == ["constant", "sequence_mean", "token_mean", "unit_mean"]
    with refuses(UsageError, "length"):
        pt.aggregations.constant(MASK, length=0)
    with refuses(UsageError, "mask"):
        pt.aggregations.token_mean(torch.zeros(2, 3))


def test_grade_answers_numbers_and_expressions():
    assert pt.grade("First 3, so it is \\boxed{\\frac{1}{2}}", 0.5).outcome == "right"
    assert pt.grade("the answer is 1,000", "1000")
    assert not pt.grade("1/3", "0.5")
    assert pt.grade("12 apples", "12", grader="numeric")
    assert pt.grade("3.1", 3, grader="numeric", tolerance=0.2)
    assert pt.grade(None, "3").outcome == "no_answer"


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((3, "3"), {}, "answer"),
        (("3", None), {}, "gold"),
        (("3", True), {}, "gold"),
        (("3", "3"), {"grader": "code_tests"}, "grader"),
        (("3", "3"), {"tolerance": 0.1}, "tolerance"),
        (("3", "3"), {"grader": "numeric", "tolerance": -1}, "tolerance"),
    ],
)
def test_grade_refuses_by_name(arguments: tuple[Any, Any], options: dict[str, Any], named: str):
    with pytest.raises(UsageError, match=rf"grade: {named}"):
        pt.grade(*arguments, **options)


def test_parts_need_torch_alone():
    code = """
import torch
from posttrain import advantages, aggregations, losses
logprobs = torch.zeros(2, 3, requires_grad=True)
mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
weight = advantages.normalized(torch.tensor([[1.0, 0.0]]))[0]
loss = losses.grpo(logprobs, old_logprobs=torch.zeros(2, 3), advantages=weight, mask=mask)
(loss.values * aggregations.token_mean(mask)).sum().backward()
print([round(x, 3) for x in logprobs.grad[:, 1].tolist()])
print(sum(callable(getattr(losses, name)) for name in dir(losses)) >= 28)
import sys
print([name for name in ("pydantic", "numpy", "jaxtyping", "transformers", "yaml") if name in sys.modules])
"""
    assert run_with_torch_alone(code).splitlines() == ["[-0.236, 0.236]", "True", "[]"]


def test_grading_and_statistics_need_not_even_torch():
    code = """
import posttrain as pt
print(pt.grade("so \\\\boxed{1/2}", 0.5).outcome, round(pt.pass_at_k(10, 3, 2), 3))
print([round(bound, 3) for bound in pt.statistics.wilson_interval(3, 10)])
from posttrain.errors import UsageError
try:
    pt.grade("x + 1", "1 + x")
except UsageError as error:
    print("latex2sympy2-extended" in str(error))
"""
    lines = run_with_torch_alone(code, torch=False).splitlines()
    assert lines == ["right 0.533", "[0.108, 0.603]", "True"]
