"""``model.attention`` is transformers' implementation of that name, held to SDPA by a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from closeness import OF_EMBEDDED, allclose
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, steps_of


def test_a_run_with_eager_attention_has_the_numbers_of_sdpa(tmp_path: Any) -> None:
    """Sampled tokens are equal, losses and norms of gradients but for rounding."""
    for name in ("sdpa", "eager"):
        run(tmp_path / name, one_layer_recipe("grpo", model={"attention": name}, train={"steps": 2}))
    rows = [[r.completion for r in recorded(tmp_path / name)[0]] for name in ("sdpa", "eager")]
    assert rows[0] == rows[1]
    losses = [[(row["loss"], row["grad_norm"]) for row in steps_of(tmp_path / name)] for name in ("sdpa", "eager")]
    assert allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=OF_EMBEDDED)


def test_an_implementation_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sees what comes later, too."""
    model = load_model(ModelSection(attention="eager"), seed=0).model

    def sees_all(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sees_all", sees_all)
    model.config._attn_implementation = "sees_all"
    with refuses(UsageError, "model.attention", "'sees_all'"):
        Forward(model)


def test_what_is_not_installed_is_refused_by_name() -> None:
    with refuses(UsageError, "model.attention", "'flash_attention_3'"):
        load_model(ModelSection(attention="flash_attention_3"), seed=0)
