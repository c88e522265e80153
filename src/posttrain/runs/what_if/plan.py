"""The plan of what-if: the run, the step, the checkpoint before it, and the futures with their recipes.

A plan is checked before anything is computed. It lies in ``what-if.json`` of the folder of the results; each future is
a run directory below ``futures``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, RecipeError, UsageError
from posttrain.recipes.document import is_place
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.recipes.sections import Component, DataSection, ModelSection, RolloutSection, TrainSection
from posttrain.registry import traits_of
from posttrain.runs.directory import MAX_NAME_CHARS, RunDirectory
from posttrain.runs.resume import changed_lines, hard_changes
from posttrain.runs.what_if.changes import Change, parse_changes
from posttrain.store.checkpoint_files import Unverified, checkpoint_steps, step_folder, verify
from posttrain.store.durable import write_json
from posttrain.store.reading import read_declared
from posttrain.untrusted import kind_of_file

PLAN = "what-if.json"
FUTURES = "futures"
START = "start"
UNCHANGED = "unchanged"
NUM_STEPS = 20  # that are played unless the run ends before
MAX_FUTURES = 1000
# Keys of a recipe that decide what a checkpoint holds, so that it cannot go on with another value.
FIXED = ("model", "head", "optimizer.name")
# Keys that say what a run writes: a future of another value would be the same.
WITHOUT_EFFECT = ("train.save_every", "train.keep_checkpoints", "eval.best")


@dataclass(frozen=True, slots=True)
class Future:
    """One future: the folder's ``name``, the change, and the seed that it goes on with.

    ``seed``: 0 is that of the run. ``dropped`` and ``reward``: see ``Change``.
    """

    name: str
    label: str
    seed: int = 0
    dropped: list[int] = field(default_factory=list)
    reward: tuple[int, int, float] | None = None

    @property
    def is_unchanged(self) -> bool:
        """True if it is the run's own future, or that of another seed."""
        return self.label == UNCHANGED


@dataclass(frozen=True, slots=True)
class WhatIfPlan:
    """The futures of ``run``, a folder, after step ``at``.

    ``checkpoint``: the step of the checkpoint that they come from. ``end``: the last step that is played. ``updates``:
    the number of steps that a rollout batch of the run serves. ``num_threads``: with which the run was computed.
    ``primary``: its primary metric.
    """

    run: str
    at: int
    end: int
    checkpoint: int
    updates: int
    num_threads: int | None
    num_seeds: int
    primary: str
    futures: list[Future]

    @property
    def steps(self) -> int:
        """The number of steps of each future."""
        return self.end - self.at


@dataclass(frozen=True)
class Planned:
    """A checked plan, the recipe of the run, and that of each future by its name."""

    plan: WhatIfPlan
    recipe: Recipe
    recipes: Mapping[str, Recipe]


def write_plan(folder: Path, plan: WhatIfPlan) -> None:
    """Put the plan into the folder of the results."""
    write_json(folder / PLAN, asdict(plan))


def is_result(folder: str | Path) -> bool:
    """Return whether a folder holds results of what-if."""
    return kind_of_file(Path(folder) / PLAN) == "file"


def read_plan(folder: Path) -> WhatIfPlan:
    """Read the plan of a folder of results.

    Raises:
        UsageError: there is none. DataError: it is damaged.
    """
    try:
        plan = read_declared(folder / PLAN, WhatIfPlan)
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: there is no {PLAN}, so these are no results of what-if. Give their folder"
        ) from None
    if not plan.futures or not plan.futures[0].is_unchanged:
        raise DataError(folder / PLAN, "damaged: the unchanged future is not the first; delete the folder")
    for future in plan.futures:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", future.name):
            raise DataError(folder / PLAN, f"damaged: {future.name[:40]!r} is no name of a future")
    return plan


def future_folder(folder: Path, future: Future) -> Path:
    """Return the run directory of a future."""
    return folder / FUTURES / future.name


def plan_futures(run: Path, at: int, words: Sequence[str], steps: int | None, num_seeds: int) -> Planned:
    """Check what is asked for, and return what is to be played.

    Args:
        run: the folder of the run, which is only read.
        at: the step whose weights the futures begin with; what is changed acts from the step after on.
        words: changes, as ``parse_changes`` takes them.
        steps: of each future; by default 20, or as many as the run has left.
        num_seeds: futures of each change; the first has the seed of the run.

    Raises:
        UsageError: with what is wrong, and what would work.
    """
    directory = RunDirectory(run)
    if "dictionary" in directory.read_recipe():
        raise UsageError(f"{run}: this run trains a sparse autoencoder. Give a run of a language model")
    recipe = read_own_recipe(directory)
    if recipe.scale.processes > 1 or recipe.scale.launcher == "ray":
        raise UsageError(
            f"scale: {run} trains in several processes, whose sums a single one does not repeat. "
            "Give a run of one process"
        )
    changes = parse_changes(words)
    checkpoint, state = find_checkpoint(run, at)
    _check_state(directory, recipe, at, checkpoint, state)
    length = _length_of(recipe.train, state)
    end = _last_step(at, steps, length)
    plan = WhatIfPlan(
        run=str(run.resolve()),
        at=at,
        end=end,
        checkpoint=checkpoint,
        updates=recipe.train.updates_per_batch,
        num_threads=state.get("num_threads"),
        num_seeds=num_seeds,
        primary=directory.primary_metric().name,
        futures=[],
    )
    recipes: dict[str, Recipe] = {}
    for change in (Change(UNCHANGED), *changes):
        changed = recipe
        if change.overrides:
            changed = _change_recipe(directory, recipe, change, plan)
        _check_batch(change, plan, recipe.rollout, recipe.data)
        _check_reward(change, recipe.advantage)
        for seed in range(num_seeds):
            name = _name_of(change.label, seed, recipes)
            plan.futures.append(Future(name, change.label, seed, list(change.dropped), change.reward))
            recipes[name] = changed.with_seed(changed.train.seed + seed)
    if len(plan.futures) > MAX_FUTURES:
        raise UsageError(f"these are {len(plan.futures):,} futures, and at most {MAX_FUTURES:,} are played. Give fewer")
    if num_seeds > 1:
        _check_seeds(plan, changes, recipe.model)
    return Planned(plan, recipe, recipes)


def read_own_recipe(directory: RunDirectory) -> Recipe:
    """Return the recipe by which a run was trained; code that it names must be allowed.

    Raises:
        UsageError: it cannot be used by this version, or here.
    """
    stored = directory.read_recipe()
    recipe = validate_recipe(stored, str(directory.recipe_path), is_own=False).resolve()
    began = directory.as_it_began(recipe)
    assert isinstance(began, Recipe)
    return began


def find_checkpoint(run: Path, at: int) -> tuple[int, dict[str, Any]]:
    """Return the step and ``state.json`` of the newest checkpoint of step ``at`` or before that verifies.

    Raises:
        UsageError: there is none.
    """
    folder = run / "checkpoints"
    steps = checkpoint_steps(folder)
    problems = []
    for step in reversed([step for step in steps if step <= at]):
        path = step_folder(folder, step)
        try:
            verify(path, step)
            state = json.loads((path / "state.json").read_bytes())
        except (Unverified, OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        if isinstance(state, dict):
            return step, state
    later = [step for step in steps if step > at]
    if problems:
        raise UsageError(
            f"--at {at}: no checkpoint of {run} before it is whole ({'; '.join(problems)}). Give a later step"
        )
    if not later:
        raise UsageError(f"--at {at}: {run} has no checkpoint. Train it with --train.save_every, then give a step")
    raise UsageError(
        f"--at {at}: {run} has no checkpoint of step {at} or before; the first is of step {later[0]}. Give --at "
        f"{later[0]} or more. A run keeps its last checkpoints (train.keep_checkpoints) and the best"
    )


def _check_state(directory: RunDirectory, recipe: Recipe, at: int, checkpoint: int, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that was made by another recipe or by several processes."""
    if state.get("processes", 1) != 1:
        raise UsageError(
            f"--at {at}: the checkpoint of step {checkpoint} was saved by {state['processes']} processes, whose sums a "
            "single one does not repeat. Give a run of one process"
        )
    settings = state.get("settings")
    if not isinstance(settings, Mapping):
        return
    changed = directory.changed_keys(recipe, settings)
    if hard_changes(changed) or (changed and recipe.train.schedule != "constant"):
        lines = "; ".join(changed_lines(changed))
        raise UsageError(
            f"--at {at}: {directory.folder} went on with another recipe than at step {checkpoint} ({lines}). Give a "
            "step after the change"
        )


def _length_of(train: TrainSection, state: Mapping[str, Any]) -> int:
    """Return the number of steps of the run."""
    length = train.steps
    if length is None:
        length = state.get("steps")
    if not isinstance(length, int):
        raise UsageError("train.num_epochs: the checkpoint does not say how many steps they are. Resume the run once")
    return length


def _last_step(at: int, steps: int | None, length: int) -> int:
    """Return the last step that is played.

    Raises:
        UsageError: it is behind the end of the run, whose schedule knows no such step.
    """
    left = length - at
    if left < 1:
        raise UsageError(f"--at {at}: the run ends at step {length}, so nothing follows. Give a step below {length}")
    if steps is not None and steps > left:
        raise UsageError(
            f"--steps {steps}: the run ends at step {length}, {left} after step {at}. Give {left} or fewer"
        )
    return at + min(steps or NUM_STEPS, left)


def _change_recipe(directory: RunDirectory, recipe: Recipe, change: Change, plan: WhatIfPlan) -> Recipe:
    """Return the recipe with the change.

    Raises:
        UsageError: the key is none, may not change, or has this value already.
    """
    from posttrain.training.checks import resolve_components  # it takes the components, which a plain reading does not

    changed = load_recipe(str(directory.recipe_path), change.overrides).resolve()
    began = directory.as_it_began(changed)
    assert isinstance(began, Recipe)
    if "train.skip_zero_rows" in [key for key, _ in change.overrides]:
        began = changed
    resolve_components(began)
    keys = directory.changed_keys(began, recipe.dump())
    if not keys:
        typed = [key for key, _ in change.overrides]
        if all(is_place(key) for key in typed):
            raise RecipeError(
                f"{change.label}: this says where or how a run works, and changes no number of it. Leave it out"
            )
        raise RecipeError(f"{change.label}: the run has this value already, so nothing would change. Give another")
    for key in keys:
        _check_key(key, change.label)
    _check_parts(recipe, began, change.label, plan)
    return began


def _check_key(key: str, label: str) -> None:
    if any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED):
        raise RecipeError(
            f"{label}: {key} may not change: it decides what the checkpoint holds, and the weights go on from there. "
            "Train another run with it"
        )
    if key in WITHOUT_EFFECT:
        raise RecipeError(f"{label}: {key} says what a run saves, and changes no number of a future. Leave it out")


def _check_parts(recipe: Recipe, changed: Recipe, label: str, plan: WhatIfPlan) -> None:
    """Refuse a recipe for which the checkpoint lacks something."""
    heads = [(traits_of("objective", one.objective.name) or {}).get("head") for one in (recipe, changed)]
    if heads[0] != heads[1]:
        raise RecipeError(
            f"{label}: the objective has another head than the run, which the checkpoint has not. Give another"
        )
    if changed.model.init is not None and changed.train.seed != recipe.train.seed:
        raise RecipeError(
            f"{label}: model.init draws the first weights by the seed, so they would be others. Leave it out"
        )
    length = changed.train.steps
    if length is not None and length < plan.end:
        raise RecipeError(f"{label}: the futures end at step {plan.end}. Give {plan.end} or more")
    updates = changed.train.updates_per_batch
    if updates != plan.updates and (plan.at % updates or plan.at % plan.updates):
        raise RecipeError(
            f"{label}: a rollout batch then serves {updates} steps instead of {plan.updates}, and one is in use after "
            f"step {plan.at}. Give an --at that both divide, such as {_next_multiple(plan.at, updates * plan.updates)}"
        )


def _next_multiple(at: int, divisor: int) -> int:
    return -(-at // divisor) * divisor


def _check_batch(change: Change, plan: WhatIfPlan, rollout: RolloutSection | None, data: DataSection | None) -> None:
    """Refuse a change of a batch that the step after ``at`` does not draw, as far as the recipe's sections say.

    Raises:
        UsageError: with the first number that is too large.
    """
    if not change.dropped and change.reward is None:
        return
    first = plan.at + 1
    if plan.at % plan.updates:
        begun = plan.at - plan.at % plan.updates
        raise UsageError(
            f"{change.label}: step {first} goes on with the rollout batch of step {begun + 1}. Give --at {begun}, or "
            f"--at {begun + plan.updates}"
        )
    if rollout is None:
        if change.reward is not None:
            raise UsageError(f"{change.label}: {plan.run} trains on data, which have no rewards. Drop a prompt instead")
        assert data is not None
        num_prompts = data.batch_size
    else:
        num_prompts = rollout.num_prompts
        if rollout.drop_uniform_groups:
            num_prompts *= rollout.max_rounds
    prompts = list(change.dropped)
    if change.reward is not None:
        prompts.append(change.reward[0])
    if max(prompts) >= num_prompts:
        raise UsageError(
            f"{change.label}: step {first} has {num_prompts} prompts. Give one from 0 to {num_prompts - 1}"
        )
    if len(change.dropped) == num_prompts:
        raise UsageError(f"{change.label}: step {first} has no other prompt, so nothing would be trained. Keep one")
    if change.reward is not None and rollout is not None and change.reward[1] >= rollout.group_size:
        size = rollout.group_size
        raise UsageError(f"{change.label}: each prompt of the run has {size} answers. Give one from 0 to {size - 1}")


def _check_reward(change: Change, advantage: Component | None) -> None:
    """Refuse another reward where the advantage reads no sum of rewards."""
    if change.reward is None or advantage is None:
        return
    traits = traits_of("advantage", advantage.name)
    if traits is not None and traits.get("level") == "parts":
        raise UsageError(
            f"{change.label}: advantage {advantage.name!r} reads each reward by itself, and no sum. Drop a prompt "
            "instead"
        )


def _check_seeds(plan: WhatIfPlan, changes: Sequence[Change], model: ModelSection) -> None:
    """Refuse further seeds where they would change nothing, or too much.

    Raises:
        UsageError: with the reason.
    """
    if plan.steps <= plan.updates:
        raise UsageError(
            f"--seeds {plan.num_seeds}: the first rollout batch is the same for every seed, and it serves all of the "
            f"{plan.steps} steps. Give more --steps, or one seed"
        )
    if model.init is not None:
        raise UsageError(
            f"--seeds {plan.num_seeds}: model.init draws the first weights by the seed, so they would be others. "
            "Give one seed"
        )
    for change in changes:
        if any(key == "train.seed" for key, _ in change.overrides):
            raise UsageError(f"{change.label}: --seeds gives seeds of its own. Give one of the two")


def _name_of(label: str, seed: int, taken: Mapping[str, object]) -> str:
    """Return a name for the folder of a future."""
    end = ""
    if seed:
        end = f"-seed{seed}"
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", label).strip("-.")[: MAX_NAME_CHARS // 2] or "change"
    name = f"{plain}{end}"
    count = 2
    while name in taken:
        name = f"{plain}-{count}{end}"
        count += 1
    return name


def explain_change(future: Future) -> str:
    """Return the label of a future for a table, with its seed."""
    if not future.seed:
        return future.label
    return f"{future.label}, seed +{future.seed}"
