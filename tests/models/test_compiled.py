"""Compiled layers compute what the plain ones do, and ragged batches do not compile them anew.

Mostly with torch's tracing alone (``aot_eager``), which takes seconds; with code that is compiled in a slow test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import gradients, ragged_batch, random_model, relative_difference
from test_buckets import very_ragged_batch
from torch._dynamo.utils import counters

from posttrain.engines.native.engine import NativeEngine
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward import compiled
from posttrain.models.forward.forward import Forward
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection
from posttrain.train.checks import words_of
from posttrain.types import Batch
from small_runs import make_recipe, run, steps_of


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def outcome(forward: Forward, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    forward.model.zero_grad()
    outputs = forward(batch)
    with forward.backward_context():
        (outputs.logprobs * torch.linspace(0.5, 1.5, batch.mask.shape[1])).sum().backward()
    return outputs.logprobs.detach(), gradients(forward.model)


def compare(model: Any, batches: list[Batch]) -> int:
    """Log-probabilities and gradients of both ways on every batch; how many graphs were compiled for it."""
    plain, ours = Forward(model), Forward(model, compiled=True)
    counters.clear()
    for batch in batches:
        expected, found = outcome(plain, batch), outcome(ours, batch)
        assert float((found[0] - expected[0]).abs().max()) < 1e-5
        assert relative_difference(found[1], expected[1]) < 1e-5
    return int(counters["stats"]["unique_graphs"])


BATCHES = [ragged_batch(groups=n, seed=n) for n in (3, 1, 5, 8, 12)]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_numbers_are_those_of_the_plain_path_and_no_batch_compiles_anew(family: str) -> None:
    graphs = compare(random_model(family), BATCHES)
    assert 2 <= graphs <= 6, "for both layers together, whatever the batches' sizes are"


def test_an_adapter_is_compiled_with_its_layer() -> None:
    model = apply_adapter(random_model("qwen3"), AdapterSection(rank=3), 0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert compare(model, BATCHES[:2]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_numbers_of_compiled_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    assert compare(random_model(family), [*BATCHES, very_ragged_batch()]) <= 8


def test_outside_of_the_trainer_nothing_is_compiled(small_tokenizer: Any) -> None:
    """The sampler takes its own path over modules that are as they were."""
    model = random_model("qwen3")
    forward = Forward(model, compiled=True)
    forward(ragged_batch())
    assert not any("forward" in vars(module) for module in model.modules())
    with forward.layers:
        assert sum("forward" in vars(module) for module in model.modules()) == 2
    assert NativeEngine(model).path == "lean"


def test_a_run_with_compiled_layers(tmp_path: Path) -> None:
    losses = []
    for name, options in {"plain": {}, "compiled": {"compile": True}}.items():
        recipe = make_recipe("sft", train={"steps": 3, **options})
        run(tmp_path / name, recipe)
        losses.append([row["loss"] for row in steps_of(tmp_path / name)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert counters["stats"]["unique_graphs"] >= 2


def test_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"train\.compile: this model's batches are padded"):
        Forward(random_model("granite"), compiled=True)
    with pytest.raises(RecipeError, match=r"train\.compile: layers with weights in few bits"):
        make_recipe("sft", model={"load_bits": 8, "adapter": {"rank": 4}}, train={"compile": True})
    with pytest.raises(RecipeError, match=r"train\.compile: torch computes layers again .* uncompiled"):
        make_recipe("sft", train={"compile": True, "gradient_checkpointing": True})
    with pytest.raises(RecipeError, match=r"train\.compile: layers whose weights are gathered"):
        words_of(make_recipe("sft", train={"compile": True}, scale={"sharding": "fsdp2"}))
    from torch._inductor import config

    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    with (
        config.patch({"cpp.cxx": (None, "/nowhere/g++")}),
        pytest.raises(UsageError, match=r"train\.compile: torch cannot compile for cpu here.*leave train\.compile out"),
    ):
        Forward(random_model("qwen3"), compiled=True)
