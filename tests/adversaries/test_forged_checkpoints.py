"""A stranger's checkpoint whose hashes fit and which says what no run writes: one message, never a traceback.

What is told apart from damage (``test_damaged_runs``): here the manifest was made to agree.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.errors import CheckpointError
from posttrain.recipes.recipe import Recipe
from posttrain.store import checkpoint_files
from posttrain.training.loop import TrainResult
from posttrain.training.sources.prefetch import HELD
from refusing import refuses
from small_runs import make_recipe, run, steps_of

STEP = 3
TRAIN = {"steps": 6, "lr": 1e-3, "save_every": STEP}
PARTS = [
    {"name": name, "task": {"name": "stories", "size": 32, "max_steps": 1, "seed": i}} for i, name in enumerate("ab")
]
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "passes": ("grpo", {"train": TRAIN | {"num_minibatches": 2}}),
    "ahead": (
        "grpo",
        {
            "rollout": {"num_prompts": 2, "group_size": 2, "max_tokens": 4, "temperature": 1.3, "staleness": 1},
            "train": TRAIN,
        },
    ),
    "mixed": ("grpo", {"task": {"name": "mixture", "parts": PARTS}, "train": TRAIN}),
    "muon": ("sft", {"optimizer": {"name": "muon"}, "train": TRAIN}),
}
DELETED = object()


def recipe_of(kind: str) -> Recipe:
    name, changes = RECIPES[kind]
    return make_recipe(name, **changes)


@pytest.fixture(scope="module")
def cut_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that ended after ``STEP`` updates."""
    folder = tmp_path_factory.mktemp("runs")
    for name in RECIPES:
        run(folder / name, recipe_of(name), stop_after=STEP)
    return {name: folder / name for name in RECIPES}


class Forgery:
    """A copy of a run of ``kind``; what is changed in its checkpoint fits its manifest."""

    def __init__(self, kind: str, whole: Path, folder: Path) -> None:
        self.recipe, self.run = recipe_of(kind), folder / "run"
        shutil.copytree(whole, self.run, symlinks=True)
        self.checkpoint = checkpoint_files.step_folder(self.run / "checkpoints", STEP)

    def state(self, place: tuple[Any, ...], value: Any) -> None:
        path = self.checkpoint / "state.json"
        path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))

    def tensors(self, name: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
        tensors = load_file(self.checkpoint / name)
        change(tensors)
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, self.checkpoint / name)

    def held(self, place: tuple[Any, ...], value: Any) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            batches = changed(json.loads(tensors[HELD].numpy().tobytes()), place, value)
            tensors[HELD] = torch.frombuffer(bytearray(json.dumps(batches).encode()), dtype=torch.uint8)

        self.tensors("rollout_buffer.safetensors", change)

    def resume(self) -> TrainResult:
        path = self.checkpoint / checkpoint_files.MANIFEST
        files = json.loads(path.read_text())["files"]
        for name in files:
            content = (self.checkpoint / name).read_bytes()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        path.write_bytes(checkpoint_files._manifest_bytes(STEP, files))
        return run(self.run, self.recipe, resume=True, stop_after=1)


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with ``value`` at a place in it, or without it."""
    if not place:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return document


@pytest.fixture
def forge(cut_runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Forgery]:
    return lambda kind: Forgery(kind, cut_runs[kind], tmp_path)


@pytest.mark.parametrize("kind", RECIPES)
def test_what_is_not_changed_is_taken(kind: str, forge: Callable[[str], Forgery]) -> None:
    """One more update, from the checkpoint's weights: not from the beginning, and not from another checkpoint."""
    forgery = forge(kind)
    assert forgery.resume().step == STEP + 1
    assert len(steps_of(forgery.run)) == STEP + 1


@pytest.mark.parametrize(
    ("place", "value", "where"),
    [
        ((), [], "all of it"),
        (("best",), {"step": 1.0, "correct": "all"}, "best.correct"),
        (("processes",), [], "processes"),
        (("num_threads",), 10**9, "num_threads"),
        (("source", "kl_weight"), "1.0", "source.kl_weight"),
    ],
)
def test_a_state_that_no_run_writes(place: Any, value: Any, where: str, forge: Callable[[str], Forgery]) -> None:
    forgery = forge("mixed")
    forgery.state(place, value)
    with pytest.raises(CheckpointError, match=rf"state\.json says what no run writes: {where}: .*--run NAME"):
        forgery.resume()


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.pop("lengths"),
        lambda batch: batch.update(lengths=-batch["lengths"]),
        lambda batch: batch.update(tokens=batch["tokens"] + 1_000_000),
        lambda batch: batch.update(tokens=batch["tokens"].float()),
        lambda batch: batch.update(tokens=batch["tokens"][:0]),
        lambda batch: batch.update(mask=~batch["mask"]),
        lambda batch: batch.update({"stream.old_logprobs": batch["stream.old_logprobs"][:, :1]}),
    ],
)
def test_a_rollout_batch_that_no_run_writes(change: Callable[[Any], Any], forge: Callable[[str], Forgery]) -> None:
    forgery = forge("passes")
    forgery.tensors("rollout_buffer.safetensors", change)
    with refuses(CheckpointError, "--run NAME"):
        forgery.resume()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, "batch"), 1e300),
        ((0, "accepted"), None),
        ((0, "chosen"), ["first"]),
        ((0, "sampled", 0), []),
        ((0, "sampled", 0, 0, "parts"), {}),
        ((0, "sampled", 0, 0, "advantages"), 1.0),
        ((0, "sampled", 0, 0, "prompt_index"), 10**6),
        ((0, "sampled", 0, 0, "completion", "ids"), [10**6] * 4),
        ((0, "sampled", 0, 0, "completion", "logprobs"), DELETED),
        ((0, "sampled", 0, 0, "completion", "logprobs"), [-1.0]),
        ((0, "sampled", 0, 0, "completion", "version"), -1),
        ((0, "sampled", 0, 0, "completion", "own"), []),
    ],
)
def test_finished_answers_that_no_run_writes(place: Any, value: Any, forge: Callable[[str], Forgery]) -> None:
    forgery = forge("ahead")
    forgery.held(place, value)
    with refuses(CheckpointError, "--run NAME"):
        forgery.resume()


NORM, MATRIX = "model.norm.weight.{}", "model.layers.0.mlp.up_proj.weight.{}"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("passes", NORM.format("exp_avg"), None),
        ("passes", NORM.format("exp_avg"), lambda x: x.double()),
        ("passes", NORM.format("step"), lambda x: torch.zeros(0)),
        ("muon", NORM.format("step"), lambda x: -torch.ones(())),
        ("muon", MATRIX.format("momentum"), None),
    ],
)
def test_a_state_of_the_optimizer_that_none_leaves(
    kind: str, name: str, value: Callable[[Tensor], Tensor] | None, forge: Callable[[str], Forgery]
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        before = tensors.pop(name, tensors[NORM.format("exp_avg")])
        if value is not None:
            tensors[name] = value(before)
        elif kind == "muon":  # not stepped yet, it would be taken for: another's state makes it a strange one
            tensors[MATRIX.format("exp_avg")] = before

    forgery = forge(kind)
    forgery.tensors("optimizer.safetensors", change)
    with refuses(CheckpointError, "optimizer state"):
        forgery.resume()


@pytest.mark.parametrize("name", ["optimizer.safetensors", "rollout_buffer.safetensors"])
def test_a_file_that_holds_no_tensors(name: str, forge: Callable[[str], Forgery]) -> None:
    forgery = forge("passes")
    (forgery.checkpoint / name).write_bytes(b"\x08" + bytes(7) + b"not json")
    with pytest.raises(CheckpointError, match=rf"{name} holds no tensors .*--run NAME"):
        forgery.resume()
