"""Training and evaluation on an Apple GPU, by a stand-in (``apple_gpu``): no float64, no missing kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from apple_gpu import MPS, OnApple, apple_gpu, has_kernel
from posttrain.engines.base import Sampling
from posttrain.engines.native.sampler import draw
from posttrain.errors import RecipeError, UsageError
from posttrain.models.load import choose_device, load_model
from posttrain.store.metrics import MetricsLog
from posttrain.train.distributed import check_devices
from posttrain.train.optimizer import Offloaded
from posttrain.types import with_float64
from small_runs import make_recipe, recorded, run, same_bits, saved_tensors

EVALUATION = {"every": 2, "n": 4, "max_tokens": 6}
DRAWN = {**EVALUATION, "temperature": 1.0, "top_k": 40, "top_p": 0.9}
SHORT = {"prompts": 3, "group": 2, "max_tokens": 8, "temperature": 1.5}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "eval": {**EVALUATION, "loss": True}},
    "grpo": {"kind": "grpo", "rollout": SHORT, "regularize": {"kl": 0.1}, "eval": {**DRAWN, "drift_prompts": 3}},
    "ppo": {"kind": "grpo", "objective": "ppo", "rollout": SHORT, "kl_in_reward": {"weight": 0.1}},
    "lora and muon": {"kind": "grpo", "rollout": SHORT, "model": {"adapter": {"rank": 4}}, "optimizer": "muon"},
    "dpo": {"kind": "judged", "objective": "dpo"},
    "kto": {"kind": "judged", "objective": "kto"},
    "reward model": {"kind": "judged", "eval": {"every": 2, "n": 4, "tasks": ["small_runs:judged_sums"]}},
}


def trained(case: str, device: str, folder: Path) -> tuple[list[dict[str, float]], list[tuple[int, ...]]]:
    """Every row of metrics of two steps, and what was sampled."""
    about = CASES[case]
    model = {**about.get("model", {}), "device": device}
    run(folder, make_recipe(**{**about, "model": model, "train": {"steps": 2, "lr": 1e-4, "tokens_per_micro": 300}}))
    rows = [dict(row.metrics) for row in MetricsLog(folder / "metrics.jsonl").read()]
    return rows, [tuple(r.completion) for r in recorded(folder)[0]]


@pytest.mark.parametrize("case", CASES)
def test_two_steps_and_an_evaluation_ask_for_nothing_that_an_apple_gpu_lacks(case: str, tmp_path: Path) -> None:
    with apple_gpu():
        rows, sampled = trained(case, "mps", tmp_path / "mps")
    expected, drawn = trained(case, "cpu", tmp_path / "cpu")
    assert sampled == drawn
    assert bool(drawn) == (CASES[case]["kind"] == "grpo")
    assert len(rows) == len(expected) >= 2
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_offloaded_optimizer_gives_the_bits_of_one_that_is_not(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is in main memory before and after every update, and where the weights are in between."""
    seen: list[tuple[bool, bool]] = []

    def watch(self: Offloaded, closure: Any = None) -> None:
        before = on_apple(self)
        step(self)
        assert self.state
        seen.append((before, on_apple(self)))

    def on_apple(optimizer: Offloaded) -> bool:
        return any(isinstance(x, OnApple) for state in optimizer.state.values() for x in state.values())

    step = Offloaded.step
    monkeypatch.setattr(Offloaded, "step", watch)
    options = {"model": {"device": "mps"}, "optimizer": optimizer}
    offloaded, plain = (
        make_recipe("sft", **options, train={"steps": 3, "lr": 1e-4, "offload": offload})
        for offload in ("optimizer", "none")
    )
    with apple_gpu():
        run(tmp_path / "plain", plain)
        assert seen == []
        run(tmp_path / "whole", offloaded)
        run(tmp_path / "cut", offloaded, stop_after=1)
        run(tmp_path / "cut", offloaded, resume=True)
    assert seen == [(False, False)] * 6
    saved = [saved_tensors(tmp_path / name, 3) for name in ("plain", "whole", "cut")]
    assert any(key.startswith("optimizer.safetensors:") for key in saved[0])
    assert same_bits(saved[0], saved[1])
    assert same_bits(saved[0], saved[2])


def test_it_goes_on_from_a_checkpoint_there(tmp_path: Path) -> None:
    recipe = make_recipe("sft", model={"device": "mps"}, train={"steps": 2, "lr": 1e-4})
    with apple_gpu():
        run(tmp_path, recipe, stop_after=1)
        assert run(tmp_path, recipe, resume=True).step == 2
        run(tmp_path / "whole", recipe)
    assert same_bits(saved_tensors(tmp_path, 2), saved_tensors(tmp_path / "whole", 2))


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.7}])
def test_it_draws_the_tokens_that_a_cpu_draws(options: dict[str, Any]) -> None:
    noise = torch.Generator().manual_seed(0)
    logits, uniforms = (
        torch.randn(64, 500, generator=noise) * 3,
        torch.rand(64, 1, generator=noise, dtype=torch.float64),
    )
    sampling = Sampling(max_tokens=1, temperature=0.8, **options)
    ids, probabilities = draw(logits, uniforms, sampling)
    assert len(set(ids.tolist())) > 20
    with apple_gpu():
        there = logits.to(MPS)
        drawn, likely = draw(there, with_float64(torch.zeros(64, 1, device=MPS)).double() + uniforms, sampling)
        assert (there.device, drawn.device) == (MPS, MPS)
        assert (drawn.cpu().equal(ids), likely.cpu().equal(probabilities)) == (True, True)


def test_the_stand_in_refuses_what_an_apple_gpu_refuses() -> None:
    with apple_gpu():
        x = torch.ones(3, device=MPS)
        assert isinstance(x, OnApple)
        for make in (x.double, lambda: x.to(torch.float64), lambda: x.sum(dtype=torch.float64)):
            with pytest.raises(TypeError, match="doesn't support float64"):
                make()
        with pytest.raises(TypeError, match="doesn't support float64"):
            torch.ones(3, dtype=torch.float64).to(MPS)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(NotImplementedError, match="geqrf"):
            torch.geqrf(torch.ones(2, 2, device=MPS))
        assert float((x * 2).sum()) == 6.0
    assert has_kernel(torch.ops.aten.searchsorted.Tensor)
    assert not has_kernel(torch.ops.aten.geqrf.default)


def test_an_apple_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"mps was asked for, but this torch .*; use model.device auto or cpu"):
        choose_device("mps")


def test_what_it_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="mps has no float64"):
        make_recipe("sft", model={"device": "mps", "dtype": "float64"})
    with apple_gpu():
        check_devices("mps", 1)
        with pytest.raises(UsageError, match=r"scale\.processes: 2, and a Mac's GPU"):
            check_devices("mps", 2)
        section = make_recipe("sft", model={"device": "mps", "load_bits": 4, "adapter": {"rank": 4}}).model
        with pytest.raises(UsageError, match="mps cannot multiply weights in 4 bits"):
            load_model(section, seed=0)
