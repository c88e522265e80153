"""A reference that moves with the policy: the mixture, when it is read, checkpoints, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import approx, rounding
from posttrain.errors import CheckpointError, RecipeError
from posttrain.models.reference import Reference
from posttrain.recipes.recipe import validate_recipe
from posttrain.training.build import prepare
from posttrain.training.checks import resolve_components
from refusing import refuses
from small_runs import Events, one_layer_recipe, recorded, run, saved_tensors, steps_of, untimed, watched

FEW = {"max_tokens": 8}
HARD = {"every": 2, "mixing": 1.0}
SOFT = {"every": 2, "mixing": 0.6}
KL = {"kl_coef": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "rollout": FEW, "regularize": KL},
    "several updates of a batch": {
        "kind": "grpo",
        "rollout": FEW,
        "regularize": KL,
        "train": {"num_minibatches": 2, "ppo_epochs": 2},
    },
    "dpo": {"kind": "judged", "objective": "dpo"},
}


def recipe_of(name: str, reference: dict[str, Any], steps: int) -> Any:
    changes = copy.deepcopy(KINDS[name])
    changes["train"] = {"steps": steps, "lr": 1e-3} | changes.get("train", {})
    return one_layer_recipe(changes.pop("kind"), reference=reference, **changes)


def test_reference_moves_by_hand() -> None:
    """``ref ← α π + (1 − α) ref`` in the order of TRL 1.16's ``_sync_target_model``, bit for bit."""
    policy = prepare(one_layer_recipe("grpo")).policy
    reference = Reference(policy)
    before = {name: p.clone() for name, p in reference.tensors().items()}
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    live = dict(policy.model.named_parameters())
    reference.move(0.6)
    for name, own in reference.tensors().items():
        theirs = before[name].clone().mul_(1.0 - 0.6).add_(live[name].detach(), alpha=0.6)
        assert torch.equal(own, theirs)
        assert not torch.equal(own, before[name])
    reference.move(1.0)
    assert all(torch.equal(own, live[name]) for name, own in reference.tensors().items())


@pytest.mark.parametrize("name", KINDS)
def test_reference_is_the_policy_at_the_update_after_a_hard_move(name: str, tmp_path: Path) -> None:
    """Updates 1, 3 and 5 read a reference that is the policy; 2 and 4 one that is an update behind."""
    run(tmp_path, recipe_of(name, HARD, 5))
    measured = steps_of(tmp_path)
    if name == "dpo":
        found = [row["margin"] for row in measured]
        assert [row["loss"] for row in measured][::2] == approx([math.log(2)] * 3, rel=1e-6)
    else:
        found = [row["kl_ref"] for row in measured]
    bound = rounding(torch.float32, size=10.0, terms=200)  # of sums of log-probabilities
    assert [abs(x) <= bound for x in found] == [True, False, True, False, True]


def test_softly_moved_reference_lies_between(tmp_path: Path) -> None:
    """After one update of one size the KL is largest to the start, smaller to a mixture, and 0 to a copy."""
    kl = {}
    for mixing in (0.2, 0.6, 1.0):
        folder = tmp_path / str(mixing)
        recipe = recipe_of("grpo", {"every": 1, "mixing": mixing}, 2)
        recipe.train.lr = 1e-5
        run(folder, recipe)
        kl[mixing] = steps_of(folder)[1]["kl_ref"]
    assert kl[0.2] > 2 * kl[0.6] > 0
    assert kl[1.0] < 1e-9
    # of second order in the distance, which is 1 − α of the step
    assert kl[0.6] / kl[0.2] == approx((0.4 / 0.8) ** 2, rel=0.05)


@pytest.mark.parametrize("name", KINDS)
def test_run_with_a_moving_reference_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name, SOFT, 6)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "stopped", recipe, stop_after=3)
    run(tmp_path / "stopped", recipe, resume=True)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")
    whole, again = (saved_tensors(tmp_path / folder, 6) for folder in ("whole", "stopped"))
    assert whole.keys() == again.keys()
    assert any(key.startswith("reference.safetensors:") for key in whole)
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    if name != "dpo":
        assert recorded(tmp_path / "whole") == recorded(tmp_path / "stopped")


def test_fixed_reference_keeps_no_copy_and_a_moving_one_no_cache(tmp_path: Path) -> None:
    run(tmp_path / "moves", recipe_of("dpo", SOFT, 2))
    run(tmp_path / "fixed", one_layer_recipe("judged", objective="dpo", train={"steps": 2, "lr": 1e-3}))
    assert (tmp_path / "fixed" / "ref_logprobs.safetensors").is_file()
    assert not (tmp_path / "moves" / "ref_logprobs.safetensors").exists()
    assert not list((tmp_path / "fixed").rglob("reference.safetensors"))
    assert list((tmp_path / "moves").rglob("reference.safetensors"))


def test_evaluations_compare_with_the_start(tmp_path: Path) -> None:
    """The reference becomes the policy at every update; the drift from the start is still measured."""
    events = Events()
    changes = {"every": 4, "num_examples": 4, "num_kl_prompts": 4, "max_tokens": 8}
    recipe = one_layer_recipe(
        "grpo", rollout=FEW, regularize=KL, reference={"every": 1, "mixing": 1.0}, eval=changes, train={"steps": 4}
    )
    watched(tmp_path, recipe, events)
    drift = [one["results"]["kl_initial"] for one in events.of("evaluation")]
    assert drift[0] == approx(0.0, abs=1e-6)
    assert drift[-1] > 1e-4


def test_penalty_in_the_reward_is_of_the_reference_at_sampling(tmp_path: Path) -> None:
    recipe = one_layer_recipe(
        "grpo",
        rollout=FEW,
        advantage="centered",
        kl_in_reward={"weight": 0.1},
        reference={"every": 1, "mixing": 1.0},
        train={"steps": 3, "lr": 1e-3},
    )
    run(tmp_path, recipe)
    bound = rounding(torch.float32, size=10.0, terms=200)
    assert all(abs(row["kl_in_reward"]) <= bound for row in steps_of(tmp_path))


# --- what is refused ---


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("grpo", {}, ("reference", "regularize.kl_coef")),
        ("sft", {}, ("reference", "cross_entropy")),
        ("grpo", {"regularize": KL, "model": {"adapter": {"rank": 2}}}, ("reference", "adapter")),
        ("grpo", {"regularize": KL, "scale": {"sharding": "fsdp2", "processes": 2}}, ("reference", "scale.sharding")),
    ],
)
def test_moving_reference_refuses_by_name(kind: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    with refuses(RecipeError, *named):
        resolve_components(one_layer_recipe(kind, reference=SOFT, **changes))


def test_moving_reference_refuses_a_loaded_adapter(tmp_path: Path) -> None:
    run(tmp_path, one_layer_recipe("sft", model={"adapter": {"rank": 2}}, train={"steps": 1}))
    place = str(tmp_path / "checkpoints" / "step-000001")
    recipe = one_layer_recipe("grpo", model={"name": place}, regularize=KL, reference=SOFT)
    with refuses(RecipeError, "adapter"):
        prepare(recipe)


@pytest.mark.parametrize(("key", "value"), [("every", 0), ("mixing", 0.0), ("mixing", 1.5), ("alpha", 0.5)])
def test_moving_reference_refuses_values_by_their_key(key: str, value: object) -> None:
    base = one_layer_recipe("grpo", regularize=KL).dump()
    with refuses(RecipeError, f"reference.{key}"):
        validate_recipe(base | {"reference": SOFT | {key: value}})


def test_checkpoint_without_the_reference_is_refused() -> None:
    reference = Reference(prepare(one_layer_recipe("grpo")).policy)
    with refuses(CheckpointError, "reference.safetensors", "not in the checkpoint"):
        reference.restore({})
