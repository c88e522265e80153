"""Names of sites, and layers that are not there."""

from __future__ import annotations

import pytest
import torch
from families import DOCUMENTS, NUM_LAYERS, activations_of, build

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import backbone_of, blocks_of, layer_of


def test_layer_of_names_of_the_residual_stream_are_read() -> None:
    assert [layer_of(name) for name in ("resid.0", "resid.20")] == [0, 20]


@pytest.mark.parametrize("name", ["resid", "resid.", "resid.-1", "resid.x", "resid.01", "mlp.2", ".3", "resid.1.2"])
def test_layer_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"is no site: give the residual stream after a layer, such as resid\.20"):
        layer_of(name)


def test_extractor_a_layer_above_the_last_is_refused_with_how_many_there_are() -> None:
    with pytest.raises(UsageError, match=r"resid\.7: this model has 6 layers"):
        activations_of(build("llama"), DOCUMENTS, ["resid.7"])


def test_blocks_of_a_model_with_two_lists_of_blocks_is_refused() -> None:
    model = build("llama")
    model.model.others = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(NUM_LAYERS))
    with pytest.raises(UsageError, match="no single list of 6 blocks"):
        blocks_of(backbone_of(model))
