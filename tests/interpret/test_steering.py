"""Steering and ablation: what exactly they add and take, and that sampling sees it on every path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import activations_of
from torch import Tensor

from closeness import assert_close, rounding
from posttrain.errors import UsageError
from posttrain.interpret.features.steering import Steering, load_steering
from posttrain.interpret.saes.sae import SparseAutoencoder, save_sae
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from refusing import refuses

D = 64
DOCUMENTS = [[5, 9, 30, 2, 77], [4, 4, 100], [8]]
SITES = ["resid.1", "resid.2"]
GREEDY = Sampling(12, 0.0)


def random_sae(seed: int = 0, features: int = 100, kind: str = "l1") -> SparseAutoencoder:
    """Encoder and decoder that have nothing to do with each other, rows of any norm."""
    made = SparseAutoencoder(D, features, kind=kind, options={"k": 5} if kind == "topk" else {}, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (made.W_enc, made.W_dec, made.b_enc, made.b_dec):
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.3)
    return made


def orthogonal_sae() -> SparseAutoencoder:
    """Decoder rows at right angles, the encoder their transpose."""
    made = SparseAutoencoder(D, D, kind="l1")
    rotation = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(1))).Q
    with torch.no_grad():
        made.W_dec.copy_(rotation)
        made.W_enc.copy_(rotation.T)
        made.b_dec.copy_(torch.randn(D, generator=torch.Generator().manual_seed(2)))
    return made


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_directions_are_added_at_the_site(architecture: str, site: str, tiny_random: Callable[..., Any]) -> None:
    model, sae = tiny_random(architecture), random_sae()
    before = activations_of(model, DOCUMENTS, [site])[site]
    rows = sae.W_dec.detach()
    expected = before + 3 * rows[7] / rows[7].norm() - 0.5 * rows[40] / rows[40].norm()
    steering = Steering(model, sae, site, {7: 3.0, 40: -0.5, 9: 0.0})
    with steering.applied():
        assert_close(activations_of(model, DOCUMENTS, [site])[site], expected)
    assert torch.equal(activations_of(model, DOCUMENTS, [site])[site], before)


@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_a_feature_is_taken_out_and_the_others_are_untouched(kind: str, tiny_random: Callable[..., Any]) -> None:
    model, sae = tiny_random("qwen3"), random_sae(kind=kind)
    before = activations_of(model, DOCUMENTS, ["resid.1"])["resid.1"]
    features = sae.encode(before).detach()
    gone = features.sum(0).argsort(descending=True)[:2].tolist()
    assert (features[:, gone] > 0).any(0).all()
    with Steering(model, sae, "resid.1", dict.fromkeys(gone)).applied():
        after = activations_of(model, DOCUMENTS, ["resid.1"])["resid.1"]
    rest = features.clone()
    rest[:, gone] = 0
    bound = rounding(torch.float32, size=float(before.abs().max()), terms=features.shape[1])
    assert_close(after - before, (sae.decode(rest) - sae.decode(features)).detach(), atol=bound, rtol=0)
    idle = (features[:, gone] == 0).all(1)
    assert torch.equal(after[idle], before[idle])  # where the features are silent nothing moves, not by rounding either


def test_what_is_taken_out_is_read_before_anything_is_added(tiny_random: Callable[..., Any]) -> None:
    sae, x = random_sae(), torch.randn(2, 3, D)
    features, rows = sae.encode(x.reshape(-1, D)).detach(), sae.W_dec.detach()
    steering = Steering(tiny_random("qwen3"), sae, "resid.1", {7: 30.0, 5: None})
    expected = x.reshape(-1, D) + 30 * rows[7] / rows[7].norm() - features[:, 5:6] * rows[5]
    assert_close(steering.change(x), expected.reshape(x.shape))


def test_strength_nothing_is_the_model_itself(tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")
    engine, ids = NativeEngine(model), torch.tensor([DOCUMENTS[0]])
    logits = model(input_ids=ids).logits
    plain = engine.generate(DOCUMENTS, [[1], [2], [3]], Sampling(10))
    steering = Steering(model, random_sae(), "resid.1", {3: 0.0, 5: -0.0})
    assert steering.is_nothing
    with steering.applied():
        assert engine.path == "lean"
        assert torch.equal(model(input_ids=ids).logits, logits)
        assert engine.generate(DOCUMENTS, [[1], [2], [3]], Sampling(10)) == plain


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, each token from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@torch.no_grad()
def test_sampling_is_steered(architecture: str, tiny_random: Callable[..., Any]) -> None:
    model = tiny_random(architecture)
    engine = NativeEngine(model)
    keys = [[1], [2], [3]]
    path, plain = engine.path, engine.generate(DOCUMENTS, keys, GREEDY)
    assert path == ("lean" if architecture == "qwen3" else "modules")
    steering = Steering(model, random_sae(), "resid.1", {3: 20.0, 5: None})
    with steering.applied():
        assert engine.path == "modules"  # the lean path would not see the change
        steered = engine.generate(DOCUMENTS, keys, GREEDY)
        for prompt, group in zip(DOCUMENTS, steered, strict=True):
            assert list(group[0].ids) == greedy(model, prompt, 12)
    assert all(a[0].ids != b[0].ids for a, b in zip(plain, steered, strict=True))
    assert engine.path == path
    assert engine.generate(DOCUMENTS, keys, GREEDY) == plain


def test_half_precision_stays(tiny_random: Callable[..., Any]) -> None:
    model, sae = tiny_random("qwen3").bfloat16(), random_sae()
    before = activations_of(model, DOCUMENTS, ["resid.2"])["resid.2"]
    with Steering(model, sae, "resid.2", {7: 3.0}).applied():
        after = activations_of(model, DOCUMENTS, ["resid.2"])["resid.2"]
    row = sae.W_dec[7].detach()
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, (before.float() + 3 * row / row.norm()).bfloat16())


def test_from_a_folder(tiny_random: Callable[..., Any], tmp_path: Path) -> None:
    """Features of a saved dictionary are in the units of the activations, whatever scale it was trained at."""
    model, sae = tiny_random("qwen3"), orthogonal_sae()
    sae.input_scale.fill_(4.0)
    before = activations_of(model, DOCUMENTS, ["resid.1"])["resid.1"]
    save_sae(sae, tmp_path / "d", {"site": "resid.1", "source": "model"})
    steering = load_steering(model, tmp_path / "d", {7: 3.0, 2: None})
    same = Steering(model, sae, "resid.1", {7: 3.0, 2: None})
    changed: list[Tensor] = []
    for made in (steering, same):
        with made.applied():
            changed.append(activations_of(model, DOCUMENTS, ["resid.1"])["resid.1"])
    assert_close(changed[0], changed[1])
    rows = sae.W_dec.detach()
    features = sae.encode(before).detach()[:, 2:3]
    assert_close(changed[0], before + 3 * rows[7] - features * rows[2] / 4)


def test_what_cannot_be_steered(tiny_random: Callable[..., Any], tmp_path: Path) -> None:
    model, sae = tiny_random("qwen3"), random_sae()
    for made, site, change, message in (
        (sae, "resid.3", {1: 1.0}, "model has 2"),
        (sae, "resid.1", {100: 1.0}, "100: this dictionary"),
        (sae, "resid.1", {-1: None}, "feature -1"),
        (SparseAutoencoder(32, 10, kind="l1"), "resid.1", {1: 1.0}, "32, but this model"),
    ):
        with refuses(UsageError, message):
            Steering(model, made, site, change)
    save_sae(sae, tmp_path / "a", {"site": "resid.1", "source": "difference"})
    with refuses(UsageError, "two models' activations"):
        load_steering(model, tmp_path / "a", {1: None})
    assert not load_steering(model, tmp_path / "a", {1: 1.0}).is_nothing
    save_sae(sae, tmp_path / "b")
    with refuses(UsageError, "'site'", "'metadata'"):
        load_steering(model, tmp_path / "b", {1: 1.0})
