"""Run names under a runs folder, and their safe resolution to folders that may be changed.

A name is a path relative to the runs folder: ``tiny-grpo``, the sweep ``sweep-ppo``, or a run inside it,
``sweep-ppo/start`` and ``sweep-ppo/cells/ppo-seed0``. Code that changes or deletes files calls ``locate``, which never
leaves the runs folder: it checks every path component and refuses symbolic links.
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
PLAN = "sweep.yaml"  # marks a folder as a sweep
_PATTERN = "*?["
_NUM_NAMED = 8  # runs in a message


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """A run or sweep: its name under the runs folder, and its path."""

    name: str
    path: Path
    is_sweep: bool = False


def started_sweeps(root: str | Path) -> list[str]:
    """List sweeps under ``root`` alphabetically."""
    return folders_with(root, PLAN)


def trial_names(root: str | Path, sweep: str) -> list[str]:
    """List the runs in a sweep: the start run if present, then its trials."""
    folder = Path(root) / sweep
    start = []
    if (folder / START / "recipe.yaml").is_file():
        start = [f"{sweep}/{START}"]
    return start + [f"{sweep}/{TRIALS}/{name}" for name in run_names(folder / TRIALS)]


def every_run_name(root: str | Path) -> list[str]:
    """List all run names under ``root``, including runs in sweeps."""
    names = run_names(root)
    for sweep in started_sweeps(root):
        names += trial_names(root, sweep)
    return names


def sweep_of(folder: Path) -> Path | None:
    """Find the sweep that contains a run; None for standalone runs."""
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
    """Locate the run or sweep ``name`` for modification.

    The name may include the runs folder, as shell completion adds it (``runs/tiny-grpo/``).

    Raises:
        UsageError: the name could lead elsewhere, is a link, or does not exist.
    """
    folder = Path(root)
    sweeps = started_sweeps(root)
    known = [*every_run_name(root), *sweeps]
    relative = name.rstrip("/")
    if relative not in known and PurePosixPath(relative).is_relative_to(folder.as_posix()):
        relative = PurePosixPath(relative).relative_to(folder.as_posix()).as_posix()
    if not all(RUN_NAME.fullmatch(part) for part in relative.split("/")):
        raise UsageError(
            f"{shorten(name)}: a run name may contain {NAME_RULE}, with '/' between a sweep and its runs. "
            f"Nothing outside {folder} is changed; use --runs-dir for a different runs folder"
        )
    path = folder
    for part in relative.split("/"):
        path = path / part
        if path.is_symlink():
            raise UsageError(
                f"{path}: this links to another location, and only files inside {folder} are changed. "
                "Use --runs-dir with the folder it points to"
            )
    if relative not in known:
        raise UsageError(f"no run {shorten(name)} in {folder}.{suggest(relative, known)} {list_names(known)}")
    return NamedFolder(relative, path, is_sweep=relative in sweeps)


def locate_all(root: str | Path, names: Sequence[str]) -> list[NamedFolder]:
    """Locate multiple runs and sweeps without duplicates. Patterns such as ``tiny-*`` match runs and sweeps.

    Raises:
        UsageError: see ``locate``; or nothing matches a pattern.
    """
    places: dict[str, NamedFolder] = {}
    for name in names:
        matching = [name]
        if any(sign in name for sign in _PATTERN):
            known = [*every_run_name(root), *started_sweeps(root)]
            matching = [known_name for known_name in known if fits(known_name, name)]
            if not matching:
                raise UsageError(
                    f"nothing in {root} matches {shorten(name)}. {list_names(known)}; give an existing name"
                )
        for exact in matching:
            place = locate(root, exact)
            places.setdefault(place.name, place)
    return list(places.values())


def refuse_absent(root: str | Path, name: str, *, may_be_file: bool = False) -> None:
    """Refuse a model name that is neither a run nor a folder, nor available from the hub or its cache.

    Imports no model library. Existing files are validated later by the code that opens them.

    Raises:
        UsageError: lists the existing runs.
    """
    path = Path(name)
    inside = name.rstrip("/").removeprefix(f"{Path(root)}/")
    if inside in started_sweeps(root):
        trials = trial_names(root, inside)
        if trials:
            raise UsageError(f"{shorten(name)} is a sweep; choose a run inside it. {list_names(trials)}")
    if name in PUBLISHED or is_gguf(path):
        return
    if kind_of_file(path) == "file" and not may_be_file:
        raise UsageError(
            f"{shorten(name)} is a file; give a model folder, a hub name, or a run (if it is a recipe, train it first)"
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
        raise UsageError(f"{shorten(name)} is a recipe; train it first, then give the run")
    if name in registry.names("task"):
        raise UsageError(f"{shorten(name)} is a task, not a model; use --task for tasks")
    hint = suggest(name, [*EMBEDDED_MODELS, *PUBLISHED])
    try:
        refuse_out_of_reach(name)
    except UsageError as error:
        raise UsageError(f"{error}.{hint}") from None


def fits(name: str, pattern: str) -> bool:
    """Match a name against a shell pattern; ``*`` does not cross ``/``."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def runs_of(root: str | Path, place: NamedFolder) -> list[NamedFolder]:
    """Expand to individual runs: the run itself, or all runs in the sweep."""
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
