"""Recipes and options that are compared can differ: no two methods, and no two values, end in the same weights unsaid.

The recipes are read, not listed: a new one is compared with all others of its folder. Runs are of small models, a few
updates at a large learning rate, so that ratios leave their clip ranges.
"""

from __future__ import annotations

import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic.fields import FieldInfo
from safetensors.torch import load_file
from torch import Tensor

from page_commands import commands, words_of
from posttrain import registry
from posttrain.commands.sweeps import read_over
from posttrain.recipes.inert import facts_of, find_inert_options
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.registry import Entry
from posttrain.runs.launch import RunStart, launch
from posttrain.sweeps.file import training_recipe_names
from posttrain.training.checks import resolve_components
from test_recipes import judge, local_data, random_models, small_changes, with_coin

__all__ = ["judge", "local_data", "random_models"]

pytestmark = pytest.mark.usefixtures("quick_stories")
NAMES = training_recipe_names()
KINDS = {
    "objective": "objective",
    "advantage": "advantage",
    "aggregation": "aggregate",
    "correction": "correction",
    "mask": "masks.0",
}
# Two runs are the same method if their weights are closer than this share of the way that they went.
SAME = 1e-4
MOST_STEPS = 6
# Models and learning rates, the next of which is asked where one shows no difference: a random model is never sure of a
# token, the embedded one is, and a slow one stays within some clip ranges.
RATES = {"random": 0.1, "embedded": 3e-3, "slow": 3e-3}

# Pairs of recipes of a folder that are one computation, or one up to a factor that the optimizer takes out again.
EQUAL: dict[frozenset[str], str] = {
    frozenset({"rl/gspo", "rl/gspo-token"}): "one advantage for an answer: value and gradient are GSPO's (eq. 13-14)",
    frozenset(
        {"rl/reinforce", "rl/expert-iteration"}
    ): "with rewards of 0 and 1 the same rows count; Adam takes out the factor",
}

# What a packaged recipe needs in addition for an option to act, where none has it.
JSD = {"objective.divergence": "jsd"}
MISMATCH = {
    "rollout.old_logprobs": "trainer",
    "rollout.staleness": 1,
    "train.num_minibatches": 1,
    "train.ppo_epochs": 1,
}
SEVERAL = {"train.num_minibatches": 2, "train.ppo_epochs": 2}
ADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "objective distillation jsd_weight": ("distillation/reverse-kl", JSD),
    "objective sdpo jsd_weight": ("rl/sdpo", JSD),
    "objective f_dpo alpha": ("preference/f-dpo", {"objective.divergence": "alpha"}),
    "objective cispo clip_low": ("rl/cispo", SEVERAL | {"objective.clip_low": 0.5}),
    "advantage batch_normalized center": ("rl/reinforce-baseline", {"advantage": "batch_normalized"}),
    "advantage batch_normalized epsilon": ("rl/reinforce-baseline", {"advantage": "batch_normalized"}),
    "correction token_tis cap": ("rl/grpo", MISMATCH | {"correction": "token_tis"}),
    "correction sequence_tis cap": ("rl/grpo", MISMATCH | {"correction": "sequence_tis"}),
    "correction icepop low": ("rl/grpo", MISMATCH | {"correction": "icepop"}),
    "correction icepop high": ("rl/grpo", MISMATCH | {"correction": "icepop"}),
    "correction geometric_mask low": ("rl/grpo", MISMATCH | {"correction": "geometric_mask"}),
    "correction geometric_mask high": ("rl/grpo", MISMATCH | {"correction": "geometric_mask"}),
    "correction geometric_mask weigh": ("rl/grpo", MISMATCH | {"correction": "geometric_mask"}),
    "correction geometric_mask cap": (
        "rl/grpo",
        MISMATCH | {"correction": "geometric_mask", "correction.weigh": "token", "correction.high": 100.0},
    ),
}
# Options that no recipe moves in a few updates of a small model; where else they are tested.
ELSEWHERE = {
    "objective grpo clip_max": "tests/training/test_acting_options.py, by weights at several passes over a batch",
    "objective ppo clip_max": "the same surrogate",
    "objective on_policy_distillation clip": "tests/training/test_acting_options.py, by weights",
    "advantage turn_normalized gamma": "tests/training/test_turn_advantages.py: turns need a model that calls a tool",
    "advantage turn_normalized epsilon": "tests/training/test_turn_advantages.py",
}
# Another value, where half of the first is none that acts.
OTHER: dict[str, Any] = {
    "clip_max": 1.01,
    "share": 0.5,
    "cov_low": -1.0,
    "cov_high": 0.6,
    "clip": 0.001,
    "value_clip": 0.001,
    "ratio_cap": 1.001,
    "cap": 0.5,
    "low": 0.9999,
    "high": 1.0,
    "margin": 0.001,
    "num_classes": 3,
}


@cache
def resolved(name: str) -> Recipe:
    return load_recipe(name).resolve()


def inert_keys(recipe: Recipe) -> set[str]:
    return {option.key for option in find_inert_options(recipe, resolve_components(recipe).needs)}


def options() -> list[tuple[str, str, Entry]]:
    """Return the label, the dotted key and the component of every option that decides a loss."""
    found = []
    for kind, key in KINDS.items():
        for name, entry in registry.entries(kind).items():
            found += [
                (f"{kind} {name} {option}", f"{key}.{option}", entry) for option in entry.options_model.model_fields
            ]
    return found


OPTIONS = {label: (key, entry) for label, key, entry in options()}


def component_at(recipe: Recipe, key: str) -> Any:
    """Return the component at a key of a recipe, ``masks.0`` among them; None if there is none."""
    name, _, number = key.partition(".")
    value = getattr(recipe, name)
    if not number:
        return value
    return value[int(number)] if len(value) > int(number) else None


def users(entry: Entry) -> list[str]:
    """Return the packaged recipes with a component."""
    key = KINDS[entry.kind]
    found = []
    for name in NAMES:
        component = component_at(resolved(name), key)
        if component is not None and component.name == entry.name:
            found.append(name)
    return found


def recipe_with(name: str, added: Mapping[str, Any]) -> Recipe:
    return load_recipe(name, [(key, json.dumps(value)) for key, value in added.items()]).resolve()


def acting_recipe(label: str) -> tuple[str, dict[str, Any]]:
    """Return a packaged recipe in which an option acts, and what it needs in addition."""
    key, entry = OPTIONS[label]
    for name in users(entry):
        if key not in inert_keys(resolved(name)):
            return name, {}
    if label in ADDED:
        return ADDED[label]
    for name in users(entry):
        if key not in inert_keys(recipe_with(name, SEVERAL)):
            return name, SEVERAL
    raise AssertionError(f"{label} acts in no packaged recipe; it is used by {users(entry)}")


@pytest.mark.parametrize("label", sorted(set(OPTIONS) - set(ELSEWHERE)))
def test_option_acts_in_a_packaged_recipe(label: str) -> None:
    name, added = acting_recipe(label)
    assert OPTIONS[label][0] not in inert_keys(recipe_with(name, added))


def test_lists_of_exceptions_name_options_and_recipes() -> None:
    assert set(ADDED) | set(ELSEWHERE) <= set(OPTIONS)
    assert {name for pair in EQUAL for name in pair} <= set(NAMES)


def documented_sweeps() -> dict[str, tuple[str, list[tuple[str, str]], tuple[str, list[str]]]]:
    """Return recipe, overrides, and key with values of every ``sweep --over`` that a page says to type."""
    found = {}
    for _, command in commands():
        words = words_of(command)
        if words[:2] != ["posttrain", "sweep"] or "--over" not in words:
            continue
        if "KEY=A,B" in words:  # a form to fill in
            continue
        rest = words[3:]
        given = {}
        for place, word in enumerate(rest):
            if word.startswith("--"):
                given[word.removeprefix("--")] = (rest[place + 1 :] or [""])[0]
        over = read_over(given["over"])
        found[command] = (words[2], [(key, value) for key, value in given.items() if "." in key], over)
    return found


SWEEPS = documented_sweeps()


def test_pages_have_sweeps_over_keys() -> None:
    assert len(SWEEPS) >= 8


@pytest.mark.parametrize("command", sorted(SWEEPS))
def test_documented_sweep_varies_a_key_that_acts(command: str) -> None:
    recipe, overrides, (key, values) = SWEEPS[command]
    idle = [key in inert_keys(load_recipe(recipe, [*overrides, (key, value)]).resolve()) for value in values]
    assert not all(idle), f"{key} does nothing in {recipe}"


@dataclass(frozen=True)
class Place:
    """Models and data that stand for those of recipes, and a folder for runs."""

    models: dict[str, Path]
    data: dict[str, Path]
    judge: Path
    folder: Path

    def run(self, recipe: Recipe, kind: str) -> Tensor:
        """Return the weights after a few updates by a recipe that go far."""
        number = len(list(self.folder.iterdir()))
        return trained(lively(recipe, kind, self), self.folder / str(number))

    def start(self, recipe: Recipe, kind: str) -> Tensor:
        """Return the weights before the first update, up to one update at a rate of nothing."""
        still = lively(recipe, kind, self)
        still.train.steps = 1
        still.train.lr = 1e-30
        number = len(list(self.folder.iterdir()))
        return trained(still, self.folder / f"start-{number}")


@pytest.fixture
def place(random_models: dict[str, Path], local_data: dict[str, Path], judge: Path, tmp_path: Path) -> Place:
    return Place(random_models, local_data, judge, tmp_path)


def lively(recipe: Recipe, kind: str, place: Place) -> Recipe:
    """Return a resolved recipe on a small model, for a few updates that go far."""
    small = recipe.model_copy(deep=True)
    train = small.train
    train.num_minibatches = min(train.num_minibatches, 4)
    train.ppo_epochs = min(train.ppo_epochs, 2)
    content = small.dump()
    changes = small_changes(small, place.models, place.data)
    again = with_coin(load_recipe(content, changes), place.judge).dump()
    if kind == "embedded":
        again["model"]["name"] = "tiny-sft"
    updates = train.num_minibatches * train.ppo_epochs
    again["train"] |= {"steps": min(MOST_STEPS, max(3, updates + 1)), "lr": RATES[kind], "schedule": "constant"}
    again["eval"] |= {"every": 0}
    if again["optimizer"]["name"] == "adamw":  # so that a gradient of rounding moves nothing
        again["optimizer"]["eps"] = 1e-5
    if small.reference is not None:  # it moves within these few updates
        again["reference"] |= {"every": min(small.reference.every, 2)}
    if small.rollout is not None:
        again["rollout"] |= {"group_size": max(2, min(small.rollout.group_size, 16) // 2), "max_tokens": 8}
    return validate_recipe(again).resolve()


def weights_of(folder: Path) -> Tensor:
    """Return the weights of a run's last checkpoint, in a row."""
    place = max((folder / "checkpoints").glob("step-*"))
    parts: list[Tensor] = []
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if (place / name).is_file():
            tensors = load_file(place / name)
            parts += [tensors[key].double().flatten() for key in sorted(tensors)]
    return torch.cat(parts)


def trained(recipe: Recipe, folder: Path) -> Tensor:
    return weights_of(launch(recipe, RunStart(root=folder, name="run")).folder)


def distance(left: Tensor, right: Tensor, start: Tensor) -> float:
    """Return how far apart two runs ended, as a share of the way that the longer one went."""
    way = max(float((left - start).norm()), float((right - start).norm()))
    assert way > 0
    return float((left - right).norm()) / way


def ratios_are_one(name: str) -> bool:
    """Return whether a recipe makes one update per batch of answers: all objectives with a ratio are one there."""
    recipe = resolved(name)
    needs = resolve_components(recipe).needs
    return bool({"old_logprobs", "sampler_logprobs"} & needs) and facts_of(recipe, needs).is_on_policy


def families() -> dict[str, list[str]]:
    """Return the packaged recipes by folder, those of one task together."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        folder, _, _ = name.rpartition("/")
        recipe = resolved(name)
        if folder:
            found.setdefault(f"{folder}, {recipe.task.name}, {recipe.model.name}", []).append(name)
    return {family: names for family, names in found.items() if len(names) > 1}


FAMILIES = families()
SMALLEST = min(FAMILIES, key=lambda family: len(FAMILIES[family]))


def close_pairs(names: Sequence[str], kind: str, place: Place) -> dict[tuple[str, str], float]:
    """Return the pairs of recipes that end in the same weights, with their distances."""
    ends = {name: place.run(resolved(name), kind) for name in names}
    starts: dict[torch.Size, Tensor] = {}
    for name, end in ends.items():
        if end.shape not in starts:  # a model with a head of scores has other weights
            starts[end.shape] = place.start(resolved(name), kind)
    found = {}
    for left, right in itertools.combinations(names, 2):
        if ends[left].shape != ends[right].shape:
            continue
        apart = distance(ends[left], ends[right], starts[ends[left].shape])
        if apart <= SAME:
            found[left, right] = apart
    return found


def _compare_family(family: str, place: Place) -> None:
    close = close_pairs(FAMILIES[family], "random", place)
    left_over = sorted({name for pair in close for name in pair})
    if left_over and "tiny" in family:
        again = close_pairs(left_over, "embedded", place)
        close = {pair: apart for pair, apart in close.items() if pair in again}
    listed = {pair for pair in itertools.combinations(FAMILIES[family], 2) if frozenset(pair) in EQUAL}
    assert listed <= close.keys()
    one = {pair for pair in close if all(map(ratios_are_one, pair))}
    assert close.keys() - listed - one == set()


def test_recipes_of_smallest_folder_differ_in_weights(place: Place) -> None:
    _compare_family(SMALLEST, place)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_recipes_of_folder_differ_in_weights(family: str, place: Place) -> None:
    _compare_family(family, place)


def other_values(option: str, field: FieldInfo, value: Any) -> list[Any]:
    """Return other values of an option, far from the first; a clip range on either side of it."""
    if option.startswith("clip_") and option != "clip_max":
        return [0.001, 0.9]
    return [other_value(option, field, value)]


def other_value(option: str, field: FieldInfo, value: Any) -> Any:
    """Return another value of an option, far from the first."""
    if isinstance(value, bool):
        return not value
    choices = [choice for choice in typing.get_args(field.annotation) if isinstance(choice, str) and choice != value]
    if choices:
        return choices[0]
    if option in OTHER:
        return OTHER[option]
    if isinstance(value, int):
        return value + 1
    return value / 2 or 0.25


def differ(left: Recipe, right: Recipe, place: Place) -> bool:
    """Return whether two recipes end in other weights, on one of the models at one of the rates."""
    return any(not torch.equal(place.run(left, kind), place.run(right, kind)) for kind in RATES)


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted(set(OPTIONS) - set(ELSEWHERE)))
def test_option_changes_weights_of_a_packaged_recipe(label: str, place: Place) -> None:
    key, entry = OPTIONS[label]
    name, added = acting_recipe(label)
    recipe = recipe_with(name, added)
    above, _, option = key.rpartition(".")
    value = component_at(recipe, above).options.get(option)
    for other in other_values(option, entry.options_model.model_fields[option], value):
        content: Any = recipe.dump()
        place_of = content
        for part in above.split("."):
            place_of = place_of[int(part)] if isinstance(place_of, list) else place_of[part]
        place_of[option] = other
        if differ(recipe, validate_recipe(content).resolve(), place):
            return
    raise AssertionError(f"{key} changes nothing in {name}")


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(SWEEPS))
def test_documented_sweep_changes_weights(command: str, place: Place) -> None:
    recipe, overrides, (key, values) = SWEEPS[command]
    rows = [load_recipe(recipe, [*overrides, (key, value)]).resolve() for value in values]
    if key == "train.lr":  # which these runs set
        assert len({row.train.lr for row in rows}) == len(rows)
        return
    for left, right in itertools.combinations(rows, 2):
        assert differ(left, right, place)
