"""Distillation: exact divergences, the tail, gradients, edges."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.objectives.distillation import distillation, on_policy_distillation, sdpo
from posttrain.types import Batch, Outputs

F64 = torch.float64
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def logits(seed: int, rows: int = 2, width: int = 4, vocabulary: int = 7, dtype: torch.dtype = F64) -> torch.Tensor:
    return 2 * torch.randn(rows, width, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_batch(teacher: torch.Tensor, candidates: int, **fields: torch.Tensor) -> Batch:
    """The teacher's ``candidates`` likeliest tokens; position 0 is not trained, nor is the last of row 1."""
    rows, width = teacher.shape[:2]
    logprobs, ids = teacher.log_softmax(-1).topk(candidates, dim=-1)
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, -1] = False
    zeros = torch.zeros(rows, dtype=torch.long)
    fields = {"teacher_ids": ids, "teacher_candidate_logprobs": logprobs, **fields}
    return Batch(zeros[:, None].expand(rows, width), zeros + width, mask, zeros, zeros, fields)


def outputs_of(student: torch.Tensor, batch: Batch) -> Outputs:
    candidates = student.log_softmax(-1).gather(-1, batch.field("teacher_ids"))
    return Outputs(logprobs=candidates[..., 0], candidate_logprobs=candidates)


def exact(student: torch.Tensor, teacher: torch.Tensor, divergence: str, weight: float = 0.5) -> torch.Tensor:
    """Over the whole vocabulary, in plain probabilities."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    if divergence == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if divergence == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    m = weight * p + (1 - weight) * q
    return weight * (p * (p / m).log()).sum(-1) + (1 - weight) * (q * (q / m).log()).sum(-1)


def test_by_hand():
    """Teacher (0.5, 0.3, 0.2), student (0.2, 0.2, 0.6), one candidate: two outcomes, 0.5/0.5 and 0.2/0.8."""
    teacher, student = (
        torch.tensor([[[1.0, 1.0, 1.0], p], [[1.0, 1.0, 1.0], p]], dtype=F64).log()
        for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])
    )
    batch = make_batch(teacher, 1)
    outputs = outputs_of(student, batch)
    forward = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    backward = 0.2 * math.log(0.2 / 0.5) + 0.8 * math.log(0.8 / 0.5)
    m = (0.3 * 0.5 + 0.7 * 0.2, 0.3 * 0.5 + 0.7 * 0.8)
    mixed = 0.3 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    mixed += 0.7 * (0.2 * math.log(0.2 / m[0]) + 0.8 * math.log(0.8 / m[1]))
    for name, expected in (("forward_kl", forward), ("reverse_kl", backward), ("jsd", mixed)):
        loss = distillation(outputs, batch, divergence=name, jsd_weight=0.3)
        assert loss.values[0, 1].item() == approx(expected, abs=1e-12), name
        assert loss.metrics["teacher_mass"][0].tolist() == approx([0.0, 0.5])
        assert loss.metrics["student_mass"][0].tolist() == approx([0.0, 0.2])
    assert distillation(outputs, batch, tail=False).values[0, 1].item() == 0.0  # one candidate: nothing to tell apart


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_candidates_give_the_exact_divergence_and_gradient(divergence: str, tail: bool):
    teacher, student = logits(1), logits(2).requires_grad_()
    batch = make_batch(teacher, 7)
    values = distillation(outputs_of(student, batch), batch, divergence=divergence, jsd_weight=0.3, tail=tail).values
    expected = exact(student, teacher, divergence, 0.3)
    assert allclose(values[batch.mask], expected[batch.mask], atol=1e-12)
    assert values[~batch.mask].abs().max() == 0.0
    got = torch.autograd.grad(values[batch.mask].sum(), student)[0]
    assert allclose(got, torch.autograd.grad(expected[batch.mask].sum(), student)[0], atol=1e-12)


@pytest.mark.parametrize("candidates", [1, 3, 5])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_tail_makes_a_lower_bound_that_grows_with_the_candidates(divergence: str, candidates: int):
    teacher, student = logits(3, rows=20), logits(4, rows=20)
    coarse, fine = make_batch(teacher, candidates), make_batch(teacher, candidates + 1)
    a = distillation(outputs_of(student, coarse), coarse, divergence=divergence).values[coarse.mask]
    b = distillation(outputs_of(student, fine), fine, divergence=divergence).values[coarse.mask]
    full = exact(student, teacher, divergence)[coarse.mask]
    assert bool((a >= -1e-12).all())
    assert bool((a <= b + 1e-12).all())
    assert bool((b <= full + 1e-12).all())
    assert float((full - a).max()) > 0.01
    if candidates == 5:  # one more leaves a single other token, so that nothing is merged
        assert allclose(b, full, atol=1e-12)


@pytest.mark.parametrize("candidates", [3, 7])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(dtype, divergence: str, tail: bool, candidates: int):
    teacher = logits(5, dtype=dtype)
    student = teacher.clone().requires_grad_()
    batch = make_batch(teacher, candidates)
    values = distillation(outputs_of(student, batch), batch, divergence=divergence, tail=tail).values
    tolerance = 100 * torch.finfo(dtype).eps
    assert values.abs().max().item() == approx(0.0, abs=tolerance)
    gradient = torch.autograd.grad(values.sum(), student)[0]
    assert gradient.abs().max().item() == approx(0.0, abs=tolerance)


def test_jsd_is_symmetric_at_one_half_and_tends_to_the_two_kls():
    a, b = logits(6), logits(7)
    ab, ba = make_batch(b, 7), make_batch(a, 7)
    one = distillation(outputs_of(a, ab), ab, divergence="jsd").values[ab.mask]
    other = distillation(outputs_of(b, ba), ba, divergence="jsd").values[ba.mask]
    assert allclose(one, other, atol=1e-12)
    assert one.max().item() <= math.log(2)
    for weight, divergence in ((1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")):
        scaled = distillation(outputs_of(a, ab), ab, divergence="jsd", jsd_weight=weight).values / min(
            weight, 1 - weight
        )
        assert allclose(scaled[ab.mask], exact(a, b, divergence)[ab.mask], rtol=1e-3)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_by_finite_differences(divergence: str, tail: bool):
    batch = make_batch(logits(8), 3)

    def total(student: torch.Tensor) -> torch.Tensor:
        return distillation(outputs_of(student, batch), batch, divergence=divergence, tail=tail).values.sum()

    assert torch.autograd.gradcheck(total, (logits(9).requires_grad_(),), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_finite_in_single_precision_also_with_nothing_left(divergence: str, tail: bool, scale: float):
    """All of the vocabulary is a candidate, or all of the probability: the rest is 0 up to rounding."""
    teacher = scale * logits(10, rows=8, vocabulary=50, dtype=torch.float32)
    student = (scale * logits(11, rows=8, vocabulary=50, dtype=torch.float32)).requires_grad_()
    for candidates in (5, 50):
        batch = make_batch(teacher, candidates)
        values = distillation(outputs_of(student, batch), batch, divergence=divergence, tail=tail).values
        assert torch.isfinite(values).all()
        gradient = torch.autograd.grad(values.sum(), student)[0]
        assert torch.isfinite(gradient).all()
        if candidates == 50:
            assert values.min().item() > -1e-5
    wide, narrow = make_batch(teacher, 50), exact(student.double(), teacher.double(), divergence)
    if scale == 1.0:
        got = distillation(outputs_of(student, wide), wide, divergence=divergence, tail=tail).values
        assert allclose(got[wide.mask].double(), narrow[wide.mask], atol=2e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_impossible_tokens_are_finite_and_nan_is_not_hidden(divergence: str):
    teacher, student = logits(12), logits(13)
    teacher[..., 2] = -math.inf
    student[..., 4] = -math.inf
    batch = make_batch(teacher, 7)
    student.requires_grad_()
    values = distillation(outputs_of(student, batch), batch, divergence=divergence).values
    assert torch.isfinite(values).all()
    assert values[batch.mask].min().item() > 0
    assert torch.isfinite(torch.autograd.grad(values.sum(), student)[0]).all()
    broken = outputs_of(student, batch)
    spoiled = broken.candidate_logprobs.detach().clone()
    spoiled[0, 1, 0] = math.nan
    spoiled[0, 0, 0] = math.nan  # not trained: harmless
    got = distillation(Outputs(broken.logprobs, candidate_logprobs=spoiled), batch, divergence=divergence).values
    assert math.isnan(got[0, 1])
    assert got[0, 0].item() == 0.0


def test_on_policy_distillation_by_hand():
    batch = make_batch(
        logits(0),
        1,
        old_logprobs=torch.full((2, 4), math.log(0.4), dtype=F64),
        teacher_logprobs=torch.full((2, 4), math.log(0.1), dtype=F64),
    )
    student = torch.full((2, 4), math.log(0.6), dtype=F64, requires_grad=True)
    loss = on_policy_distillation(Outputs(student), batch)
    assert loss.values[0, 1].item() == approx(1.5 * math.log(4), abs=1e-12)  # ρ = 1.5, A = −log 4
    assert loss.metrics["kl_teacher"][0, 1].item() == approx(math.log(4), abs=1e-12)
    clipped = on_policy_distillation(Outputs(student), batch, clip=0.2)
    assert allclose(clipped.values[batch.mask], loss.values[batch.mask])  # A < 0 is not clipped above
    assert clipped.metrics["clip_fraction"][0, 1].item() == 0.0
    batch.fields["teacher_logprobs"] = torch.full((2, 4), math.log(0.8), dtype=F64)
    clipped = on_policy_distillation(Outputs(student), batch, clip=0.2)
    assert clipped.values[0, 1].item() == approx(-1.2 * math.log(2), abs=1e-12)
    assert clipped.metrics["clip_fraction"][0, 1].item() == 1.0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_on_policy_distillation_has_the_gradient_of_the_reverse_kl(clip: float | None):
    """Exact expectation over the whole vocabulary: one row per token, weighted by its probability."""
    student = logits(14, rows=1, width=1)[0, 0].requires_grad_()
    teacher = logits(15, rows=1, width=1)[0, 0].log_softmax(-1)
    logprobs = student.log_softmax(-1)
    column = torch.zeros(7, 1, dtype=F64)
    zeros = torch.zeros(7, dtype=torch.long)
    mask = torch.tensor([[False, True]]).expand(7, 2)
    fields = {
        "old_logprobs": torch.cat([column, logprobs.detach()[:, None]], 1),
        "teacher_logprobs": torch.cat([column, teacher[:, None]], 1),
    }
    batch = Batch(zeros[:, None].expand(7, 2), zeros + 2, mask, zeros, zeros, fields)
    loss = on_policy_distillation(Outputs(torch.cat([column, logprobs[:, None]], 1)), batch, clip=clip)
    expectation = (logprobs.detach().exp() * loss.values[:, 1]).sum()
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    exact_gradient = torch.autograd.grad(kl, student, retain_graph=True)[0]
    assert allclose(torch.autograd.grad(expectation, student)[0], exact_gradient, atol=1e-12)
    assert float(exact_gradient.abs().max()) > 0.1
    mean = (logprobs.detach().exp() * loss.metrics["kl_teacher"][:, 1]).sum()
    assert mean.item() == approx(kl.item(), abs=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("teacher", [-math.inf, -1e6])
def test_on_policy_distillation_stays_finite(teacher: float, clip: float | None):
    for new, old in ((-0.1, -0.2), (0.0, -1e6), (-1e6, 0.0), (-0.1, -math.inf)):
        fields = {name: torch.full((2, 4), x, dtype=F64) for name, x in
                   (("old_logprobs", old), ("teacher_logprobs", teacher))}  # fmt: skip
        student = torch.full((2, 4), new, dtype=F64, requires_grad=True)
        batch = make_batch(logits(0), 1, **fields)
        if old == teacher == -math.inf:  # two impossible things have no ratio; it stays NaN for the loop to refuse
            assert on_policy_distillation(Outputs(student), batch, clip=clip).values[batch.mask].isnan().all()
            continue
        values = on_policy_distillation(Outputs(student), batch, clip=clip).values[batch.mask]
        assert torch.isfinite(values).all()
        assert torch.isfinite(torch.autograd.grad(values.sum(), student)[0]).all()


def test_sdpo_is_the_divergence_times_the_capped_ratio_where_there_is_feedback():
    teacher, student = logits(16), logits(17).requires_grad_()
    old = torch.zeros(2, 4, dtype=F64)
    batch = make_batch(teacher, 3, old_logprobs=old, has_feedback=torch.tensor([1.0, 1.0]))
    outputs = outputs_of(student, batch)
    outputs.logprobs = torch.tensor([[0.0, 1.5, 4.0, 0.2], [0.0, 1.0, 1.0, 1.0]], dtype=F64).log().requires_grad_()
    plain = distillation(outputs, batch)
    loss = sdpo(outputs, batch)
    assert loss.values[0, 1:].tolist() == approx(
        (plain.values[0, 1:] * torch.tensor([1.5, 2.0, 0.2], dtype=F64)).tolist(), abs=1e-12
    )
    assert allclose(loss.values[1], plain.values[1], atol=1e-12)  # on its own samples the ratio is 1
    assert torch.equal(sdpo(outputs, batch, ratio_cap=None).values, plain.values)
    assert torch.autograd.grad(loss.values.sum(), outputs.logprobs, allow_unused=True)[0] is None  # the ratio is fixed
    for divergence in DIVERGENCES:
        same = distillation(outputs, batch, divergence=divergence, jsd_weight=0.2, tail=False)
        ours = sdpo(outputs, batch, divergence=divergence, jsd_weight=0.2, tail=False, ratio_cap=None)
        assert torch.equal(same.values, ours.values)


def test_sdpo_rows_without_feedback_give_nothing_even_without_a_teacher():
    teacher, student = logits(18), logits(19).requires_grad_()
    batch = make_batch(teacher, 3, old_logprobs=torch.zeros(2, 4, dtype=F64), has_feedback=torch.tensor([1.0, 0.0]))
    batch.fields["teacher_candidate_logprobs"][1] = math.nan
    loss = sdpo(outputs_of(student, batch), batch)
    assert loss.values[1].tolist() == [0.0] * 4
    assert loss.values[0].max().item() > 0
    gradient = torch.autograd.grad(loss.values.sum(), student)[0]
    assert gradient[1].abs().max() == 0.0
    assert float(gradient[0].abs().max()) > 0
    assert loss.metrics["feedback_share"].tolist() == [[1.0] * 4, [0.0] * 4]
    for metric in loss.metrics.values():
        assert metric.shape == loss.values.shape
        assert torch.isfinite(metric).all()
        assert not metric.requires_grad


def test_no_gradient_reaches_the_teacher():
    teacher = logits(20).requires_grad_()
    batch = make_batch(teacher, 3, old_logprobs=torch.zeros(2, 4, dtype=F64), has_feedback=torch.ones(2))
    student = logits(21).requires_grad_()
    for objective in (distillation, sdpo):
        total = objective(outputs_of(student, batch), batch).values.sum()
        assert torch.autograd.grad(total, teacher, allow_unused=True)[0] is None
