"""Pair words: values by hand, identities between words, where their minima lie."""

from __future__ import annotations

import math

import pytest
import torch
from preference_cases import make_pairs, one_pair, random_rows, values_of

from closeness import allclose, approx
from posttrain.algorithms.objectives.preference import (
    apo_down,
    apo_zero,
    discopop,
    dpo,
    exo,
    ipo,
    nca,
    robust_dpo,
)
from posttrain.algorithms.objectives.primitives import log1mexp, nan_unless_finite, row_last, wins
from posttrain.errors import RecipeError
from posttrain.registry import find
from posttrain.types import Batch, Outputs


def swapped(case: tuple[Outputs, Batch]) -> tuple[Outputs, Batch]:
    """The same pairs with chosen and rejected exchanged."""
    outputs, batch = case
    order = torch.arange(batch.num_rows).view(-1, 2).flip(1).flatten()
    fields = {name: x[order] for name, x in batch.fields.items()}
    other = Batch(batch.tokens, batch.lengths, batch.mask[order], batch.group, batch.prefix, fields, rows_per_unit=2)
    return Outputs(logprobs=outputs.logprobs[order]), other


def gradient(word, case: tuple[Outputs, Batch], **options: object) -> list[float]:
    """d value / d (sum of a row's log-probabilities), for rows of one token."""
    outputs, batch = case
    word(outputs, batch, **options).values.sum().backward()
    return outputs.logprobs.grad.sum(dim=1).tolist()


# --- DPO and its relatives


@pytest.mark.parametrize("beta", [0.05, 2.0])
def test_dpo_at_the_reference(beta: float):
    """ln 2, with gradient −β/2 on every token of the chosen answer and β/2 on those of the rejected one."""
    policy, _ = random_rows(0)
    outputs, batch = make_pairs(policy)
    loss = dpo(outputs, batch, beta=beta)
    assert loss.values.tolist() == approx([math.log(2.0)] * 4, abs=1e-15)
    assert loss.metrics["pair_accuracy"].tolist() == [0.5] * 4
    loss.values.sum().backward()
    sign = torch.tensor([-1.0, 1.0] * 4, dtype=torch.float64)[:, None]
    assert allclose(outputs.logprobs.grad, sign * batch.mask * beta / 2, atol=1e-15)


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.4])
def test_robust_dpo_is_unbiased_and_cdpo_is_not(eps: float):
    """The expectation over swapped labels is DPO's loss on clean labels."""
    case = make_pairs(*random_rows(7, scale=3.0))
    clean = dpo(*case, beta=0.5).values
    noisy = (1 - eps) * robust_dpo(*case, beta=0.5, flip_rate=eps).values
    noisy = noisy + eps * robust_dpo(*swapped(case), beta=0.5, flip_rate=eps).values
    assert allclose(noisy, clean, atol=1e-12)
    mixed = (1 - eps) * dpo(*case, beta=0.5).values + eps * dpo(*swapped(case), beta=0.5).values
    assert allclose(dpo(*case, beta=0.5, label_smoothing=eps).values, mixed, atol=1e-12)
    assert (mixed - clean).abs().max() > 1e-3


def test_cdpo_has_its_minimum_where_the_model_is_as_sure_as_the_labels():
    best = math.log(0.8 / 0.2) / 0.1  # σ(βΔ) = 1 − ε
    slope = gradient(dpo, one_pair(best, 0.0), beta=0.1, label_smoothing=0.2)
    assert slope == approx([0.0, 0.0], abs=1e-12)
    assert gradient(dpo, one_pair(best - 1, 0.0), beta=0.1, label_smoothing=0.2)[0] < 0.0
    assert gradient(dpo, one_pair(best + 1, 0.0), beta=0.1, label_smoothing=0.2)[0] > 0.0


# --- DiscoPOP


@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.11, 0.2])
def test_discopop_slope_at_the_reference_is_right_above_a_temperature(temperature: float):
    """``β ((1 − log 2) / (4 τ) − 3/4)`` per nat of the chosen answer, worked out by hand; negative is right."""
    slope = 0.5 * ((1 - math.log(2.0)) / (4 * temperature) - 0.75)
    found = gradient(discopop, one_pair(0.0, 0.0), beta=0.5, temperature=temperature)
    assert found == approx([slope, -slope], abs=1e-15)
    assert (slope < 0) == (temperature > (1 - math.log(2.0)) / 3)


# --- IPO, hinge


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_ipo_minimum(beta: float):
    target = 1 / (2 * beta)
    assert values_of(ipo, one_pair(target, 0.0), beta=beta) == approx([0.0], abs=1e-20)
    assert gradient(ipo, one_pair(target, 0.0), beta=beta) == approx([0.0, 0.0], abs=1e-12)
    assert values_of(ipo, one_pair(target + 1, 0.0), beta=beta) == approx([1.0], abs=1e-12)
    assert values_of(ipo, one_pair(target, 1.0), beta=beta) == approx([1.0], abs=1e-12)


# --- EXO, NCA, APO


def test_exo_is_zero_at_the_smoothed_label_and_bounded():
    eps = 0.01
    best = math.log((1 - eps) / eps) / 0.1
    assert values_of(exo, one_pair(best, 0.0), label_smoothing=eps) == approx([0.0], abs=1e-12)
    assert gradient(exo, one_pair(best, 0.0), label_smoothing=eps) == approx([0.0, 0.0], abs=1e-12)
    at_reference = 0.5 * math.log(0.5 / (1 - eps)) + 0.5 * math.log(0.5 / eps)
    assert values_of(exo, one_pair(0.0, 0.0), label_smoothing=eps) == approx([at_reference], abs=1e-12)
    assert values_of(exo, one_pair(-1e4, 0.0), label_smoothing=eps) == approx([-math.log(eps)], abs=1e-9)
    assert values_of(exo, one_pair(1e4, 0.0), label_smoothing=eps) == approx([-math.log(1 - eps)], abs=1e-9)


def test_nca_at_the_reference_and_at_its_minimum():
    assert values_of(nca, one_pair(0.0, 0.0)) == approx([2 * math.log(2.0)], abs=1e-15)
    # dr_w: −1/2 + 1/4, dr_l: 1/4, times β
    assert gradient(nca, one_pair(0.0, 0.0), beta=0.4) == approx([-0.1, 0.1], abs=1e-15)
    slope = gradient(nca, one_pair(math.log(2.0) / 0.4, -3.0), beta=0.4)
    assert slope[0] == approx(0.0, abs=1e-15)  # absolute: wherever the rejected answer is


def test_apo_limits():
    for word in (apo_zero, apo_down):
        assert values_of(word, one_pair(0.0, 0.0)) == approx([1.0], abs=1e-15)
    assert values_of(apo_zero, one_pair(1e3, -1e3)) == approx([0.0], abs=1e-12)
    assert values_of(apo_zero, one_pair(-1e3, 1e3)) == approx([2.0], abs=1e-12)
    assert values_of(apo_down, one_pair(-1e3, -1e4)) == approx([0.0], abs=1e-12)
    assert values_of(apo_down, one_pair(1e3, 1e4)) == approx([2.0], abs=1e-12)
    assert values_of(apo_down, one_pair(1e3, -1e3)) == approx([1.0], abs=1e-12)


def test_apo_directions_by_hand():
    """Zero lifts the chosen answer, down lowers it once it is above the rejected one."""
    assert gradient(apo_zero, one_pair(0.0, 0.0), beta=0.4) == approx([-0.1, 0.1], abs=1e-15)
    assert gradient(apo_down, one_pair(0.0, 0.0), beta=0.4) == approx([0.0, 0.1], abs=1e-15)
    slope = gradient(apo_down, one_pair(0.0, -5.0), beta=0.4)
    s = 1 / (1 + math.exp(-2.0))
    assert slope == approx([0.4 * (0.25 - s * (1 - s)), 0.4 * s * (1 - s)], abs=1e-14)
    assert slope[0] > 0.0


# --- options and primitives


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("robust_dpo", {"flip_rate": 0.5}),
        ("exo", {"label_smoothing": 0.0}),
        ("simpo", {"gamma": -0.1}),
        ("hinge", {"margin": 0.0}),
    ],
)
def test_options_without_a_meaning_are_refused(name: str, options: dict[str, float]):
    with pytest.raises(RecipeError, match=next(iter(options))):
        find("objective", name).options(options, "objective")


def test_log1mexp():
    x = [-1e-6, -1e-3, -0.5, -math.log(2.0), -1.0, -30.0, -700.0]
    got = log1mexp(torch.tensor(x, dtype=torch.float64)).tolist()
    assert got == approx([math.log(-math.expm1(v)) if v > -0.7 else math.log1p(-math.exp(v)) for v in x])
    assert got[-2] == approx(-math.exp(-30.0), rel=1e-12)  # log(1 − e^x) in the naive form is 0 here
    clamped = log1mexp(torch.tensor([0.0, 1e-3, -1e-9], dtype=torch.float64))
    assert clamped.tolist() == approx([math.log(-math.expm1(-1e-6))] * 3, rel=1e-12)
    point = torch.tensor([-1e-5, -0.1, -0.6, -0.8, -5.0, -50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log1mexp, (point,), eps=1e-9, atol=1e-4, rtol=1e-4)
    for dtype in (torch.float32, torch.float64):
        edge = torch.tensor([0.0, -1e-8, -1e4], dtype=dtype, requires_grad=True)
        log1mexp(edge).sum().backward()
        assert edge.grad.isfinite().all()


def test_row_last_wins_and_nan_unless_finite():
    values = torch.tensor([[1.0, 2.0, 3.0, math.nan], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[False, True, True, False], [False, True, False, True], [False] * 4])
    last = row_last(values, mask)
    assert last[:2].tolist() == [3.0, 7.0]
    assert math.isnan(last[2].item())
    assert wins(torch.tensor([2.0, -1e-30, 0.0])).tolist() == [1.0, 0.0, 0.5]
    assert math.isnan(wins(torch.tensor(math.nan)).item())
    kept = nan_unless_finite(torch.tensor([1.0, math.inf, -math.inf, math.nan]))
    assert kept[0] == 1.0
    assert kept[1:].isnan().all()
