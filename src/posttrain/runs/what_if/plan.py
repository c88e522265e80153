"""Plan a what-if: the run, the step, the preceding checkpoint, and the futures with their recipes.

Plans are checked before anything is computed, and stored as ``what-if.json`` in the results folder. Each future is a
run directory under ``futures``.
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
from posttrain.recipes.other_models import TeacherSection
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.recipes.reference_sections import ReferenceSection
from posttrain.recipes.sections import Component, DataSection, ModelSection, RolloutSection, TrainSection
from posttrain.registry import traits_of
from posttrain.runs.directory import MAX_NAME_CHARS, RunDirectory
from posttrain.runs.resume import ChangedKeys, changed_lines, hard_changes
from posttrain.runs.what_if.changes import Change, parse_changes
from posttrain.store.checkpoint_files import Unverified, checkpoint_steps, step_folder, verify
from posttrain.store.durable import write_json
from posttrain.store.reading import read_declared
from posttrain.untrusted import kind_of_file

PLAN = "what-if.json"
FUTURES = "futures"
START = "start"
UNCHANGED = "unchanged"
NUM_STEPS = 20  # default length, unless the run ends earlier
MAX_FUTURES = 1000
# Keys that determine checkpoint contents and therefore cannot change.
FIXED = ("model", "head", "optimizer.name")
# Keys that only affect which files a run writes, so changing them has no effect.
WITHOUT_EFFECT = ("train.save_every", "train.keep_checkpoints", "eval.best")


@dataclass(frozen=True, slots=True)
class Future:
    """One future: folder ``name``, change, and seed offset.

    ``seed``: 0 keeps the run's seed. ``dropped`` and ``reward``: see ``Change``.
    """

    name: str
    label: str
    seed: int = 0
    dropped: list[int] = field(default_factory=list)
    reward: tuple[int, int, float] | None = None

    @property
    def is_unchanged(self) -> bool:
        """True for the unchanged recipe, with any seed."""
        return self.label == UNCHANGED


@dataclass(frozen=True, slots=True)
class WhatIfPlan:
    """The futures of ``run`` (a folder) after step ``at``.

    ``checkpoint``: step of the checkpoint they start from. ``end``: last step to play. ``updates``: training steps per
    rollout batch. ``num_threads``: thread count used by the run. ``primary``: the run's primary metric.
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
        """Steps per future."""
        return self.end - self.at


@dataclass(frozen=True)
class Planned:
    """A checked plan, the run's recipe, and the futures' recipes by name."""

    plan: WhatIfPlan
    recipe: Recipe
    recipes: Mapping[str, Recipe]


def write_plan(folder: Path, plan: WhatIfPlan) -> None:
    """Write the plan to the results folder."""
    write_json(folder / PLAN, asdict(plan))


def is_result(folder: str | Path) -> bool:
    """Check if a folder contains what-if results."""
    return kind_of_file(Path(folder) / PLAN) == "file"


def read_plan(folder: Path) -> WhatIfPlan:
    """Read the plan from a results folder.

    Raises:
        UsageError: missing. DataError: damaged.
    """
    try:
        plan = read_declared(folder / PLAN, WhatIfPlan)
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: no {PLAN}, so this is not a results folder. Give the output folder of what-if"
        ) from None
    if not plan.futures or not plan.futures[0].is_unchanged:
        raise DataError(folder / PLAN, "damaged: the unchanged future must come first; delete the folder")
    for future in plan.futures:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", future.name):
            raise DataError(folder / PLAN, f"damaged: {future.name[:40]!r} is an invalid future name")
    return plan


def future_folder(folder: Path, future: Future) -> Path:
    """Build the path to a future's run directory."""
    return folder / FUTURES / future.name


def plan_futures(run: Path, at: int, words: Sequence[str], steps: int | None, num_seeds: int) -> Planned:
    """Validate the request and plan the futures.

    Args:
        run: folder of the run, read only.
        at: step whose weights the futures start from. Changes take effect from the next step.
        words: changes, see ``parse_changes``.
        steps: steps per future; default: 20, or the remaining steps if fewer.
        num_seeds: futures per change; the first uses the run's seed.

    Raises:
        UsageError: explains the problem, and suggests a fix.
    """
    directory = RunDirectory(run)
    if "dictionary" in directory.read_recipe():
        raise UsageError(f"{run}: this run trains a sparse autoencoder. Give a language model run")
    recipe = read_own_recipe(directory)
    if recipe.scale.processes > 1 or recipe.scale.launcher == "ray":
        raise UsageError(
            f"scale: {run} trains in several processes, and a single process cannot reproduce their sums exactly. "
            "Give a single-process run"
        )
    changes = parse_changes(words)
    checkpoint, state = find_checkpoint(run, at)
    _check_processes(state, at, checkpoint)
    settings = state.get("settings")
    if isinstance(settings, Mapping):
        since = f"--at {at}: the recipe of {directory.folder} changed after step {checkpoint}"
        _check_changes(directory.changed_keys(recipe, settings), recipe.train.schedule, since)
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
        raise UsageError(f"too many futures: {len(plan.futures):,}, limit {MAX_FUTURES:,}. Give fewer")
    if num_seeds > 1:
        _check_seeds(plan, changes, recipe.model)
    return Planned(plan, recipe, recipes)


def read_own_recipe(directory: RunDirectory) -> Recipe:
    """Load the recipe that trained a run. Code named in it must be allowed.

    Raises:
        UsageError: this version or machine cannot use it.
    """
    stored = directory.read_recipe()
    recipe = validate_recipe(stored, str(directory.recipe_path), is_own=False).resolve()
    began = directory.as_it_began(recipe)
    assert isinstance(began, Recipe)
    return began


def find_checkpoint(run: Path, at: int) -> tuple[int, dict[str, Any]]:
    """Find the newest verified checkpoint at or before step ``at``; returns its step and ``state.json``.

    Raises:
        UsageError: no such checkpoint.
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
            f"--at {at}: all earlier checkpoints in {run} are damaged ({'; '.join(problems)}). Give a later step"
        )
    if not later:
        raise UsageError(f"--at {at}: {run} has no checkpoints. Retrain with --train.save_every, then give a step")
    raise UsageError(
        f"--at {at}: {run} has no checkpoint up to step {at}; the first is at step {later[0]}. Give --at {later[0]} or "
        "more. Runs keep the last checkpoints (train.keep_checkpoints) and the best"
    )


def _check_processes(state: Mapping[str, Any], at: int, checkpoint: int) -> None:
    """Refuse checkpoints saved by several processes."""
    if state.get("processes", 1) != 1:
        raise UsageError(
            f"--at {at}: the checkpoint at step {checkpoint} was saved by {state['processes']} processes, and a single "
            "process cannot reproduce their sums exactly. Give a single-process run"
        )


def _check_changes(changed: ChangedKeys, schedule: str, since: str) -> None:
    """Refuse checkpoints saved by a different recipe; ``since`` says where."""
    if hard_changes(changed) or (changed and schedule != "constant"):
        lines = "; ".join(changed_lines(changed))
        raise UsageError(f"{since} ({lines}). Give a step after the change")


def _length_of(train: TrainSection, state: Mapping[str, Any]) -> int:
    """Determine the run's total number of steps."""
    length = train.steps
    if length is None:
        length = state.get("steps")
    if not isinstance(length, int):
        raise UsageError("train.num_epochs: the checkpoint lacks the number of steps. Resume the run once to record it")
    return length


def _last_step(at: int, steps: int | None, length: int) -> int:
    """Determine the last step to play.

    Raises:
        UsageError: beyond the end of the run, for which the schedule is undefined.
    """
    left = length - at
    if left < 1:
        raise UsageError(f"--at {at}: the run ends at step {length}, so no steps remain. Give a step below {length}")
    if steps is not None and steps > left:
        raise UsageError(
            f"--steps {steps}: the run ends at step {length}, {left} after step {at}. Give {left} or fewer"
        )
    return at + min(steps or NUM_STEPS, left)


def _change_recipe(directory: RunDirectory, recipe: Recipe, change: Change, plan: WhatIfPlan) -> Recipe:
    """Apply the change to the recipe.

    Raises:
        UsageError: unknown or fixed key, or the value is unchanged.
    """
    from posttrain.training.checks import resolve_components  # deferred import: it loads all components

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
                f"{change.label}: this key only affects where or how a run executes, never its results. Omit it"
            )
        raise RecipeError(
            f"{change.label}: this is already the run's value, so nothing would change. Give a different value"
        )
    for key in keys:
        _check_key(key, change.label)
    _check_head(recipe.objective, began.objective, change.label)
    before = _state_of(recipe.train, recipe.reference, recipe.teacher)
    _check_state(before, _state_of(began.train, began.reference, began.teacher), change.label)
    if began.model.init is not None and began.train.seed != recipe.train.seed:
        raise RecipeError(
            f"{change.label}: with model.init, the seed determines the initial weights, so they would differ. Omit it"
        )
    _check_length(began.train, change.label, plan)
    return began


def _check_key(key: str, label: str) -> None:
    if any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED):
        raise RecipeError(
            f"{label}: {key} cannot change, because it determines the checkpoint's contents. Train a new run with "
            "this value"
        )
    if key in WITHOUT_EFFECT:
        raise RecipeError(f"{label}: {key} only controls which files are saved, never a future's results. Omit it")


def _check_head(before: Component, after: Component, label: str) -> None:
    """Refuse an objective whose head the checkpoint lacks."""
    heads = [(traits_of("objective", one.name) or {}).get("head") for one in (before, after)]
    if heads[0] != heads[1]:
        raise RecipeError(
            f"{label}: the checkpoint lacks the head required by this objective. Give a different objective"
        )


def _check_state(before: Mapping[str, object], after: Mapping[str, object], label: str) -> None:
    """Refuse averages, a moving reference or trained weights other than the checkpoint's."""
    for key, state in after.items():
        if state != before[key]:
            raise RecipeError(
                f"{label}: {key} cannot change, because it determines the checkpoint's contents. Train a new run with "
                "this value"
            )


def _state_of(
    train: TrainSection, reference: ReferenceSection | None, teacher: TeacherSection | None
) -> dict[str, object]:
    """List what a checkpoint contains besides the model, by the key that decides it."""
    frozen: list[tuple[str, bool]] = []
    if 0 in train.lr_ratios.values():  # the first pattern that matches applies
        frozen = [(pattern, ratio == 0) for pattern, ratio in train.lr_ratios.items()]
    return {
        "train.ema_decay": train.ema_decay is not None,
        "train.lr_ratios": frozen,
        "reference": reference is not None,
        "teacher": teacher is not None and teacher.weights == "ema",
    }


def _check_length(train: TrainSection, label: str, plan: WhatIfPlan) -> None:
    """Refuse a shorter run, and rollout batches that do not begin at the checkpoint."""
    if train.steps is not None and train.steps < plan.end:
        raise RecipeError(f"{label}: the futures end at step {plan.end}. Give {plan.end} or more")
    updates = train.updates_per_batch
    if updates != plan.updates and (plan.at % updates or plan.at % plan.updates):
        raise RecipeError(
            f"{label}: this changes the steps per rollout batch from {plan.updates} to {updates}, in the middle of a "
            f"batch. Give an --at divisible by both, such as {_next_multiple(plan.at, updates * plan.updates)}"
        )


def _next_multiple(at: int, divisor: int) -> int:
    return -(-at // divisor) * divisor


def _check_batch(change: Change, plan: WhatIfPlan, rollout: RolloutSection | None, data: DataSection | None) -> None:
    """Refuse prompt or answer indices outside the batch drawn at the step after ``at``.

    Raises:
        UsageError: names the range that exists.
    """
    if not change.dropped and change.reward is None:
        return
    first = plan.at + 1
    if plan.at % plan.updates:
        begun = plan.at - plan.at % plan.updates
        raise UsageError(
            f"{change.label}: step {first} reuses the rollout batch from step {begun + 1}. Give --at {begun}, or "
            f"--at {begun + plan.updates}"
        )
    if rollout is None:
        if change.reward is not None:
            raise UsageError(f"{change.label}: {plan.run} trains on a data set without rewards. Drop a prompt instead")
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
            f"{change.label}: step {first} has {num_prompts} prompts. Give an index from 0 to {num_prompts - 1}"
        )
    if len(change.dropped) == num_prompts:
        raise UsageError(f"{change.label}: this drops every prompt in step {first}. Keep at least one")
    if change.reward is not None and rollout is not None and change.reward[1] >= rollout.group_size:
        size = rollout.group_size
        raise UsageError(f"{change.label}: each prompt has {size} answers. Give an index from 0 to {size - 1}")


def _check_reward(change: Change, advantage: Component | None) -> None:
    """Refuse reward changes if the advantage does not use summed rewards."""
    if change.reward is None or advantage is None:
        return
    traits = traits_of("advantage", advantage.name)
    if traits is not None and traits.get("level") == "parts":
        raise UsageError(
            f"{change.label}: advantage {advantage.name!r} uses individual reward components instead of their sum. "
            "Drop a prompt instead"
        )


def _check_seeds(plan: WhatIfPlan, changes: Sequence[Change], model: ModelSection) -> None:
    """Refuse additional seeds if they would change nothing or too much.

    Raises:
        UsageError: explains why.
    """
    if plan.steps <= plan.updates:
        raise UsageError(
            f"--seeds {plan.num_seeds}: all seeds share the first rollout batch, which covers all {plan.steps} steps. "
            "Give more --steps, or a single seed"
        )
    if model.init is not None:
        raise UsageError(
            f"--seeds {plan.num_seeds}: with model.init, initial weights depend on the seed, so they would differ. "
            "Use a single seed"
        )
    for change in changes:
        if any(key == "train.seed" for key, _ in change.overrides):
            raise UsageError(f"{change.label}: conflicts with --seeds. Give only one")


def _name_of(label: str, seed: int, taken: Mapping[str, object]) -> str:
    """Generate a unique folder name for a future."""
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
    """Format a future's label and seed for tables."""
    if not future.seed:
        return future.label
    return f"{future.label}, seed +{future.seed}"
