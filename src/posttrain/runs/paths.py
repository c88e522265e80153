"""Names of runs under a runs folder, and the way from a name to a folder that may be changed.

A name is a path relative to the runs folder: ``tiny-grpo``, a sweep ``sweep-ppo``, or one of its runs,
``sweep-ppo/start`` and ``sweep-ppo/cells/ppo-seed0``. Code that changes or deletes something calls ``locate``, which
never leads out of the runs folder: names are checked part by part, and a folder that is a symbolic link is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.models.published.catalog import PUBLISHED, is_gguf
from posttrain.models.sources import looks_local, refuse_out_of_reach
from posttrain.option_types import shorten
from posttrain.recipes.document import recipe_names
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.registry import suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME, folders_with, list_names, run_names
from posttrain.untrusted import kind_of_file

TRIALS = "cells"
START = "start"
PLAN = "sweep.yaml"  # makes a folder a sweep
_PATTERN = "*?["
_NUM_NAMED = 8  # runs in a message


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """A run or a sweep: its name under the runs folder, and its folder."""

    name: str
    path: Path
    is_sweep: bool = False


def started_sweeps(root: str | Path) -> list[str]:
    """Return the names of the sweeps under ``root``, in alphabetical order."""
    return folders_with(root, PLAN)


def trial_names(root: str | Path, sweep: str) -> list[str]:
    """Return the names of the runs of a sweep: its start, if there is one, and its cells."""
    folder = Path(root) / sweep
    start = []
    if (folder / START / "recipe.yaml").is_file():
        start = [f"{sweep}/{START}"]
    return start + [f"{sweep}/{TRIALS}/{name}" for name in run_names(folder / TRIALS)]


def every_run_name(root: str | Path) -> list[str]:
    """Return the names of all runs under ``root``, those of sweeps included."""
    names = run_names(root)
    for sweep in started_sweeps(root):
        names += trial_names(root, sweep)
    return names


def sweep_of(folder: Path) -> Path | None:
    """Return the sweep that a run belongs to, or None."""
    if folder.parent.name == TRIALS:
        above = folder.parent.parent
    elif folder.name == START:
        above = folder.parent
    else:
        above = None
    if above is not None and (above / PLAN).is_file():
        return above
    return None


def locate(root: str | Path, name: str) -> NamedFolder:
    """Return the run or sweep called ``name``, for changing or deleting it.

    The name may begin with the runs folder itself, as a shell completes it (``runs/tiny-grpo/``).

    Raises:
        UsageError: a name that could lead elsewhere, a link, or nothing of that name.
    """
    folder = Path(root)
    sweeps = started_sweeps(root)
    known = [*every_run_name(root), *sweeps]
    relative = name.rstrip("/")
    if relative not in known and PurePosixPath(relative).is_relative_to(folder.as_posix()):
        relative = PurePosixPath(relative).relative_to(folder.as_posix()).as_posix()
    if not all(RUN_NAME.fullmatch(part) for part in relative.split("/")):
        raise UsageError(
            f"{shorten(name)}: a run's name is made of {NAME_RULE}, with '/' between a sweep and its runs. "
            f"Nothing outside of {folder} is touched; --runs-dir names another folder of runs"
        )
    path = folder
    for part in relative.split("/"):
        path = path / part
        if path.is_symlink():
            raise UsageError(
                f"{path}: this is a link to another place, and only what lies in {folder} is changed. "
                "Work on the folder that it leads to, with --runs-dir"
            )
    if relative not in known:
        raise UsageError(f"there is no run {shorten(name)} in {folder}.{suggest(relative, known)} {list_names(known)}")
    return NamedFolder(relative, path, is_sweep=relative in sweeps)


def locate_all(root: str | Path, names: Sequence[str]) -> list[NamedFolder]:
    """Return the runs and sweeps called so, each once; ``tiny-*`` stands for every run and sweep that fits.

    Raises:
        UsageError: as ``locate``, or a pattern that nothing fits.
    """
    places: dict[str, NamedFolder] = {}
    for name in names:
        matching = [name]
        if any(sign in name for sign in _PATTERN):
            known = [*every_run_name(root), *started_sweeps(root)]
            matching = [known_name for known_name in known if fits(known_name, name)]
            if not matching:
                raise UsageError(f"nothing in {root} fits {shorten(name)}. {list_names(known)}; give a name of one")
        for exact in matching:
            place = locate(root, exact)
            places.setdefault(place.name, place)
    return list(places.values())


def refuse_absent(root: str | Path, name: str, *, may_be_file: bool = False) -> None:
    """Refuse the name of a model that is no run and no folder, and that neither the hub nor its cache can give.

    No library that loads models is imported for that. What is there is judged by the code that opens it.

    Raises:
        UsageError: with the runs that there are.
    """
    path = Path(name)
    inside = name.rstrip("/").removeprefix(f"{Path(root)}/")
    if inside in started_sweeps(root):
        trials = trial_names(root, inside)
        if trials:
            raise UsageError(f"{shorten(name)} is a sweep; name one of its runs. {list_names(trials)}")
    if name in PUBLISHED or is_gguf(path):
        return
    if kind_of_file(path) == "file" and not may_be_file:
        raise UsageError(
            f"{shorten(name)} is a file; give a model's folder, a hub name, or a run (of a recipe: train it)"
        )
    if name in ("", *EMBEDDED_MODELS) or kind_of_file(path.expanduser()) != "nothing":
        return
    if any(kind_of_file(place / "recipe.yaml") == "file" for place in (Path(root) / name, *path.parents)):
        return
    if looks_local(name) or name.startswith(f"{Path(root)}/"):
        known = every_run_name(root)
        near = suggest(name.removeprefix(f"{Path(root)}/"), known)
        raise UsageError(f"{shorten(name)}: no such run or folder.{near} {list_names(known)}")
    if name in recipe_names():
        raise UsageError(f"{shorten(name)} is a recipe; train it, and give the run")
    if name in registry.names("task"):
        raise UsageError(f"{shorten(name)} is a task, and no model; a task is given by --task")
    hint = suggest(name, [*EMBEDDED_MODELS, *PUBLISHED])
    try:
        refuse_out_of_reach(name)
    except UsageError as error:
        raise UsageError(f"{error}.{hint}") from None


def fits(name: str, pattern: str) -> bool:
    """Return whether a name fits a shell pattern; ``*`` does not reach into a sweep."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def runs_of(root: str | Path, place: NamedFolder) -> list[NamedFolder]:
    """Return the runs that a place stands for: itself, or those of the sweep."""
    if place.is_sweep:
        return [locate(root, name) for name in trial_names(root, place.name)]
    return [place]


def locate_run(root: str, name: str) -> NamedFolder:
    """Return a run; a sweep is refused.

    Raises:
        UsageError: no such run.
    """
    place = locate(root, name)
    if place.is_sweep:
        runs = ", ".join(run.name for run in runs_of(root, place)[:_NUM_NAMED])
        raise UsageError(f"{name} is a sweep; name one of its runs: {runs}")
    return place
