"""``train.precision``: products in bfloat16 over weights in fp32; what it changes, and what it must not."""

from __future__ import annotations

from pathlib import Path

import torch

from closeness import approx
from posttrain.errors import RecipeError
from posttrain.training.build import prepare
from refusing import refuses
from small_runs import make_recipe, one_layer_recipe, run, same_bits, saved_tensors, steps_of, untimed

COARSE = {"steps": 4, "precision": "bf16", "save_every": 2}


def test_the_weights_stay_in_fp32_and_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    slowly = {**COARSE, "lr": 3e-4}  # at 1e-3 rounding moves the fourth loss by 6 % on a CPU with AMX
    recipe = one_layer_recipe("sft", train=slowly)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "parted", recipe, stop_after=2)
    run(tmp_path / "parted", recipe, resume=True)
    whole, parted = (saved_tensors(tmp_path / name, 4) for name in ("whole", "parted"))
    assert same_bits(whole, parted)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "parted")
    assert {t.dtype for n, t in whole.items() if t.is_floating_point()} == {torch.float32}
    run(tmp_path / "exact", one_layer_recipe("sft", train={**slowly, "precision": "fp32"}))
    assert not same_bits(whole, saved_tensors(tmp_path / "exact", 4))
    losses, expected = ([step["loss"] for step in steps_of(tmp_path / name)] for name in ("whole", "exact"))
    assert losses[0] == approx(expected[0], rel=2e-3)
    assert losses == approx(expected, rel=0.05)


def test_where_the_trainer_takes_both_a_ratio_begins_at_one_and_a_reference_at_no_distance(tmp_path: Path) -> None:
    rollout = {"old_logprobs": "trainer"}
    run(tmp_path, one_layer_recipe("grpo", rollout=rollout, regularize={"kl_coef": 0.1}, train={**COARSE, "steps": 1}))
    first = steps_of(tmp_path)[0]
    assert first["kl_ref"] == 0
    assert first["ratio"] == 1
    assert first["kl_sampler"] != 0
    assert first["kl_sampler"] == approx(0.0, abs=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    with refuses(RecipeError, "train.precision", "old_logprobs to trainer"):
        prepare(make_recipe("grpo", train=COARSE))
    with refuses(RecipeError, "train.precision: tf32"):
        prepare(make_recipe("sft", train={"precision": "tf32"}))
    with refuses(RecipeError, "train.precision"):
        make_recipe("sft", train={"precision": "bf16"}, model={"dtype": "float64"})
