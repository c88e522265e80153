"""Resolve model names: a run, a run's checkpoint, or any model name."""

from __future__ import annotations

from pathlib import Path

from posttrain import __version__
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe, stored_recipe
from posttrain.runs.directory import RunDirectory, find_run
from posttrain.sampling.models import ModelSource, checkpoint_of
from posttrain.untrusted import kind_of_file


def read_run_recipe(folder: Path) -> Recipe:
    """Load a run's resolved recipe without allowing code (``recipe.stored_recipe``).

    Raises:
        DataError, RecipeError: unreadable, or this version does not know its keys.
    """
    run = RunDirectory(folder)
    try:
        return stored_recipe(run.read_recipe(), str(run.recipe_path))
    except RecipeError as error:
        made_by = run.made_by()
        if made_by in (None, __version__):
            raise
        raise RecipeError(f"{error} (this run was created by posttrain {made_by}; this is {__version__})") from None


def find_source(name: str, runs_dir: str | Path) -> ModelSource:
    """Resolve a model by run name, run or checkpoint path, or any model name.

    Raises:
        UsageError: the run has no readable recipe, or no such checkpoint.
    """
    path = Path(name)
    if name and any(kind_of_file(place / name / "recipe.yaml") == "file" for place in (Path(runs_dir), Path())):
        run = find_run(runs_dir, name)
        return ModelSource(name, run.name, str(run), run, read_run_recipe(run))
    checkpoint = checkpoint_of(path)
    run = checkpoint.parent.parent
    if checkpoint.parent.name == "checkpoints" and (run / "recipe.yaml").is_file():
        if not path.is_dir():
            there = ", ".join(sorted(p.name for p in checkpoint.parent.iterdir() if p.is_dir())) or "none"
            raise UsageError(f"{name}: no such checkpoint in run {run}. Available: {there}")
        label = f"{run.resolve().name}@{path.relative_to(checkpoint.parent)}"
        return ModelSource(name, label, str(path), run, read_run_recipe(run))
    return ModelSource(name, name, name)
