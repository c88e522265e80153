"""A dictionary encodes and decodes by its formula, its scale can be folded in, its gradients are those of autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from closeness import approx, assert_close
from posttrain.errors import UsageError
from posttrain.interpret.saes.fitting import sae_loss
from posttrain.interpret.saes.sae import SparseAutoencoder, batchtopk, keep_largest, l1, topk
from refusing import refuses


def by_hand() -> SparseAutoencoder:
    """d = 2, F = 3: rows (1, 0), (0, 1), (0.6, 0.8); b_dec (1, −1), b_enc (0, 0.5, −1)."""
    sae = SparseAutoencoder(2, 3, kind="l1")
    with torch.no_grad():
        rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        sae.W_dec.copy_(rows)
        sae.W_enc.copy_(rows.T)
        sae.b_dec.copy_(torch.tensor([1.0, -1.0]))
        sae.b_enc.copy_(torch.tensor([0.0, 0.5, -1.0]))
    return sae


def test_encoding_and_decoding_by_hand() -> None:
    sae = by_hand()
    x = torch.tensor([[3.0, 1.0], [0.0, -2.0]])  # about b_dec: (2, 2) and (−1, −1)
    features = sae.encode(x)
    assert_close(features, torch.tensor([[2.0, 2.5, 1.8], [0.0, 0.0, 0.0]]))
    assert_close(sae.decode(features), torch.tensor([[4.08, 2.94], [1.0, -1.0]]))
    assert_close(sae(x), sae.decode(features))


def test_encode_reads_each_row_by_itself() -> None:
    """pre = x of four features that are the coordinates, less a bias that does not matter here."""
    x = torch.tensor([[0.5, 2.0, 1.0, -3.0], [-1.0, -2.0, -0.5, 0.25]])
    for kind, options, expected in (
        ("topk", {"k": 2}, [[0, 2, 1, 0], [0, 0, 0, 0.25]]),
        ("batchtopk", {}, [[0, 2, 1, 0], [0, 0, 0, 0]]),  # strictly above the threshold
    ):
        sae = SparseAutoencoder(4, 4, kind, options)
        with torch.no_grad():
            sae.W_enc.copy_(torch.eye(4))
        sae.threshold.fill_(0.5)
        assert sae.encode(x).tolist() == expected
        assert sae.encode(x, torch.tensor([2, 0])).tolist() == [[row[2], row[0]] for row in expected]


def test_first_weights_are_unit_rows_and_a_function_of_the_seed() -> None:
    sae = SparseAutoencoder(16, 40, seed=3)
    rows = sae.W_dec.detach()
    assert_close(rows.norm(dim=1), torch.ones(40))
    assert torch.equal(sae.W_enc.detach(), rows.T)
    assert torch.equal(SparseAutoencoder(16, 40, seed=3).W_dec, rows)
    assert not torch.equal(SparseAutoencoder(16, 40, seed=4).W_dec, rows)


def test_prepare_scale_and_mean_are_those_of_the_sample() -> None:
    x = torch.randn(500, 9) * 3 + 1
    sae = SparseAutoencoder(9, 20)
    sae.prepare(x)
    scaled = sae.scaled(x)
    assert float(scaled.norm(dim=1).mean()) == approx(math.sqrt(9))
    assert_close(sae.b_dec.detach(), scaled.mean(0))
    with refuses(UsageError, "all zero"):
        sae.prepare(torch.zeros(4, 9))


@pytest.mark.parametrize("kind", ["l1", "topk", "batchtopk"])
def test_fold_changes_nothing_but_the_unit_of_features(kind: str) -> None:
    torch.manual_seed(0)
    sae = SparseAutoencoder(12, 30, kind, {"k": 5} if "topk" in kind else {})
    x = torch.randn(50, 12) * 40 + 3
    sae.prepare(x)
    with torch.no_grad():
        sae.b_enc.normal_()
        sae.threshold.uniform_(0.1, 1.5)
    before, features, scale = sae(x), sae.encode(x), sae.input_scale.clone()
    sae.fold()
    assert sae.input_scale.tolist() == [1.0]
    assert_close(sae(x), before, rtol=1e-4, atol=1e-3)
    assert_close(sae.encode(x), features / scale, rtol=1e-4, atol=1e-3)
    assert_close(sae.W_dec.detach().norm(dim=1), torch.ones(30))


PRE = torch.tensor([[3.0, -1.0, 0.5, 2.0], [1.0, 4.0, -2.0, 0.25]])
ZERO = torch.zeros(4)


def test_l1() -> None:
    codes = l1(PRE, ZERO, 1.0, coefficient=0.1)
    assert codes.features.tolist() == [[3, 0, 0.5, 2], [1, 4, 0, 0.25]]
    assert float(codes.penalty or 0) == approx(0.1 * (5.5 + 5.25) / 2)
    assert codes.threshold is None
    assert float(l1(PRE, ZERO, 0.01, coefficient=0.1, warmup=0.05).penalty or 0) == approx(0.1 * 5.375 / 5)
    assert float(l1(PRE, ZERO, 0.0, coefficient=0.1, warmup=0.0).penalty or 0) == approx(0.1 * 5.375)


def test_topk_keeps_so_many_of_each_row() -> None:
    assert topk(PRE, ZERO, 1.0, k=2).features.tolist() == [[3, 0, 0, 2], [1, 4, 0, 0]]
    assert keep_largest(PRE, 9).tolist() == torch.relu(PRE).tolist()


def test_batchtopk_keeps_so_many_of_the_batch() -> None:
    codes = batchtopk(PRE, ZERO, 1.0, k=1.5, sample=1.0)  # 3 of 8: 4, 3, 2; the next is 1
    assert codes.features.tolist() == [[3, 0, 0, 2], [0, 4, 0, 0]]
    assert codes.threshold is not None
    assert codes.threshold.tolist() == [1, 1, 1, 1]
    later = batchtopk(PRE, torch.full((4,), 2.0), 1.0, k=1.5, sample=1.0, average=0.25)
    assert later.threshold is not None
    assert later.threshold.tolist() == [1.75] * 4
    none = batchtopk(-PRE.abs(), ZERO, 1.0, k=1, sample=1.0)
    assert none.features.count_nonzero() == 0
    assert none.threshold is not None
    assert none.threshold.tolist() == [0] * 4


# The loss.

D, F, N = 10, 48, 40
OPTIONS: dict[str, dict[str, float]] = {"l1": {"coefficient": 0.05}, "topk": {"k": 4}, "batchtopk": {"k": 4}}


def small_sae(kind: str) -> tuple[SparseAutoencoder, Tensor]:
    torch.manual_seed(1)
    sae = SparseAutoencoder(D, F, kind, OPTIONS[kind]).double()
    with torch.no_grad():
        sae.b_enc.normal_(std=0.3)
        sae.b_dec.normal_(std=0.3)
        sae.W_enc.mul_(1.3)
    return sae, torch.randn(N, D, dtype=torch.float64)


def plain_loss(sae: SparseAutoencoder, x: Tensor, auxk: float = 0.0, dead: Tensor | None = None) -> Tensor:
    """The formula of the comment in ``fitting``, without its savings."""
    pre = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    codes = sae.codes(pre, sae.threshold, 1.0)
    output = codes.features @ sae.W_dec + sae.b_dec
    loss = (x - output).square().mean()
    if codes.penalty is not None:
        loss = loss + codes.penalty
    if dead is not None:
        revived = keep_largest(pre[:, dead], x.shape[1] // 2) @ sae.W_dec[dead]
        loss = loss + auxk * ((x - output).detach() - revived).square().mean()
    return loss


@pytest.mark.parametrize("kind", OPTIONS)
def test_loss_and_gradients_are_those_of_the_formula(kind: str) -> None:
    sae, x = small_sae(kind)
    loss, _ = sae_loss(sae, x, dtype=torch.float64)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in sae.named_parameters() if p.grad is not None}
    sae.zero_grad()
    expected = plain_loss(sae, x)
    expected.backward()
    assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    theirs = {name: p.grad for name, p in sae.named_parameters()}
    assert set(ours) == set(theirs) == {"W_enc", "W_dec", "b_enc", "b_dec"}
    for name, gradient in theirs.items():
        assert gradient is not None
        assert float(gradient.abs().max()) > 0, name
        assert_close(ours[name], gradient, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("num_dead", [1, 3, 20])
def test_auxk_teaches_dead_features_what_is_left_of_the_error(num_dead: int) -> None:
    sae, x = small_sae("topk")
    dead = torch.zeros(F, dtype=torch.bool)
    dead[torch.randperm(F)[:num_dead]] = True
    loss, measured = sae_loss(sae, x, auxk=0.25, dead=dead, dtype=torch.float64)
    loss.backward()
    ours = [p.grad.clone() for p in sae.parameters() if p.grad is not None]
    sae.zero_grad()
    expected = plain_loss(sae, x, 0.25, dead)
    expected.backward()
    assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    assert float(measured.auxiliary) > 0
    for gradient, parameter in zip(ours, sae.parameters(), strict=True):
        assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-14)


def test_bf16_products_give_nearly_the_same_gradients() -> None:
    torch.manual_seed(0)
    sae = SparseAutoencoder(64, 256, kind="l1", options={"coefficient": 0.01})
    x = torch.randn(512, 64)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        sae.zero_grad()
        loss, _ = sae_loss(sae, x, dtype=dtype)
        loss.backward()
        gradients.append([p.grad.clone() for p in sae.parameters() if p.grad is not None])
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.float32
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
