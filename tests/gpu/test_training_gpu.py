"""The trainer on CUDA: packed forward and gradients against the modules, and a run that resumes there.

Two steps of every shipped recipe are in ``test_recipes_cuda.py``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from closeness import approx, assert_close
from posttrain import registry
from posttrain.models.forward.forward import Forward
from posttrain.models.lora import apply_adapter
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import AdapterSection, TrainSection
from posttrain.store.metrics import MetricsLog
from posttrain.training.files import RunFiles
from posttrain.training.loop import run_training
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Sample, collate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("full_fp32"),
]

SHAPE = {
    "vocab_size": 301, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "llama": lambda: LlamaConfig(**SHAPE),
}


def random_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():  # the default init gives nearly uniform outputs, which would hide errors
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    return model.to("cuda", dtype)


def ragged_batch(groups: int = 4, size: int = 4) -> Batch:
    """Groups that share prompts of different lengths, answers of 1 to 40 tokens, advantages, and a row alone."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for group in range(groups):
        prompt = torch.randint(0, 301, (5 + 11 * group,), generator=generator).tolist()
        for _ in range(size):
            n = int(torch.randint(1, 41, (1,), generator=generator))
            answer = torch.randint(0, 301, (n,), generator=generator).tolist()
            blank = [0.0] * len(prompt)
            fields = {name: blank + torch.randn(n, generator=generator).tolist() for name in ("advantages",)}
            samples.append(Sample(prompt + answer, [False] * len(prompt) + [True] * n, group, len(prompt), fields))
    alone = torch.randint(0, 301, (9,), generator=generator).tolist()
    samples.append(Sample(alone, [False] + [True] * 8, group=99, fields={"advantages": [0.5] * 9}))
    return collate(samples)


@torch.no_grad()
def each_row_alone(model: Any, batch: Batch) -> torch.Tensor:
    """Log-probabilities from the modules' own forward, one row at a time, softmax in float64."""
    found = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for b in range(batch.num_rows):
        ids = batch.tokens[b : b + 1, : int(batch.lengths[b])].cuda()
        table = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        found[b, 1 : ids.shape[1]] = table[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
    return torch.where(batch.mask, found, torch.zeros_like(found))


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_forward_equals_each_row_alone_in_fp32(family: str, adapter: bool) -> None:
    model = random_model(family)
    if adapter:
        model = apply_adapter(model, AdapterSection(rank=4), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.1)
    batch = ragged_batch()
    expected = each_row_alone(model, batch)
    forward = Forward(model)
    assert forward.path == "packed"
    outputs = forward(batch)
    assert outputs.logprobs.dtype == torch.float32
    assert_close(outputs.logprobs.detach().cpu(), expected, atol=2e-5, rtol=0)
    assert float(expected.min()) < -5


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_forward_in_bf16_is_as_close_to_fp32_as_the_modules_are(family: str) -> None:
    """Both round; packing must not round worse. Log-probabilities are fp32 all the same."""
    coarse = random_model(family, torch.bfloat16)
    exact = copy.deepcopy(coarse).float()
    batch = ragged_batch()
    truth = each_row_alone(exact, batch)
    modules = (each_row_alone(coarse, batch) - truth).abs()[batch.mask]
    forward = Forward(coarse)
    assert forward.path == "packed"
    with torch.no_grad():
        logprobs = forward(batch, "none").logprobs
    assert logprobs.dtype == torch.float32
    packed = (logprobs.cpu().double() - truth).abs()[batch.mask]
    assert float(packed.mean()) < 1.5 * float(modules.mean()) + 1e-3
    assert float(packed.max()) < 2.0 * float(modules.max()) + 1e-2


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_on_cuda_are_those_of_the_cpu(family: str) -> None:
    objective = registry.find("objective", "reinforce").bind({})
    aggregate = registry.find("aggregation", "token_mean").bind({})
    on_gpu = random_model(family)
    on_cpu = copy.deepcopy(on_gpu).cpu()
    found = {}
    for name, model in (("gpu", on_gpu), ("cpu", on_cpu)):
        loss, metrics = accumulate(Method(Forward(model), objective, aggregate), ragged_batch(), TrainSection())
        gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        found[name] = (loss, metrics, gradient)
    assert found["gpu"][0] == approx(found["cpu"][0], abs=1e-5)
    assert found["gpu"][1]["entropy"] == approx(found["cpu"][1]["entropy"], abs=1e-4)
    scale = float(found["cpu"][2].abs().max())
    assert_close(found["gpu"][2], found["cpu"][2], atol=1e-4 * scale, rtol=0)


def test_gradients_on_cuda_do_not_depend_on_the_split() -> None:
    objective = registry.find("objective", "reinforce").bind({})
    aggregate = registry.find("aggregation", "sequence_mean").bind({})
    model = random_model("qwen3")
    forward = Forward(model)
    gradients = []
    for options in ({}, {"micro_batch_rows": 1}, {"micro_batch_tokens": 60}):
        model.zero_grad(set_to_none=True)
        accumulate(Method(forward, objective, aggregate), ragged_batch(), TrainSection(**options))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    scale = float(gradients[0].abs().max())
    for gradient in gradients:
        assert_close(gradient, gradients[0], atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize("model", [{}, {"adapter": {"rank": 4}}], ids=["full", "lora"])
def test_a_run_on_cuda_stops_and_resumes(model: dict[str, Any], tmp_path: Path) -> None:
    """Everything a resume restores finds its way back to the device; the next steps are nearly the same.

    Nearly: kernels on a GPU may add in another order, and a sampled token may then differ.
    """
    recipe = validate_recipe(
        {
            "model": {"name": "tiny", "device": "cuda"} | model,
            "task": {"name": "stories", "size": 64, "max_steps": 1},
            "rewards": ["is_number", {"name": "overlong", "limit": 24, "cache": 12}],
            "rollout": {"num_prompts": 4, "group_size": 4, "max_tokens": 24},
            "objective": "grpo",
            "regularize": {"kl_coef": 0.1},
            "train": {"steps": 4, "lr": 1e-5, "ppo_epochs": 2},
        }
    ).resolve()
    steps: list[int] = []

    def stop() -> bool:
        return len(steps) >= 3

    def note(event: str, info: dict[str, Any]) -> None:
        if event == "step":
            steps.append(info["step"])

    run_training(recipe, RunFiles.within(tmp_path / "whole"))
    first = run_training(recipe, RunFiles.within(tmp_path / "cut"), observer=note, should_stop=stop)
    assert (first.step, first.reason) == (3, "interrupted")  # inside a rollout batch
    second = run_training(recipe, RunFiles.within(tmp_path / "cut"), resume=True)
    assert (second.step, second.reason) == (4, "finished")
    whole, cut = (MetricsLog(tmp_path / name / "metrics.jsonl").read() for name in ("whole", "cut"))
    assert [r.step for r in whole] == [r.step for r in cut] == [1, 2, 3, 4]
    assert cut[3].metrics["loss"] == approx(whole[3].metrics["loss"], abs=1e-3)
    assert cut[3].metrics["trained_tokens"] == approx(whole[3].metrics["trained_tokens"], rel=0.2)
    assert whole[0].metrics["kl_sampler"] == approx(0.0, abs=1e-6)
    assert whole[0].metrics["kl_ref"] == approx(0.0, abs=1e-6)
    assert cut[3].timing["peak_memory_bytes"] > 1e6
