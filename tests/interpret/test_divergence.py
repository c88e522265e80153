"""KL between two models token by token, and how much of it patched activations recover."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from families import activations_of, disturbed

from closeness import OF_EMBEDDED, allclose, approx
from posttrain.interpret.differences.divergence import Patcher, divergence, feature_patch, locate_divergence, token_kl
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection

DOCUMENTS = [[0, 5, 9, 30, 41, 17, 8], [0, 77, 3, 12], [0, 9, 9, 9, 25, 60, 61, 62, 63]]
PROMPTS = [3, 1, 4]


@pytest.fixture(scope="module")
def base() -> Any:
    return load_model(ModelSection(name="tiny", device="cpu"), seed=0).model


@pytest.fixture(scope="module")
def post(base: Any) -> Any:
    return disturbed(base, 0.05, 0)


def sae(kind: str = "batchtopk") -> SparseAutoencoder:
    made = SparseAutoencoder(128, 40, kind=kind, options={"k": 8} if kind == "topk" else {}, seed=1).requires_grad_(
        False
    )
    if made.architecture == "jumprelu":
        made.threshold.fill_(0.4)
    made.b_enc.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    return made


def test_kl_of_distributions_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).clamp_min(1e-30).log()
    q = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]) * 7  # uniform, at any scale
    expected = [math.log(3) - 1.5 * math.log(2), math.log(3)]
    assert divergence(p, q).tolist() == approx(expected, abs=1e-6)


@torch.no_grad()
def test_token_kl_is_that_of_each_document_alone(base: Any, post: Any) -> None:
    found, moved = token_kl(base, post, DOCUMENTS, PROMPTS)
    gained = torch.zeros(base.config.vocab_size, dtype=torch.float64)
    for kl, ids, prompt in zip(found, DOCUMENTS, PROMPTS, strict=True):
        p, q = (torch.softmax(m(input_ids=torch.tensor([ids])).logits[0].double(), -1) for m in (post, base))
        expected = (p * (p / q).log()).sum(-1)[:-1]
        assert kl[0] == 0.0
        assert allclose(kl[1:], expected, rtol=0, atol=OF_EMBEDDED)
        gained += (p - q)[prompt - 1 : -1].sum(0)
    assert allclose(moved, gained, atol=1e-4)
    assert float(moved.sum()) == approx(0.0, abs=1e-4)


def test_all_of_the_difference_where_only_blocks_below_differ_recovers_all(base: Any, post: Any) -> None:
    patcher = Patcher(base, post, "resid.2", DOCUMENTS, PROMPTS)
    assert patcher.tokens == sum(len(ids) - n for ids, n in zip(DOCUMENTS, PROMPTS, strict=True))
    assert patcher.recovered(lambda b, p: p - b) == approx(1.0, abs=1e-4)
    assert patcher.recovered(lambda b, p: torch.zeros_like(b)) == approx(0.0, abs=1e-6)
    assert patcher.recovered(lambda b, p: b - p) < 0.0  # the other way is further away
    # half of the difference leaves about a quarter of the KL
    assert 0.6 < patcher.recovered(lambda b, p: (p - b) / 2) < 0.9


def test_kl_is_counted_over_answers_alone(base: Any, post: Any) -> None:
    every, _ = token_kl(base, post, DOCUMENTS, PROMPTS)
    expected = sum(float(kl[n:].sum()) for kl, n in zip(every, PROMPTS, strict=True))
    patcher = Patcher(base, post, "resid.2", DOCUMENTS, PROMPTS)
    assert patcher.kl == approx(expected / patcher.tokens, rel=1e-4)


def test_above_the_limit_nothing_is_patched(base: Any, post: Any) -> None:
    patcher = Patcher(base, post, "resid.2", DOCUMENTS, PROMPTS, limit=1e-3)
    assert patcher.recovered(lambda b, p: p - b) == approx(0.0, abs=1e-6)


def test_the_mean_difference_is_over_real_tokens(base: Any, post: Any) -> None:
    rows = [activations_of(m, DOCUMENTS, ["resid.2"])["resid.2"] for m in (base, post)]
    patcher = Patcher(base, post, "resid.2", DOCUMENTS, PROMPTS)
    assert allclose(patcher.mean_difference(), (rows[1] - rows[0]).mean(0), atol=1e-5)


def test_a_patch_of_features_is_their_change_along_their_directions() -> None:
    made = sae()
    torch.manual_seed(3)
    before, after = torch.randn(2, 20, 128)
    change = made.encode(after) - made.encode(before)
    assert (change[:, [4, 7]] != 0).any()
    expected = change[:, [4, 7]] @ made.W_dec[[4, 7]]
    assert allclose(feature_patch(made, [4, 7])(before, after), expected, atol=1e-5)
    assert allclose(feature_patch(made, None)(before, after), change @ made.W_dec, atol=1e-5)


@pytest.mark.parametrize("kind", ["batchtopk", "topk", "l1"])
def test_some_features_are_those_of_the_whole(kind: str) -> None:
    made = sae(kind)
    made.b_dec.normal_(generator=torch.Generator().manual_seed(5))
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(4))
    chosen = torch.tensor([3, 0, 22])
    assert allclose(made.encode(x, chosen), made.encode(x)[:, chosen], atol=1e-5)


# Where it is.

TEXTS = [[0, 50, 51, 70, 71, 70, 72], [0, 52, 70, 73, 71], [0, 53, 54, 55, 70, 71]]
LENGTHS = [3, 2, 4]


@pytest.fixture(scope="module")
def located() -> tuple[dict[str, Any], list[torch.Tensor]]:
    loaded = load_model(ModelSection(name="tiny", device="cpu"), seed=0)
    post = copy.deepcopy(loaded.model)
    with torch.no_grad():
        post.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    every, _ = token_kl(loaded.model, post, TEXTS, LENGTHS)
    return locate_divergence(loaded.model, post, TEXTS, LENGTHS, loaded.tokenizer), every


def test_sums_and_means(located: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    found, every = located
    answers = [kl[n:] for kl, n in zip(every, LENGTHS, strict=True)]
    total = float(torch.cat(answers).sum())
    assert total > 0.01
    assert found["tokens"] == 9
    assert found["per_token"] == approx(total / 9)
    assert found["per_answer"] == approx(total / 3)
    prompts = torch.cat([kl[1:n] for kl, n in zip(every, LENGTHS, strict=True)])
    assert found["per_prompt_token"] == approx(float(prompts.mean()))
    assert [p["answers"] for p in found["places"]] == [3, 3, 2]  # places that fewer than two reach are left out
    assert found["places"][1]["kl"] == approx(sum(float(kl[1]) for kl in answers) / 3)


def test_tokens_that_carry_it(located: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    found, every = located
    total = found["per_token"] * found["tokens"]
    for key in ("tokens_at", "tokens_after"):
        assert sum(entry["share"] for entry in found[key]) == approx(1.0)
        assert sum(entry["count"] for entry in found[key]) == 9
    # token 70 stands in the answers at places 3 and 5 of the first, 2 of the second and 4 of the third document
    at = float(every[0][3] + every[0][5] + every[1][2] + every[2][4])
    entry = next(e for e in found["tokens_at"] if e["count"] == 4)
    assert entry["share"] == approx(at / total)
    assert entry["mean"] == approx(at / 4)
    # and goes before places 4 and 6 of the first, 3 of the second and 5 of the third
    after = float(every[0][4] + every[0][6] + every[1][3] + every[2][5])
    assert next(e for e in found["tokens_after"] if e["count"] == 4)["mean"] == approx(after / 4)
