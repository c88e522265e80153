"""A dictionary reads and writes activations by the formula in its docstring, and its scale can be folded in."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.errors import RecipeError, UnknownWord, UsageError
from posttrain.interpret.dictionaries.dictionary import Dictionary


def by_hand() -> Dictionary:
    """d = 2, F = 3: rows (1, 0), (0, 1), (0.6, 0.8); b_dec (1, −1), b_enc (0, 0.5, −1)."""
    dictionary = Dictionary(2, 3, kind="l1")
    with torch.no_grad():
        rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        dictionary.W_dec.copy_(rows[:, None])
        dictionary.W_enc.copy_(rows.T[None])
        dictionary.b_dec.copy_(torch.tensor([[1.0, -1.0]]))
        dictionary.b_enc.copy_(torch.tensor([0.0, 0.5, -1.0]))
    return dictionary


def test_encoding_and_decoding_by_hand() -> None:
    dictionary = by_hand()
    x = torch.tensor([[3.0, 1.0], [0.0, -2.0]])  # about b_dec: (2, 2) and (−1, −1)
    torch.testing.assert_close(dictionary.pre_activations(x), torch.tensor([[2.0, 2.5, 1.8], [-1.0, -0.5, -2.4]]))
    features = dictionary.encode(x)
    torch.testing.assert_close(features, torch.tensor([[2.0, 2.5, 1.8], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(dictionary.decode(features), torch.tensor([[4.08, 2.94], [1.0, -1.0]]))
    assert dictionary(x[:, None]).shape == (2, 1, 2)


def test_a_row_is_read_by_itself() -> None:
    pre = torch.tensor([[0.5, 2.0, 1.0, -3.0], [-1.0, -2.0, -0.5, 0.25]])
    assert Dictionary(2, 4, kind="topk", options={"k": 2}).select(pre).tolist() == [[0, 2, 1, 0], [0, 0, 0, 0.25]]
    batch = Dictionary(2, 4, kind="batchtopk")
    batch.threshold.fill_(0.5)
    assert batch.select(pre).tolist() == [[0, 2, 1, 0], [0, 0, 0, 0]]  # strictly above


@pytest.mark.parametrize("sources", [1, 2])
def test_the_first_weights(sources: int) -> None:
    dictionary = Dictionary(16, 40, sources, seed=3)
    rows = dictionary.W_dec.detach().view(40, -1)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(40))
    torch.testing.assert_close(dictionary.W_enc.detach().reshape(-1, 40), rows.T)
    assert torch.equal(Dictionary(16, 40, sources, seed=3).W_dec, dictionary.W_dec)
    assert not torch.equal(Dictionary(16, 40, sources, seed=4).W_dec, dictionary.W_dec)


def test_scale_and_mean_are_those_of_the_sample() -> None:
    x = torch.randn(500, 2, 9) * torch.tensor([3.0, 0.2])[:, None] + 1
    dictionary = Dictionary(9, 20, 2)
    dictionary.prepare(x)
    scaled = dictionary.scaled(x).view(500, 2, 9)
    torch.testing.assert_close(scaled.norm(dim=2).mean(0), torch.full((2,), math.sqrt(9)))
    torch.testing.assert_close(dictionary.b_dec.detach(), scaled.mean(0))
    with pytest.raises(UsageError, match="all zero"):
        dictionary.prepare(torch.zeros(4, 2, 9))


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("kind", ["l1", "topk", "batchtopk", "jumprelu"])
def test_folding_the_scale_changes_nothing_but_the_unit_of_features(kind: str, sources: int) -> None:
    torch.manual_seed(0)
    dictionary = Dictionary(12, 30, sources, kind, {"k": 5} if "topk" in kind else {})
    x = torch.randn(50, sources, 12) * 40 + 3
    dictionary.prepare(x)
    with torch.no_grad():
        dictionary.b_enc.normal_()
        if dictionary.architecture == "jumprelu":
            dictionary.threshold.uniform_(0.1, 1.5)
    before, features, scale = dictionary(x), dictionary.encode(x), dictionary.input_scale.clone()
    dictionary.fold()
    torch.testing.assert_close(dictionary.input_scale, torch.ones(sources))
    torch.testing.assert_close(dictionary(x), before, rtol=1e-4, atol=1e-3)
    unit = 1 / scale if sources == 1 else torch.ones(1)
    torch.testing.assert_close(dictionary.encode(x), features * unit, rtol=1e-4, atol=1e-3)
    if sources == 1:
        torch.testing.assert_close(dictionary.W_dec.detach().view(30, -1).norm(dim=1), torch.ones(30))


def test_normalizing_keeps_directions() -> None:
    dictionary = Dictionary(8, 10, 2, kind="jumprelu")
    rows = dictionary.W_dec.detach().clone()
    with torch.no_grad():
        dictionary.W_dec *= torch.linspace(0.5, 3, 10)[:, None, None]
        dictionary.threshold[0] = -1.0
    dictionary.normalize()
    torch.testing.assert_close(dictionary.W_dec.detach(), rows)
    assert float(dictionary.threshold.detach()[0]) == 0.0
    assert float(dictionary.threshold.detach()[1]) == pytest.approx(0.1)


def test_what_is_asked_for_wrongly() -> None:
    with pytest.raises(UnknownWord, match=r"no dictionary named 'topkk'.* Did you mean 'topk'"):
        Dictionary(4, 8, kind="topkk")
    with pytest.raises(RecipeError, match="has no key 'kk'"):
        Dictionary(4, 8, kind="topk", options={"kk": 3})
    for prefixes in ([4, 2], [4, 9], [0], [8, 8]):
        with pytest.raises(UsageError, match="matryoshka"):
            Dictionary(4, 8, matryoshka=prefixes)
    assert Dictionary(4, 8, matryoshka=[2, 8]).prefixes == (2, 8)
    assert set(dict(Dictionary(4, 8, kind="jumprelu").named_parameters())) == {
        "W_enc", "W_dec", "b_enc", "b_dec", "threshold",
    }  # fmt: skip
    assert "threshold" in dict(Dictionary(4, 8, kind="batchtopk").named_buffers())
