"""Training and evaluation on GPUs, by a stand-in (``fake_gpu``): nothing lies on another device than what it meets.

On Apple's no float64 and no missing kernel; on NVIDIA's nothing in a graph that waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import approx, logprob_rounding
from fake_gpu import CUDA, MPS, apple_gpu, nvidia_gpu
from posttrain.errors import RecipeError, UsageError
from posttrain.models.load import choose_device, load_model
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.sampler import draw
from posttrain.store.metrics import MetricsLog
from posttrain.training.distributed import check_devices
from posttrain.types import with_float64
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, same_bits, saved_tensors

EVALUATION = {"every": 2, "num_examples": 4, "max_tokens": 6}
DRAWN = {**EVALUATION, "temperature": 1.0, "top_k": 40, "top_p": 0.9}
TRAIN = {"steps": 2, "lr": 1e-4, "micro_batch_tokens": 300}
SHORT = {"num_prompts": 3, "group_size": 2, "max_tokens": 8, "temperature": 1.5}
COARSE = {"dtype": "bfloat16", "adapter": {"rank": 4}}
NVIDIA: dict[str, dict[str, Any]] = {"16 bits": {"kind": "grpo", "rollout": SHORT, "model": COARSE}}
CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"kind": "sft", "train": {"gradient_checkpointing": True}, "eval": {**EVALUATION, "loss": True}},
    "grpo": {"kind": "grpo", "rollout": SHORT, "regularize": {"kl_coef": 0.1}, "eval": {**DRAWN, "num_kl_prompts": 3}},
    "ppo, lora and muon": {
        "kind": "grpo",
        "objective": "ppo",
        "rollout": SHORT,
        "kl_in_reward": {"weight": 0.1},
        "model": {"adapter": {"rank": 4}},
        "optimizer": "muon",
    },
    "reward model": {"kind": "judged", "eval": {"every": 2, "num_examples": 4, "tasks": ["small_runs:judged_sums"]}},
}

GPUS = {"mps": apple_gpu, "cuda": nvidia_gpu}


def trained(case: str, device: str, folder: Path) -> tuple[list[dict[str, float]], list[tuple[int, ...]]]:
    """Every row of metrics of two steps, and what was sampled."""
    about = {**CASES, **NVIDIA}[case]
    model = {**about.get("model", {}), "device": device}
    run(folder, one_layer_recipe(**{**about, "model": model, "train": {**TRAIN, **about.get("train", {})}}))
    rows = [dict(row.metrics) for row in MetricsLog(folder / "metrics.jsonl").read()]
    return rows, [tuple(r.completion) for r in recorded(folder)[0]]


@pytest.fixture(scope="module")
def of_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Results of a case on a CPU, with which each GPU is compared."""
    return cache(lambda case: trained(case, "cpu", tmp_path_factory.mktemp("cpu")))


SAMPLED = 8.0  # a log-probability of a sampled token is about as large
LOGPROB = logprob_rounding(1, size=SAMPLED)


def check_row(row: dict[str, float], other: dict[str, float]) -> None:
    """Compare two rows of metrics: means of log-probabilities and of their differences, which have the same rounding.

    ``kl_in_reward`` is a sum over the tokens of an answer, of differences that are near 0 as the policy is near its
    reference; what rounds one token's rounds the next one's likewise.
    """
    own, others = dict(row), dict(other)
    of_answers = SHORT["max_tokens"] * LOGPROB
    assert own.pop("kl_in_reward", 0.0) == approx(others.pop("kl_in_reward", 0.0), rel=2e-4, abs=of_answers)
    assert own == approx(others, rel=2e-4, abs=LOGPROB)


@pytest.mark.parametrize(("case", "device"), [*((case, "mps") for case in CASES), ("grpo", "cuda")])
def test_two_steps_and_an_evaluation_ask_for_nothing_that_a_gpu_lacks(
    case: str, device: str, of_cpu: Callable[[str], Any], tmp_path: Path
) -> None:
    with GPUS[device]():
        rows, sampled = trained(case, device, tmp_path)
    expected, drawn = of_cpu(case)
    assert sampled == drawn
    assert bool(drawn) == (CASES[case]["kind"] == "grpo")
    assert len(rows) == len(expected) >= 2
    for row, other in zip(rows, expected, strict=True):
        check_row(row, other)


def test_it_goes_on_from_a_checkpoint_there(tmp_path: Path) -> None:
    recipe = one_layer_recipe("sft", model={"device": "mps"}, train={"steps": 2, "lr": 1e-4})
    with apple_gpu():
        run(tmp_path, recipe, stop_after=1)
        assert run(tmp_path, recipe, resume=True).step == 2
        run(tmp_path / "whole", recipe)
    assert same_bits(saved_tensors(tmp_path, 2), saved_tensors(tmp_path / "whole", 2))


@pytest.mark.parametrize("device", [MPS, CUDA])
@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.7}])
def test_it_draws_the_tokens_that_a_cpu_draws(options: dict[str, Any], device: torch.device) -> None:
    noise = torch.Generator().manual_seed(0)
    logits, uniforms = (
        torch.randn(64, 500, generator=noise) * 3,
        torch.rand(64, 1, generator=noise, dtype=torch.float64),
    )
    sampling = Sampling(max_tokens=1, temperature=0.8, **options)
    ids, probabilities = draw(logits, uniforms, sampling)
    assert len(set(ids.tolist())) > 20
    with GPUS[device.type]():
        there = logits.to(device)
        zeros = with_float64(torch.zeros(64, 1, device=device)).double()
        drawn, likely = draw(there, zeros + uniforms.to(zeros.device), sampling)
        assert (there.device, drawn.device) == (device, device)
        assert (drawn.cpu().equal(ids), likely.cpu().equal(probabilities)) == (True, True)


def test_sixteen_bits_attend_by_flash(tmp_path: Path) -> None:
    """And what scores a token that is sampled, and the same token in training, differ by rounding."""
    with nvidia_gpu() as counts:
        rows, _ = trained("16 bits", "cuda", tmp_path / "cuda")
    assert counts["flash backward"] >= 2, "one layer, in two updates"
    assert counts["flash"] >= counts["flash backward"]
    assert rows[-1]["kl_sampler"] != 0
    one_deviation = logprob_rounding(1, size=SAMPLED, dtype=torch.bfloat16) / 8
    assert rows[-1]["kl_sampler"] == approx(0.0, abs=one_deviation**2 / 2)


def test_an_apple_gpu_that_is_not_there_is_named() -> None:
    with refuses(UsageError, "model.device"):
        choose_device("mps")


def test_what_it_cannot_do_is_refused_by_name() -> None:
    with refuses(RecipeError, "has no fp64"):
        one_layer_recipe("sft", model={"device": "mps", "dtype": "float64"})
    with apple_gpu():
        check_devices("mps", 1)
        with refuses(UsageError, "scale.processes"):
            check_devices("mps", 2)
        section = one_layer_recipe("sft", model={"device": "mps", "load_bits": 4, "adapter": {"rank": 4}}).model
        with refuses(UsageError, "multiply quantized weights"):
            load_model(section, seed=0)
