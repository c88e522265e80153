"""Rotary angles in full precision, whatever other products may take."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.models.forward.precision import full_precision, keep_angles_exact
from posttrain.sampling.native.engine import _has_hooks


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_keep_angles_exact_computes_in_full_precision_and_restores_what_was_set() -> None:
    model = llama()
    seen: list[str] = []
    rotary = type(model.model.rotary_emb)
    plain = rotary.forward

    def recording(self: object, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_float32_matmul_precision())
        cos, sin = plain(self, x, position_ids)
        return cos, sin

    tokens = torch.arange(8)[None]
    wanted = model(tokens).logits
    rotary.forward = recording
    try:
        torch.set_float32_matmul_precision("high")
        model(tokens)
        keep_angles_exact(model)
        keep_angles_exact(model)  # again changes nothing
        assert torch.equal(model(tokens).logits, wanted)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        rotary.forward = plain
        torch.set_float32_matmul_precision("highest")
    assert seen == ["high", "highest"]
    assert type(model.model.rotary_emb).__name__ == rotary.__name__
    assert type(model.model.rotary_emb).__mro__[1] is rotary
    assert not _has_hooks(model)


def test_full_precision_restores_what_was_set_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
    except KeyError:
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
