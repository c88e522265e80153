"""Play futures: each continues from the same state with a modified recipe, like a resumed run.

The state at step ``at`` is computed once: load the preceding checkpoint, replay with the run's recipe, and save a
checkpoint under ``start``. Nothing is forked. Every future is set up from scratch in this process, after all imports,
so no future can affect another. Several processes share the work: whoever creates a future's checkpoint folder plays
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError, PosttrainError
from posttrain.models.forward.precision import with_threads
from posttrain.recipes.other_models import TeacherSection
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.runs.directory import RunDirectory, RunStatus, State, new_status
from posttrain.runs.what_if.plan import START, Future, WhatIfPlan, future_folder, read_plan
from posttrain.store.checkpoint_files import Unverified, discard_checkpoint, step_folder, verify
from posttrain.store.durable import storage_errors
from posttrain.store.reading import open_record
from posttrain.training.checkpoint import Checkpoint, load_checkpoint
from posttrain.training.files import RunFiles
from posttrain.training.loop import Loop, open_loop
from posttrain.training.sources.interventions import Intervention

RECIPE_NAME = "what-if"
NONFINITE = "nonfinite-"  # file name prefix for batches saved by a failed step
MAX_CACHE_BYTES = 1 << 36
ShouldStop = Callable[[], bool]


def make_start(folder: Path, plan: WhatIfPlan, recipe: Recipe) -> Path:
    """Save the state after step ``at`` as a checkpoint under ``folder/start``; returns that run directory.

    Raises:
        PosttrainError: unreadable checkpoint, or the replay failed.
    """
    start = folder / START
    files = RunFiles.within(start)
    source = step_folder(Path(plan.run) / "checkpoints", plan.checkpoint)
    copy = step_folder(files.checkpoints, plan.checkpoint)
    with storage_errors("the checkpoint", start):
        try:
            names = verify(source, plan.checkpoint)
        except Unverified as reason:
            raise CheckpointError(f"{source}: {reason}. It may have been deleted by an active run; try again") from None
        for name in [*names, "manifest.json"]:
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
    directory = RunDirectory(start)
    directory.write_recipe(recipe)
    copy_caches(Path(plan.run), start)
    if plan.checkpoint < plan.at:
        checkpoint = load_from(start, plan.checkpoint)
        with with_threads(plan.num_threads) if plan.num_threads else nullcontext():
            play(start, recipe, checkpoint, plan.at)
    return start


def load_from(run: Path, step: int) -> Checkpoint:
    """Load the checkpoint for a step. Raises CheckpointError if missing or damaged."""
    checkpoint = load_checkpoint(run / "checkpoints", step)
    assert checkpoint is not None, "a step was named"
    return checkpoint


def copy_caches(run: Path, target: Path) -> None:
    """Copy cached data set results and judge verdicts, so that futures reuse identical values."""
    with storage_errors("the caches of the run", target):
        for path in sorted([*run.glob("*.safetensors"), run / "judge.jsonl"]):
            if path.name.startswith(NONFINITE) or not path.is_file():
                continue
            with open_record(path, MAX_CACHE_BYTES) as source, (target / path.name).open("wb") as file:
                shutil.copyfileobj(source, file)


def play_all(folder: Path, should_stop: ShouldStop, tell: Callable[[Future, RunStatus], object]) -> None:
    """Play every future not yet claimed by another process; call ``tell`` for each completed one."""
    plan = read_plan(folder)
    for future in plan.futures:
        if should_stop():
            return
        run = future_folder(folder, future)
        try:
            (run / "checkpoints").mkdir()
        except FileExistsError:
            continue
        tell(future, play_future(folder, plan, future, should_stop))


def play_future(folder: Path, plan: WhatIfPlan, future: Future, should_stop: ShouldStop) -> RunStatus:
    """Play one future using the recipe in its folder; returns the final status.

    A failure affects only this future: it is recorded in status and log, and the remaining futures continue.
    """
    run = future_folder(folder, future)
    directory = RunDirectory(run)
    status = replace(new_status(plan.end, None), step=plan.at)
    directory.write_status(status)
    try:
        recipe = validate_recipe(directory.read_recipe(), str(directory.recipe_path), is_own=False).resolve()
        length = recipe.train.steps or plan.end
        status = replace(status, steps=length)
        directory.write_environment(RECIPE_NAME, recipe.fingerprint())
        copy_caches(folder / START, run)
        checkpoint = _taught_anew(load_from(folder / START, plan.at), recipe.teacher, folder / START)
        with with_threads(plan.num_threads) if plan.num_threads else nullcontext():
            step = _play_seeds(run, recipe, checkpoint, plan, future, should_stop)
        status = replace(status, state=_state_at_end(step, plan, length), step=step)
    except PosttrainError as error:
        status = replace(status, state="failed", message=f"{type(error).__name__}: {error}")
        directory.log(f"failed: {status.message}")
    directory.write_status(status)
    return status


def _state_at_end(step: int, plan: WhatIfPlan, length: int) -> State:
    """Choose a future's final state: ``stopped`` if its recipe has more steps and can be resumed."""
    if step < plan.end:
        return "interrupted"
    if step < length:
        return "stopped"
    return "finished"


def _taught_anew(checkpoint: Checkpoint, teacher: TeacherSection | None, start: Path) -> Checkpoint:
    """Clear the recorded teacher if the future uses a different one."""
    before = RunDirectory(start).read_recipe().get("teacher")
    name = None
    if isinstance(before, Mapping):
        name = before.get("name")
    if teacher is None or teacher.name == name:
        return checkpoint
    return replace(checkpoint, state={**checkpoint.state, "teacher": None})


def _play_seeds(
    run: Path, recipe: Recipe, checkpoint: Checkpoint, plan: WhatIfPlan, future: Future, should_stop: ShouldStop
) -> int:
    """Play a future to its end, with the run's seed for the first rollout batch; returns the last step."""
    intervention = None
    if future.dropped or future.reward is not None:
        rewards = {}
        if future.reward is not None:
            rewards = {(future.reward[0], future.reward[1]): future.reward[2]}
        intervention = Intervention(plan.at + 1, tuple(future.dropped), rewards)
    if future.seed:
        updates = recipe.train.updates_per_batch
        first = min(plan.end, plan.at + updates - plan.at % updates)
        began = recipe.with_seed(recipe.train.seed - future.seed)
        step = play(run, began, checkpoint, first, intervention, should_stop)
        if step < first:
            return step
        checkpoint = load_from(run, first)
        step = play(run, recipe, checkpoint, plan.end, None, should_stop)
        if step > first:
            discard_checkpoint(run / "checkpoints", first)
        return step
    return play(run, recipe, checkpoint, plan.end, intervention, should_stop)


def play(
    run: Path,
    recipe: Recipe,
    checkpoint: Checkpoint,
    end: int,
    intervention: Intervention | None = None,
    should_stop: ShouldStop = lambda: False,
) -> int:
    """Continue from a checkpoint to step ``end`` in a run directory, and save a checkpoint; returns the last step.

    Schedules and evaluations follow the recipe's number of steps, regardless of ``end``.

    Raises:
        PosttrainError: training failed.
    """
    directory = RunDirectory(run)

    def observe(event: str, info: dict[str, Any]) -> None:
        if event == "notice":
            directory.log(str(info["message"]))

    with open_loop(recipe, RunFiles.within(run), observe) as (loop, _):
        loop.restore(checkpoint)
        if loop.steps < end:
            raise CheckpointError(f"the recipe has {loop.steps} steps, but {end} were requested")
        loop.parts.source.intervention = intervention
        _go_on(loop, end, should_stop)
        if loop.step > checkpoint.step:
            loop.save()
        return loop.step


def _go_on(loop: Loop, end: int, should_stop: ShouldStop) -> None:
    if loop.unevaluated:
        loop.evaluate()
    while loop.step < end and not should_stop():
        loop.update()
        if loop.unevaluated:
            loop.evaluate()
