"""``posttrain train``: from a recipe's name to a run directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from posttrain import registry
from posttrain.api.inputs import Override
from posttrain.api.training import inert_lines, read_recipe, write_run_summary
from posttrain.data.base import build_task, eval_components
from posttrain.errors import INTERRUPTED, DataNotThere, MissingExtra, UsageError
from posttrain.models.sources import is_missing
from posttrain.recipes.eval_section import EvalSection
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, DataSection, task_components
from posttrain.runs.directory import check_run_name
from posttrain.runs.launch import RunStart, launch
from posttrain.runs.processes import follow, is_follower
from posttrain.store.metrics import TrackedRun, build_trackers
from posttrain.terminal.training_progress import choose_progress
from posttrain.untrusted import harmless


def run_train(arguments: argparse.Namespace) -> int:
    """Check the recipe, train, draw the curves and write the report."""
    recipe = check_recipe(arguments.recipe, arguments.overrides)
    check_run_name(arguments.run or "run")
    if arguments.memory and not arguments.dry_run:
        raise UsageError("--memory needs --dry-run, which prints the recipe without training")
    if arguments.gpu_memory is not None and not arguments.memory:
        raise UsageError("--gpu-memory needs --memory; add --dry-run --memory")
    if arguments.dry_run:
        if arguments.resume or arguments.accept_changes:
            raise UsageError("--dry-run cannot resume; remove --resume and --accept-changes")
        check_data(recipe.task, recipe.eval, recipe.data)
        check_tools(recipe.environment, recipe.tools or (), recipe.rewards)
        check_packages(recipe)
        print(f"# {arguments.recipe}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        tell_missing([recipe])
        for line in inert_lines(recipe):
            _note(line)
        if arguments.memory:
            _print_memory(recipe, arguments.gpu_memory)
        return 0
    return train_recipe(recipe, start_of(arguments), quiet=arguments.quiet)


def start_of(arguments: argparse.Namespace) -> RunStart:
    """Build run location and start options from command line arguments of ``train`` or ``sae train``."""
    return RunStart(arguments.runs_dir, arguments.run, arguments.recipe, arguments.resume, arguments.accept_changes)


def check_recipe(name: str, overrides: Sequence[Override]) -> Recipe:
    """Resolve the recipe; print replaced options on stderr.

    Raises:
        UsageError: see ``read_recipe``.
    """
    recipe, notes = read_recipe(name, overrides)
    for line in notes:
        _note(line)
    return recipe


def train_recipe(recipe: Recipe, start: RunStart, *, quiet: bool) -> int:
    """Train a checked recipe in a run directory, print the location, and return the exit code."""
    if is_follower():  # torchrun started multiple copies; rank 0 reports
        return follow()
    with choose_progress(start.recipe_name, quiet) as progress:
        result = launch(recipe, start, observer=progress, summarize=write_run_summary)
    print(f"run:    {result.folder}")
    if not quiet:
        print(f"report: {result.folder / 'report.html'}")
        if not recipe.trains_scorer:
            print(f"ask it: posttrain generate {result.folder}")
    if result.reason == "finished":
        return 0
    return INTERRUPTED


def check_data(trained: Component, evaluation: EvalSection, data: DataSection | None) -> None:
    """Read all task files in a recipe, as training would; print notes on stderr.

    Raises:
        DataError: an invalid file or row.
        UsageError: conversations without trained tokens.
    """
    from posttrain.data.reading import HUB
    from posttrain.data.render.rows import refuse_untrained

    components = {"task": trained}
    lines = dict[str, None]()
    if evaluation.every:
        evaluated = eval_components(trained, evaluation.tasks)
        components |= {f"eval.tasks.{i}": component for i, component in enumerate(evaluated)}
    for key, named in components.items():
        paths = [
            str(component.options["path"])
            for component in task_components(named)
            if component.options.get("path") is not None
        ]
        if not paths or any(path.startswith(HUB) for path in paths):
            continue
        try:
            task = build_task(named, key)
            if key == "task" and data is not None:
                refuse_untrained(task.name, task.examples, data.train_on or "assistant")
            lines |= dict.fromkeys(task.warnings)
        except (DataNotThere, MissingExtra) as error:
            lines[f"{key}: {error}"] = None
    for line in lines:
        _note(line)


def check_tools(environment: Component | None, tools: Sequence[Component], rewards: Sequence[Component]) -> None:
    """Create the recipe's environment and tools once, as training would.

    Raises:
        UsageError: unusable tools, or missing reward inputs.
    """
    if environment is not None or tools:
        from posttrain.sampling.environments.contract import build_toolset, refuse_unpaid

        toolset = build_toolset(environment, tools)
        toolset.close()
        refuse_unpaid(toolset, [reward.name for reward in rewards])


def check_packages(recipe: Recipe) -> None:
    """Create the recipe's trackers, without starting them, and find its optimizer's package, as training would.

    Raises:
        MissingExtra: a package is not installed.
        UsageError: a tracker that cannot be used as given.
    """
    build_trackers(recipe.track, TrackedRun(Path(), recipe.dump(), _note))
    traits = registry.traits_of("optimizer", recipe.optimizer.name) or {}
    package = traits.get("package")
    if isinstance(package, str) and find_spec(package) is None:
        raise MissingExtra(package, str(traits["extra"]), f"optimizer: {recipe.optimizer.name}")


def tell_missing(recipes: Iterable[Recipe], made: Path | None = None) -> None:
    """Print missing models and runs on stderr, since a dry run does not train them.

    ``made``: folder for runs of prerequisite recipes.
    """
    begins_with: dict[str, str] = {}
    for recipe in recipes:
        if recipe.model.init is None:
            begins_with[recipe.model.name] = "model.name"
        if recipe.teacher is not None:
            begins_with[recipe.teacher.name] = "teacher.name"
        runs = {f"rewards.{i}.run": reward.options.get("run") for i, reward in enumerate(recipe.rewards)}
        begins_with |= {run: key for key, run in runs.items() if isinstance(run, str)}
    for name, key in begins_with.items():
        will_be = made is not None and Path(name).absolute().is_relative_to(made.absolute())
        if is_missing(name) and not will_be:
            _note(f"{key}: missing folder {name}; create it before training")


def _note(text: str) -> None:
    print(harmless(f"note: {text}"), file=sys.stderr)


def _print_memory(recipe: Recipe, gpu_gib: int | None) -> None:
    """Print a memory estimate on stderr, keeping stdout a valid recipe.

    ``gpu_gib``: GPU memory to plan for, in GiB; None to plan for this machine.
    """
    from posttrain.terminal.console import show_bytes
    from posttrain.training.memory import estimate_memory  # takes transformers, which a dry run else does without

    gpu_bytes = None
    where = ""
    if gpu_gib is not None:
        gpu_bytes = gpu_gib * 2**30
        where = f" with a GPU of {gpu_gib} GiB"
    estimate = estimate_memory(recipe, gpu_bytes)
    if isinstance(estimate, str):
        print(harmless(f"memory: no estimate: {estimate}"), file=sys.stderr)
        return
    who = "one process"
    if recipe.scale.processes > 1:
        who = f"each of {recipe.scale.processes} processes"
    about = "an estimate (explained in docs/how-to/fit-in-memory.md)"
    print(f"memory of {who}{where}, {about}:", file=sys.stderr)
    for name, num_bytes in estimate.rows():
        if num_bytes:
            print(f"  {name:<20}{show_bytes(num_bytes):>10}", file=sys.stderr)
