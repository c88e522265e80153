"""The gradients by hand are those of autograd, for every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.interpret.dictionaries.dictionary import Dictionary, keep_largest
from posttrain.interpret.dictionaries.fitting import dictionary_loss

D, F, N = 10, 48, 40
OPTIONS: dict[str, dict[str, float]] = {
    "l1": {"coefficient": 0.05},
    "topk": {"k": 4},
    "batchtopk": {"k": 4},
}


def a_dictionary(kind: str) -> tuple[Dictionary, Tensor]:
    torch.manual_seed(1)
    dictionary = Dictionary(D, F, kind, OPTIONS[kind]).double()
    with torch.no_grad():
        dictionary.b_enc.normal_(std=0.3)
        dictionary.b_dec.normal_(std=0.3)
        dictionary.W_enc.mul_(1.3)
    return dictionary, torch.randn(N, D, dtype=torch.float64)


def plain_loss(dictionary: Dictionary, x: Tensor, auxk: float = 0.0, dead: Tensor | None = None) -> Tensor:
    """The formula of the module's comment, written down without any of its savings."""
    pre = (x - dictionary.b_dec) @ dictionary.W_enc + dictionary.b_enc
    codes = dictionary.codes(pre, dictionary.threshold, 1.0)
    output = codes.features @ dictionary.W_dec + dictionary.b_dec
    loss = (x - output).square().mean()
    if codes.penalty is not None:
        loss = loss + codes.penalty
    if dead is not None:
        revived = keep_largest(pre[:, dead], x.shape[1] // 2) @ dictionary.W_dec[dead]
        loss = loss + auxk * ((x - output).detach() - revived).square().mean()
    return loss


@pytest.mark.parametrize("kind", OPTIONS)
def test_loss_and_gradients_are_those_of_the_formula(kind: str) -> None:
    dictionary, x = a_dictionary(kind)
    loss, _ = dictionary_loss(dictionary, x, dtype=torch.float64)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in dictionary.named_parameters() if p.grad is not None}
    dictionary.zero_grad()
    expected = plain_loss(dictionary, x)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    theirs = {name: p.grad for name, p in dictionary.named_parameters()}
    assert set(ours) == set(theirs) == {"W_enc", "W_dec", "b_enc", "b_dec"}
    for name, gradient in theirs.items():
        assert gradient is not None
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("num_dead", [1, 3, 20])
def test_auxk_teaches_dead_features_what_is_left_of_the_error(num_dead: int) -> None:
    dictionary, x = a_dictionary("topk")
    dead = torch.zeros(F, dtype=torch.bool)
    dead[torch.randperm(F)[:num_dead]] = True
    loss, measured = dictionary_loss(dictionary, x, auxk=0.25, dead=dead, dtype=torch.float64)
    loss.backward()
    ours = [p.grad.clone() for p in dictionary.parameters() if p.grad is not None]
    dictionary.zero_grad()
    expected = plain_loss(dictionary, x, 0.25, dead)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    assert float(measured.auxiliary) > 0
    for gradient, parameter in zip(ours, dictionary.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-14)


def test_no_dead_features_no_auxk() -> None:
    dictionary, x = a_dictionary("topk")
    loss, measured = dictionary_loss(
        dictionary, x, auxk=0.25, dead=torch.zeros(F, dtype=torch.bool), dtype=torch.float64
    )
    assert float(measured.auxiliary) == 0
    torch.testing.assert_close(loss.detach(), plain_loss(dictionary, x).detach())


def test_what_a_step_measures() -> None:
    dictionary, x = a_dictionary("topk")
    _, measured = dictionary_loss(dictionary, x, dtype=torch.float64)
    features = dictionary.encode(x)
    torch.testing.assert_close(measured.features, features)
    assert torch.equal(measured.fired, (features > 0).any(0))
    torch.testing.assert_close(measured.squared_error, (dictionary(x) - x).square().mean().detach())


def test_bf16_products_give_nearly_the_same_gradients() -> None:
    torch.manual_seed(0)
    dictionary = Dictionary(64, 256, kind="l1", options={"coefficient": 0.01})
    x = torch.randn(512, 64)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        dictionary.zero_grad()
        loss, _ = dictionary_loss(dictionary, x, dtype=dtype)
        loss.backward()
        gradients.append([p.grad.clone() for p in dictionary.parameters() if p.grad is not None])
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.float32
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
