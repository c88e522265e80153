"""Quantized weights on CUDA: the same weights as on the CPU, sampled and trained on there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from wide_models import needs_device, on_cuda

from closeness import assert_close
from posttrain.models.load import load_model
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.sampling.native.engine import NativeEngine

pytest.importorskip("bitsandbytes", reason="the extra 'quantize' is not installed")

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    on_cuda,  # its kernels
]

IDS = torch.randint(0, 300, (3, 17), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_weights_are_those_of_the_cpu(
    tiny_random: Any, small_tokenizer: Any, tmp_path: Path, architecture: str, bits: int
) -> None:
    tiny_random(architecture).save_pretrained(tmp_path / "model")
    small_tokenizer.save_pretrained(tmp_path / "model")
    here, there = (
        load_model(ModelSection(name=str(tmp_path / "model"), load_bits=bits, device=device), seed=0).model
        for device in ("cpu", "cuda")
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            expected, found = (m(input_ids=IDS.to(m.device)).logits.log_softmax(-1).cpu() for m in (here, there))
        for one, other in zip(here.modules(), there.modules(), strict=True):
            if hasattr(one, "dequantized"):  # a number between two levels may go to either
                weight = one.dequantized(torch.float32)
                moved = (weight - other.dequantized(torch.float32).cpu()).abs() > 0.02 * weight.abs().max()
                assert float(moved.float().mean()) < 1e-2
        assert_close(found, expected, atol=1e-2 if bits == 8 else 2e-2, rtol=0)
        assert NativeEngine(there).path == "modules"
        trained = apply_adapter(there, AdapterSection(rank=2), seed=0)
        trained(input_ids=IDS.cuda()).logits.square().mean().backward()
        gradients = [p.grad for n, p in trained.named_parameters() if ".lora_B." in n]
        assert all(g is not None and float(g.abs().max()) > 0 for g in gradients)
    finally:
        torch.set_float32_matmul_precision(before)
