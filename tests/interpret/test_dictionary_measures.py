"""FVU, L0 and densities by hand; the matching of directions; a site replaced while the model predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import activations_of
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import measure, recover


def test_fvu_has_one_mean_for_all_rows() -> None:
    """A dictionary that keeps the first coordinate (when positive) and gives the mean of the second."""
    dictionary = Dictionary(2, 1, kind="l1")
    with torch.no_grad():
        dictionary.W_enc.copy_(torch.tensor([[1.0], [0.0]]))
        dictionary.W_dec.copy_(torch.tensor([[1.0, 0.0]]))
        dictionary.b_dec.copy_(torch.tensor([0.0, 3.0]))
    x = torch.tensor([[2.0, 3.0], [4.0, 5.0], [0.0, 1.0], [-2.0, 3.0]])
    # errors: 0, 2² (second), 2² (second), 2² (first) = 12; about the mean (1, 3): 1+9+1+9 and 0+4+4+0 = 28
    quality = measure(dictionary, [x[:1], x[1:]])
    assert quality.fvu == pytest.approx(12 / 28)
    assert quality.l0 == 0.5
    assert quality.density.tolist() == [0.5]
    assert quality.silent == 0.0
    assert quality.rows == 4
    assert measure(dictionary, [x]).fvu == pytest.approx(quality.fvu)


def test_fvu_far_from_the_origin_keeps_its_digits() -> None:
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).double() + 1e4
    dictionary = Dictionary(8, 4, kind="l1")
    with torch.no_grad():
        dictionary.b_dec.copy_(x.float().double().mean(0))
        dictionary.W_dec.zero_()
    assert measure(dictionary, x.float().split(100)).fvu == pytest.approx(1.0, rel=1e-4)


DOCUMENTS = [[5, 9, 30, 2, 77], [4, 4, 100], [8]]


def exact(d: int) -> Dictionary:
    """Features ± each coordinate: it gives back what it is given."""
    dictionary = Dictionary(d, 2 * d, kind="l1")
    with torch.no_grad():
        both = torch.cat([torch.eye(d), -torch.eye(d)])
        dictionary.W_dec.copy_(both)
        dictionary.W_enc.copy_(both.T)
    return dictionary


@pytest.mark.parametrize("site", ["resid.0", "resid.1", "resid.2"])
def test_a_site_is_replaced_and_nothing_else(site: str, tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")
    ids = torch.tensor([DOCUMENTS[0]])
    clean = model(input_ids=ids).logits
    seen: list[Tensor] = []

    def look(values: Tensor) -> Tensor:
        seen.append(values.clone())
        return values

    with replaced(model, site, look):
        assert torch.equal(model(input_ids=ids).logits, clean)
    torch.testing.assert_close(seen[0][0], activations_of(model, [DOCUMENTS[0]], [site])[site])
    with replaced(model, site, torch.zeros_like):
        assert not torch.equal(model(input_ids=ids).logits, clean)
    assert torch.equal(model(input_ids=ids).logits, clean)
    with pytest.raises(UsageError, match="this model has 2 layers"), replaced(model, "resid.3", look):
        pass


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_what_loses_nothing_recovers_all(architecture: str, tiny_random: Callable[..., Any]) -> None:
    model = tiny_random(architecture)
    numbers = recover(model, exact(64), "resid.1", DOCUMENTS)
    assert numbers["tokens"] == 4 + 2
    assert numbers["ce_spliced"] == pytest.approx(numbers["ce"], abs=1e-4)
    assert numbers["kl_spliced"] == pytest.approx(0, abs=1e-4)
    assert numbers["ce_recovered_zero"] == pytest.approx(1, abs=1e-3)
    assert numbers["kl_recovered_mean"] == pytest.approx(1, abs=1e-3)
    assert numbers["kl_zero"] > 0.05
    assert numbers["kl_mean"] > 0.05
    expected = 0.0
    for ids in DOCUMENTS[:2]:
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= sum(log_probs[i, token].item() for i, token in enumerate(ids[1:]))
    assert numbers["ce"] == pytest.approx(expected / 6, rel=1e-5)


def test_a_dictionary_of_nothing_is_the_mean_or_zero(tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")
    nothing = exact(64)
    with torch.no_grad():
        nothing.W_dec.zero_()
    found = recover(model, nothing, "resid.1", DOCUMENTS)
    assert found["ce_spliced"] == found["ce_zero"]
    assert (found["ce_recovered_zero"], found["kl_recovered_zero"]) == (0, 0)
    rows = activations_of(model, DOCUMENTS[:2], ["resid.1"])["resid.1"]
    with torch.no_grad():
        nothing.b_dec.copy_(rows[[1, 2, 3, 4, 6, 7]].mean(0))
    found = recover(model, nothing, "resid.1", DOCUMENTS)
    assert found["ce_spliced"] == pytest.approx(found["ce_mean"], rel=1e-5)
    assert found["kl_spliced"] == pytest.approx(found["kl_mean"], rel=1e-5)


def test_the_first_token_of_a_document_stays(tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")

    def erase(values: Tensor) -> Tensor:
        return torch.cat([values[:, :1], torch.zeros_like(values[:, 1:])], dim=1)

    with replaced(model, "resid.1", erase):
        log_probs = model(input_ids=torch.tensor([DOCUMENTS[0]])).logits[0].log_softmax(-1)
    expected = -sum(log_probs[i, token].item() for i, token in enumerate(DOCUMENTS[0][1:])) / 4
    assert recover(model, exact(64), "resid.1", DOCUMENTS[:1])["ce_zero"] == pytest.approx(expected, rel=1e-5)


def test_outliers_stay_as_they_are(tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")
    found = recover(model, exact(64), "resid.1", DOCUMENTS, limit=1e-6)
    assert found["ce_zero"] == found["ce_mean"] == found["ce"]
    assert found["kl_zero"] == 0


def test_recover_without_a_document_of_two_tokens_is_refused(tiny_random: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="a document of two tokens"):
        recover(tiny_random("qwen3"), exact(64), "resid.1", [[3]])
