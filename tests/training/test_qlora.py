"""QLoRA: an adapter learns on top of weights in few bits, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import approx
from posttrain.errors import RecipeError
from posttrain.models.load import load_model, quantized_bits
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from posttrain.training import loop
from refusing import refuses
from small_runs import make_recipe, one_layer_recipe, recorded, run, same_bits, saved_tensors, steps_of, untimed

pytest.importorskip("bitsandbytes", reason="the extra 'quantize' is not installed")

IDS = torch.arange(3, 40)[None]


def qlora(bits: int, **adapter: Any) -> dict[str, Any]:
    return {"load_bits": bits, "adapter": {"rank": 4} | adapter}


def base_tensors(model: Any) -> dict[str, Tensor]:
    """Everything but the adapter, copied: weights in bits, their scales, what is not quantized."""
    return {n: t.detach().clone() for n, t in model.state_dict().items() if ".lora_" not in n}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Components of every run in the test, in order."""
    made: list[Any] = []
    prepare = loop.prepare

    def remember(*given: Any) -> Any:
        made.append(prepare(*given))
        return made[-1]

    monkeypatch.setattr(loop, "prepare", remember)
    return made


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_it_learns_and_the_base_stays(tmp_path: Path, parts: list[Any], bits: int) -> None:
    task = {"name": "stories", "size": 4, "max_steps": 1}
    recipe = make_recipe("sft", model=qlora(bits, rank=8), task=task, train={"steps": 12, "lr": 2e-2})
    before = base_tensors(load_model(ModelSection(load_bits=bits, device="cpu"), seed=0).model)
    run(tmp_path, recipe)
    losses = [row["loss"] for row in steps_of(tmp_path)]
    assert losses[-1] < 0.5 * losses[0]
    (made,) = parts
    trained = {n: p for n, p in made.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    after = base_tensors(made.model)
    shorter = {n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in after.items()}
    assert same_bits(shorter, before)
    # the folder of the adapter names its base, and gives the model that was trained
    folder = tmp_path / "checkpoints" / "step-000012"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(TINY)
    again = load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model
    assert quantized_bits(again) == bits
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, made.model.eval()(input_ids=IDS).logits)


def test_stopped_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    """With rollouts by the quantized model, the reference with the adapter off, and dropout in the adapter."""
    recipe = one_layer_recipe(
        "grpo", model=qlora(4, dropout=0.2), objective="grpo", regularize={"kl_coef": 0.1}, train={"steps": 2}
    )
    run(tmp_path / "whole", recipe)
    assert run(tmp_path / "cut", recipe, stop_after=1).reason == "interrupted"
    run(tmp_path / "cut", recipe, resume=True)
    assert same_bits(saved_tensors(tmp_path / "whole", 2), saved_tensors(tmp_path / "cut", 2))
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")
    rows = steps_of(tmp_path / "whole")
    assert all(row["grad_norm"] > 0 for row in rows)
    # what sampled is what is trained: on the first update, the policy is still the sampler
    assert rows[0]["ratio"] == approx(1.0, abs=1e-5)
    assert rows[0]["kl_sampler"] >= 0
    assert rows[0]["kl_sampler"] == approx(0.0, abs=1e-9)


def test_an_adapter_is_needed(tmp_path: Path) -> None:
    recipe = make_recipe("sft", model={"load_bits": 4})
    with refuses(RecipeError, "model.adapter.rank"):
        run(tmp_path, recipe)
    with refuses(RecipeError, "'load_bits'"):
        make_recipe("sft", model={"load_bits": 4, "init": {"architecture": "gpt2"}})


def test_training_goes_on_from_a_quantized_folder_and_from_an_adapter(tmp_path: Path, parts: list[Any]) -> None:
    folder = tmp_path / "int8"
    loaded = load_model(ModelSection(load_bits=8, device="cpu"), seed=0)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    first = make_recipe("sft", model={"name": str(folder), "adapter": {"rank": 4}}, train={"steps": 1})
    run(tmp_path / "first", first)
    adapter = tmp_path / "first" / "checkpoints" / "step-000001"
    run(tmp_path / "second", make_recipe("sft", model={"name": str(adapter)}, train={"steps": 1}))
    assert [quantized_bits(made.model) for made in parts] == [8, 8]
    given_arguments = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert given_arguments == str(folder)
