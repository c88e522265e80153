"""The kernel that a recipe names computes attention, in the trainer and in the sampler, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from posttrain.errors import UsageError
from posttrain.models import attention
from posttrain.models.attention import chosen_attention
from posttrain.models.forward import varlen
from posttrain.recipes.sections import Attention, ModelSection
from small_runs import make_recipe, recorded, run, saved_tensors, steps_of

KERNELS = {
    "eager": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def kernels_called(work: Any) -> set[str]:
    with torch.profiler.profile() as profile:
        work()
    keys = {event.key for event in profile.key_averages() if event.key.startswith("aten::_scaled_dot_product")}
    return {key.removesuffix("_backward") for key in keys}


def attend() -> torch.Tensor:
    q = torch.linspace(-1, 1, 2 * 4 * 7 * 16).view(2, 4, 7, 16)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_inside_and_what_was_before_outside(name: Attention) -> None:
    before = kernels_called(attend)
    with chosen_attention(ModelSection(device="cpu", attention=name)):
        assert kernels_called(attend) == {KERNELS[name]}
        inside = attend()
    assert kernels_called(attend) == before
    assert torch.allclose(inside, attend(), atol=1e-6)
    with chosen_attention(ModelSection(device="cpu")):
        assert kernels_called(attend) == before


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_run_has_the_same_numbers_with_either(kind: str, tmp_path: Path) -> None:
    """Sampling, scoring and updates: tokens equal, gradients and weights equal but for rounding."""
    for name, kernel in KERNELS.items():
        recipe = make_recipe(kind, model={"attention": name, "device": "cpu"}, train={"steps": 2})
        assert kernels_called(lambda recipe=recipe, name=name: run(tmp_path / name, recipe)) == {kernel}
    rows = [[r.completion for r in recorded(tmp_path / name)[0]] for name in KERNELS]
    assert rows[0] == rows[1]
    losses = [[(row["loss"], row["grad_norm"]) for row in steps_of(tmp_path / name)] for name in KERNELS]
    assert len(losses[0]) == 2
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-6)
    eager, flash = (saved_tensors(tmp_path / name, 2) for name in KERNELS)
    weights = [name for name in eager if name.startswith("model.safetensors")]
    assert weights
    # Adam's first steps are of the size of the learning rate (1e-3), however small a gradient is
    assert all(torch.allclose(eager[name], flash[name], atol=2.1e-3) for name in weights)


def test_what_is_not_there_is_refused_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    recipe = make_recipe("sft", model={"attention": "efficient", "device": "cpu"})
    with pytest.raises(UsageError, match=r"model.attention: 'efficient' cannot compute float32 attention"):
        run(tmp_path, recipe)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_mask_may_need_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs flash takes no mask: where nothing beside it does, it is refused and not found out in the middle."""
    asked = []

    def serves(kernels: list[SDPBackend], *_: Any) -> bool:
        asked.append(kernels)
        return kernels == [SDPBackend.FLASH_ATTENTION]

    monkeypatch.setattr(attention, "_serves", serves)
    with (
        pytest.raises(UsageError, match=r"model.attention: 'flash' cannot compute"),
        chosen_attention(ModelSection(device="cpu", attention="flash")),
    ):
        pass
    assert asked == [[SDPBackend.FLASH_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]]


def test_the_size_of_the_models_own_heads_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(attention, "_serves", lambda *given: bool(sizes.append(given[3])) or True)
    with chosen_attention(ModelSection(device="cpu", attention="flash")):
        pass
    assert set(sizes) == {attention.stated_config(ModelSection()).head_dim}


def test_flash_on_a_gpu_is_tried_for_the_packed_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the type of the trainer's products; sampling is tried in the type of the weights."""
    tried: list[Any] = []
    monkeypatch.setattr(attention, "choose_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(attention, "usable", lambda *given: tried.append(given) or kernel)
    monkeypatch.setattr(attention, "_serves", lambda *given: bool(tried.append(given[2])) or True)
    section = ModelSection(device="cuda", attention="flash")
    kernel: Any = varlen.varlen
    with chosen_attention(section, torch.bfloat16):
        pass
    assert tried[0][:2] == (torch.device("meta"), torch.bfloat16)
    assert tried[1:] == [torch.bfloat16, torch.float32]
    kernel = None
    with (
        pytest.raises(UsageError, match=r"'flash' cannot compute bfloat16"),
        chosen_attention(section, torch.bfloat16),
    ):
        pass
