"""Corrections of the sampler's mismatch: values by hand, identities, references, edges."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import approx
from posttrain.algorithms.correction import geometric_mask, icepop, sequence_tis, token_tis

WORDS = {"token_tis": token_tis, "sequence_tis": sequence_tis, "icepop": icepop, "geometric_mask": geometric_mask}


def case(rows: list[list[float]], lengths: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios of the given ratios from position 1 on."""
    ratios = torch.tensor([[1.0, *row] for row in rows], dtype=torch.float64)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    mask[:, 0] = False
    for b, n in enumerate(lengths or []):
        mask[b, n + 1 :] = False
    return ratios.log(), mask


def test_token_tis_by_hand():
    assert token_tis(*case([[0.5, 1.5, 4.0]]))[0].tolist() == approx([1.0, 0.5, 1.5, 2.0], abs=1e-14)
    assert token_tis(*case([[0.5, 1.5, 4.0]]), cap=5.0)[0, 3].item() == approx(4.0, abs=1e-14)


def test_sequence_tis_by_hand():
    log_ratio, mask = case([[0.5, 1.5, 1.2], [2.0, 1.5, 9.0], [0.5, 0.5, 0.5]], lengths=[3, 2, 3])
    weights = sequence_tis(log_ratio, mask)
    assert weights[0, 1:].tolist() == approx([0.9] * 3, abs=1e-14)
    assert weights[1].tolist() == approx([1.0, 2.0, 2.0, 1.0], abs=1e-14)  # 3 is capped; 9 is not trained
    assert weights[2, 1:].tolist() == approx([0.125] * 3, abs=1e-14)


def test_icepop_by_hand():
    log_ratio, mask = case([[0.4, 0.6, 4.9, 5.1]])
    assert icepop(log_ratio, mask)[0].tolist() == approx([1.0, 0.0, 0.6, 4.9, 0.0], abs=1e-14)
    assert icepop(log_ratio, mask, low=0.0, high=6.0)[0, 1:].tolist() == approx([0.4, 0.6, 4.9, 5.1])


def test_geometric_mask_by_hand():
    rows = [[1.1, 1 / 1.1, 1.0], [0.98, 0.98, 0.98], [1.002, 1.002, 1.002], [0.8, 1.25, 100.0]]
    log_ratio, mask = case(rows, lengths=[3, 3, 3, 2])
    weights = geometric_mask(log_ratio, mask)
    assert weights[:, 1:3].tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]  # 100 is not trained
    assert weights[:, 0].tolist() == [1.0] * 4
    assert geometric_mask(log_ratio, mask, low=0.97)[1, 1].item() == 1.0
    kept = geometric_mask(log_ratio, mask, weigh="token", cap=1.05)
    assert kept[0, 1:].tolist() == approx([1.05, 1 / 1.1, 1.0], abs=1e-14)
    assert kept[1, 1].item() == 0.0
    assert geometric_mask(log_ratio, mask, weigh="sequence")[0, 1:].tolist() == approx([1.0] * 3, abs=1e-14)


@pytest.mark.parametrize("name", WORDS)
def test_the_same_probabilities_change_nothing(name: str):
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) > 0.4
    assert torch.equal(WORDS[name](torch.zeros(3, 6), mask), torch.ones(3, 6))


def test_against_a_plain_python_reference():
    generator = torch.Generator().manual_seed(3)
    log_ratio = 0.8 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) > 0.3
    got = {name: word(log_ratio, mask) for name, word in WORDS.items()}
    wide = geometric_mask(log_ratio, mask, low=0.8, high=1.2)
    accepted = set()
    for b in range(6):
        ratios = [math.exp(log_ratio[b, t]) for t in range(9) if mask[b, t]]
        geometric = math.prod(ratios) ** (1 / len(ratios))
        for t in range(9):
            if not mask[b, t]:
                assert all(weights[b, t] == 1.0 for weights in got.values())
                continue
            rho = math.exp(log_ratio[b, t])
            assert got["token_tis"][b, t].item() == approx(min(rho, 2.0), rel=1e-12)
            assert got["sequence_tis"][b, t].item() == approx(min(math.prod(ratios), 2.0), rel=1e-12)
            assert got["icepop"][b, t].item() == approx(rho if 0.5 <= rho <= 5.0 else 0.0, rel=1e-12)
            assert wide[b, t].item() == float(0.8 <= geometric <= 1.2)
        accepted.add(0.8 <= geometric <= 1.2)
    assert accepted == {True, False}


def test_without_a_cap_the_sequence_weight_is_unbiased():
    """Σ_y μ(y) w(y) f(y) = Σ_y π(y) f(y), exactly, over all 9 sequences of two tokens."""
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    log_ratio = (trainer.log() - sampler.log())[pairs]
    weights = sequence_tis(log_ratio, torch.ones(9, 2, dtype=torch.bool), cap=100.0)[:, 0]
    function = torch.arange(9, dtype=torch.float64).square()
    got = (sampler[pairs].prod(1) * weights * function).sum()
    assert got.item() == approx((trainer[pairs].prod(1) * function).sum().item(), abs=1e-12)


@pytest.mark.parametrize("name", WORDS)
def test_edges_are_finite_detached_and_honest(name: str):
    log_ratio = torch.tensor([[0.0, -math.inf, 0.1], [0.0, 1e6, 0.1], [math.nan, -1e6, 0.0]], requires_grad=True)
    mask = torch.tensor([[False, True, True]] * 3)
    weights = WORDS[name](log_ratio, mask)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert not weights.requires_grad
    broken = WORDS[name](torch.tensor([[0.0, math.nan]]), torch.tensor([[False, True]]))
    assert math.isnan(broken[0, 1])  # not hidden: the loop refuses it
