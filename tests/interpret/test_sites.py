"""What sites are called, and that `mlp` and `attn` are what the blocks add."""

from __future__ import annotations

import pytest
import torch
from families import DOCUMENTS, FAMILIES, NUM_LAYERS, activations_of, build

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import Site, backbone_of, blocks_of, read_site


def test_names_of_sites() -> None:
    assert read_site("resid.20") == Site(20, "resid")
    assert str(Site(3, "mlp")) == "mlp.3"
    assert read_site("resid.0").layer == 0
    assert sorted([Site(12, "attn"), Site(3, "resid")])[0].layer == 3


@pytest.mark.parametrize(
    "name", ["resid", "resid.", "resid.-1", "resid.x", "mlp.0", "attn.0", "out.3", ".3", "resid.1.2"]
)
def test_what_is_no_site_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"is no site: they are called resid\.20"):
        read_site(name)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "granite"])
def test_the_two_halves_of_a_block_add_up_to_what_it_adds(family: str) -> None:
    model = build(family)
    for layer in (1, 4):
        names = [f"resid.{layer - 1}", f"attn.{layer}", f"mlp.{layer}", f"resid.{layer}"]
        before, attention, mlp, after = (activations_of(model, DOCUMENTS, [name])[name] for name in names)
        torch.testing.assert_close(before + attention + mlp, after, rtol=1e-5, atol=2e-5)
        assert min(attention.norm(), mlp.norm()) > 0.02 * (after - before).norm()


def test_halves_that_are_scaled_before_they_are_added_are_refused() -> None:
    model = build("granite")
    with pytest.raises(UsageError, match="GraniteDecoderLayer: no two modules of it add up to what it adds"):
        activations_of(model, DOCUMENTS, ["mlp.2"])
    assert activations_of(model, DOCUMENTS, ["resid.2"])["resid.2"].shape == (35, 32)


def test_a_layer_that_is_not_there_is_refused_with_how_many_there_are() -> None:
    with pytest.raises(UsageError, match=r"resid\.7: this model has 6 layers"):
        activations_of(build("llama"), DOCUMENTS, ["resid.7"])


def test_a_model_whose_blocks_cannot_be_told_is_refused() -> None:
    model = build("llama")
    model.model.others = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(NUM_LAYERS))
    with pytest.raises(UsageError, match="no single list of 6 blocks"):
        blocks_of(backbone_of(model))
