"""A run that fails inside training saves its last completed step where that is safe, and goes on as if undisturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import NonFiniteLoss, StorageError
from posttrain.recipes.recipe import Recipe
from posttrain.store.checkpoint_files import checkpoint_steps, verify
from posttrain.training import held_out, loop
from posttrain.training.sources.rollouts import RolloutSource
from refusing import refuses
from small_runs import Events, one_layer_recipe, recorded, run, same_bits, saved_tensors, untimed, watched

EVALUATION = {"every": 2, "num_examples": 3, "max_tokens": 8}
TWO_TASKS = {"tasks": [{"name": "stories", "size": 64, "split": s} for s in ("validation", "test")]}
KL = {"kl_in_reward": {"weight": 0.1, "target": 0.5, "horizon": 40}}


class Failure(Exception):
    """Error that ends a run here."""


def fail_at(call: int, *, after: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that raises at its n-th call, before or after doing its work."""

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call and not after:
                raise Failure(f"call {call}")
            result = original(*args, **options)
            if calls == call:
                raise Failure(f"call {call}")
            return result

        return wrapped

    return broken


CASES: dict[str, tuple[dict[str, Any], object, str, int, bool, int | None]] = {
    # name: (recipe, owner of the function, function, call at which it fails, after its work, step that is saved)
    "after the backward pass": ({"kind": "sft"}, loop, "accumulate", 3, True, 2),
    "in the first step": ({"kind": "sft"}, loop, "accumulate", 1, False, None),
    "in the optimizer": ({"kind": "sft"}, loop, "apply_update", 3, True, None),
    "while sampling": ({"kind": "grpo", **KL}, RolloutSource, "draw", 4, False, 3),
    "inside a rollout batch": ({"kind": "grpo", "train": {"ppo_epochs": 2}}, loop, "accumulate", 4, False, 3),
    "in the second evaluation": (
        {"kind": "sft", "eval": EVALUATION | TWO_TASKS}, held_out, "evaluate_sampler", 4, False, 2
    ),
    "in the last evaluation": ({"kind": "sft", "eval": EVALUATION}, held_out, "evaluate_sampler", 3, False, 4),
    "before the checkpoint": ({"kind": "sft", "train": {"save_every": 2}}, loop, "save_checkpoint", 1, False, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a recipe's run that nothing breaks; several cases break the same one."""
    folders: dict[str, Path] = {}

    def run_once(recipe: Recipe) -> Path:
        if (key := recipe.to_yaml()) not in folders:
            folders[key] = tmp_path_factory.mktemp("undisturbed")
            run(folders[key], recipe)
        return folders[key]

    return run_once


@pytest.mark.parametrize("name", CASES)
def test_the_last_completed_step_is_saved_and_the_rest_is_as_if_nothing_had_happened(
    name: str, undisturbed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, owner, function, call, after, saved = CASES[name]
    recipe = one_layer_recipe(**changes)
    whole, cut = undisturbed(recipe), tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail_at(call, after=after)(getattr(owner, function)))
        with pytest.raises(Failure, match=f"call {call}"):
            run(cut, recipe)
    steps = checkpoint_steps(cut / "checkpoints")
    assert steps[-1:] == ([] if saved is None else [saved])
    for step in steps:
        verify(cut / "checkpoints" / f"step-{step:06d}", step)
    events = Events()
    result = watched(cut, recipe, events, resume=True)
    assert (result.step, result.reason) == (4, "finished")
    assert events.of("start")[0]["resumed_from"] == (saved or 0)
    assert same_bits(saved_tensors(whole, 4), saved_tensors(cut, 4))
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)


def diverging(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    original, calls = loop.accumulate, 0

    def not_finite(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, metrics = original(*args, **options)
        return (float("nan") if calls == at else loss), metrics

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", not_finite)
        with pytest.raises(NonFiniteLoss):
            run(folder, recipe)


def test_no_older_checkpoint_gives_way_to_that_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a loss that is not finite, the weights may have been bad for a while."""
    recipe = one_layer_recipe("sft", train={"steps": 6, "save_every": 1, "keep_checkpoints": 1})
    stopped = one_layer_recipe("sft", train={"steps": 6, "save_every": 2, "keep_checkpoints": 1})
    diverging(stopped, tmp_path / "a", monkeypatch, at=4)
    assert checkpoint_steps(tmp_path / "a" / "checkpoints") == [2, 3]
    diverging(recipe, tmp_path / "b", monkeypatch, at=4)  # step 3 had been saved by itself
    assert checkpoint_steps(tmp_path / "b" / "checkpoints") == [3]


def test_a_checkpoint_that_cannot_be_saved_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(loop, "save_checkpoint", full)
    monkeypatch.setattr(loop, "accumulate", fail_at(2)(loop.accumulate))
    with refuses(Failure, "call 2") as caught:
        run(tmp_path, one_layer_recipe("sft"))
    assert caught.value.__notes__ == ["step 1 could not be saved: the disk is full"]
