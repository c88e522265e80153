"""The causal test: interventions, texts that one model writes while another is read along, and verdicts."""

from __future__ import annotations

from typing import Any, cast

import families
import pytest
import torch
from torch import Tensor

from closeness import allclose, approx
from posttrain.interpret.differences.causal import (
    Added,
    CausalTrial,
    judge_differences,
    move_features,
    plan_of,
    scale_features,
    try_factors,
    write_with,
)
from posttrain.interpret.differences.changes_recipe import CausalSection
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine


@pytest.fixture
def made() -> SparseAutoencoder:
    sae = SparseAutoencoder(16, 8, kind="l1", seed=0).requires_grad_(False)
    sae.b_dec.normal_(generator=torch.Generator().manual_seed(1))
    return sae


def states(seed: int = 2) -> torch.Tensor:
    return torch.randn(15, 16, generator=torch.Generator().manual_seed(seed))


def test_a_factor_of_one_and_a_steering_factor_of_zero_leave_the_model_itself(made: SparseAutoencoder) -> None:
    x, patch_source = states(), states(3)
    zero = torch.zeros_like(x)
    assert torch.equal(scale_features(made, [0, 5], 1.0)(x, patch_source), zero)
    assert torch.equal(move_features(made, [0, 5], 0.0)(x, patch_source), zero)


def test_factors_scale_a_feature_along_its_direction(made: SparseAutoencoder) -> None:
    x = states()
    features = made.encode(x)
    expected = 1.5 * (features[:, 2:3] * made.W_dec[2] + features[:, 6:7] * made.W_dec[6])
    assert allclose(scale_features(made, [2, 6], 2.5)(x, x), expected, atol=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_moving_a_feature_brings_it_to_where_the_patch_source_has_it(made: SparseAutoencoder) -> None:
    x, patch_source = states(), states(3)
    change = made.encode(patch_source) - made.encode(x)
    for factor in (1.0, 0.5):
        expected = factor * (change[:, [1, 4]] @ made.W_dec[[1, 4]])
        assert allclose(move_features(made, [1, 4], factor)(x, patch_source), expected, atol=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_large_activations_stay_as_they_are(made: SparseAutoencoder) -> None:
    x, patch_source = states(), states(3)
    x[4] *= 1000
    patch_source[6] *= 1000
    scaled = scale_features(made, range(8), 0.0, limit=100.0)(x, patch_source)
    moved = move_features(made, range(8), 1.0, limit=100.0)(x, patch_source)
    assert not scaled[4].any()
    assert scaled[6].any()  # the donor plays no part here
    assert not moved[4].any()
    assert not moved[6].any()
    assert moved[5].any()


class FakeTrial:
    """Its outcome: the mean of coordinate 0 of fixed activations after each treatment."""

    def outcomes(self, interventions: list[Added]) -> list[float]:
        x = torch.ones(4, 16)
        return [float((x + treat(x, x))[:, 0].mean()) for treat in interventions]


def test_try_factors_changed_and_random_features_side_by_side() -> None:
    """Feature j of this dictionary is coordinate j itself."""
    plain = SparseAutoencoder(16, 16, kind="l1").requires_grad_(False)
    plain.W_enc.copy_(torch.eye(16))
    plain.W_dec.copy_(torch.eye(16))

    def treat(features: Any, factor: float) -> Added:
        return scale_features(plain, features, factor)

    trial = cast(CausalTrial, FakeTrial())
    found = try_factors(trial, treat, [0, 1], [[2, 3], [4, 5]], [(1, 0.0), (2, 3.0), (9, 0.5)])
    assert [(d["features"], d["dose"]) for d in found] == [(1, 0.0), (2, 3.0), (2, 0.5)]
    assert [d["changed"] for d in found] == [0.0, 3.0, 0.5]
    assert [d["random"] for d in found] == [[1.0, 1.0]] * 3
    assert [d["difference"] for d in found] == [-1.0, 2.0, -0.5]


@pytest.mark.parametrize(
    ("differences", "half_width", "separates"),
    [
        ([0.1, 0.2, 0.3], 4.3027 * 0.1 / 3**0.5, False),
        ([-0.19, -0.2, -0.21], 4.3027 * 0.01 / 3**0.5, True),
        ([0.0, 0.0, 0.0], 0.0, False),
        ([0.4], None, None),
    ],
)
def test_the_verdict_is_students(differences: list[float], half_width: Any, separates: bool | None) -> None:
    verdict = judge_differences(differences)
    assert verdict["half_width"] == (None if half_width is None else approx(half_width, abs=1e-4))
    assert verdict["separates"] is separates


@pytest.mark.parametrize(
    ("test", "points"),
    [
        ("given", [(2, 0.5), (2, 1.0), (8, 1.0)]),
        ("returned", [(2, 1.0), (8, 1.0)]),
        ("scaled", [(2, 0.0), (2, 2.0), (8, 0.0)]),
    ],
)
def test_every_point_of_a_test_is_planned_once(test: str, points: list[tuple[int, float]]) -> None:
    settings = CausalSection(counts=[8, 2], features=2, steering_factors=[0.5, 1.0], factors=[0.0, 2.0])
    assert plan_of(test, settings) == points


# Two models over one text.

PROMPTS = [[0, 5, 9, 30, 41], [0, 77, 3], [0, 12, 200, 201, 55, 60, 61, 62, 63], [0, 300]]
STOPS = frozenset({0, 13, 14})
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def writer() -> Any:
    return load_model(ModelSection(name="tiny", device="cpu"), seed=0).model


@pytest.fixture(scope="module")
def patch_source(writer: Any) -> Any:
    return families.disturbed(writer, 0.08, 1)


def greedy(model: Any) -> list[list[int]]:
    keys = [[0] for _ in PROMPTS]
    found = NativeEngine(model).generate(PROMPTS, keys, Sampling(MAX_TOKENS, 0.0, stop_ids=STOPS))
    return [list(group[0].ids) for group in found]


def write(writer: Any, patch_source: Any, interventions: list[Added], site: str = "resid.2") -> list[list[list[int]]]:
    return write_with(writer, patch_source, site, PROMPTS, interventions, max_tokens=MAX_TOKENS, stop_ids=STOPS)


def nothing(x: Tensor, _: Tensor) -> Tensor:
    return torch.zeros_like(x)


def everything(x: Tensor, other: Tensor) -> Tensor:
    return other - x


def test_ids_beyond_the_tokenizer_are_not_written(writer: Any) -> None:
    def write_within(num_tokens: int | None) -> list[list[int]]:
        return write_with(
            writer, None, "resid.2", PROMPTS, [nothing], max_tokens=8, stop_ids=frozenset(), num_tokens=num_tokens
        )[0]

    largest = max(id for ids in write_within(None) for id in ids)
    engine = NativeEngine(writer)
    engine.num_tokens = largest
    found = engine.generate(PROMPTS, [[0] for _ in PROMPTS], Sampling(8, 0.0))
    assert write_within(largest) == [list(group[0].ids) for group in found]
    assert largest not in {id for ids in write_within(largest) for id in ids}


def test_interventions_side_by_side_are_each_what_they_are_alone(writer: Any, patch_source: Any) -> None:
    own, other = greedy(writer), greedy(patch_source)
    assert own != other
    assert len({len(ids) for ids in own}) > 1  # rows end at different times
    assert write(writer, patch_source, [nothing, everything, nothing]) == [own, other, own]
    assert write(patch_source, writer, [everything]) == [own]


def test_a_patch_source_that_is_the_writer_changes_nothing_anywhere(writer: Any) -> None:
    def far(x: Tensor, other: Tensor) -> Tensor:
        return 100.0 * (other - x)

    assert write(writer, writer, [far], "resid.1") == [greedy(writer)]


def test_interventions_see_the_same_tokens_of_both_models(writer: Any, patch_source: Any) -> None:
    """Along one answer, the rows that a treatment is given are those of a forward pass over the whole text."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(x: Tensor, other: Tensor) -> Tensor:
        seen.append((x.clone(), other.clone()))
        return torch.zeros_like(x)

    prompt = PROMPTS[0]
    ids = write_with(writer, patch_source, "resid.2", [prompt], [look], max_tokens=6, stop_ids=frozenset())[0][0]
    assert len(ids) == 6
    read = [*prompt, *ids[:-1]]
    for index, model in enumerate((writer, patch_source)):
        rows = torch.cat([pair[index] for pair in seen])
        assert allclose(rows, families.activations_of(model, [read], ["resid.2"])["resid.2"].float(), atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_are_counted_from_the_first_token_of_each_prompt(family: str) -> None:
    """Shorter prompts are padded in front; learned positions (GPT-2) would tell."""
    model = families.build(family)
    prompts = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13]]
    batch = write_with(model, model, "resid.3", prompts, [nothing], max_tokens=8, stop_ids=frozenset())[0]
    for prompt, written in zip(prompts, batch, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert written == ids[len(prompt) :]
