"""A model by name: of a run, of one of its checkpoints, or any name of a model."""

from __future__ import annotations

from pathlib import Path

from posttrain import __version__
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe, stored_recipe
from posttrain.runs.directory import RunDirectory, find_run
from posttrain.sampling.models import ModelSource, checkpoint_of
from posttrain.untrusted import kind_of_file


def read_run_recipe(folder: Path) -> Recipe:
    """The resolved recipe of a run, which allows no code (``recipe.stored_recipe``).

    Raises:
        DataError, RecipeError: it cannot be read, or this version does not know its keys.
    """
    run = RunDirectory(folder)
    try:
        return stored_recipe(run.read_recipe(), str(run.recipe_path))
    except RecipeError as error:
        made_by = run.made_by()
        if made_by in (None, __version__):
            raise
        raise RecipeError(f"{error} (posttrain {made_by} made this run; this is {__version__})") from None


def find_source(name: str, runs_dir: str | Path) -> ModelSource:
    """A model by the name of a run, the path of a run or of one of its checkpoints, or any name of a model.

    Raises:
        UsageError: a run without a recipe that can be read, or without that checkpoint.
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
            raise UsageError(f"{name}: the run {run} has no such checkpoint. There: {there}")
        label = f"{run.resolve().name}@{path.relative_to(checkpoint.parent)}"
        return ModelSource(name, label, str(path), run, read_run_recipe(run))
    return ModelSource(name, name, name)
