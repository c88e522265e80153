"""Deleting runs and pruning their checkpoints, so that a kill leaves nothing half deleted in sight.

What goes is renamed aside first and removed then. Only for folders that ``places.locate`` gave; links are
unlinked and never followed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from posttrain.errors import RunConflict, StorageError, UsageError
from posttrain.runs.directory import RunDirectory, is_live, lock_run
from posttrain.runs.lineage import Link, find_links, steps_in_use
from posttrain.runs.listing import disk_bytes
from posttrain.runs.paths import Place, comparison_of, runs_of
from posttrain.store.checkpoint_files import (
    ASIDE,
    BEST,
    best_step,
    checkpoint_steps,
    discard_checkpoint,
    step_folder,
)
from posttrain.store.durable import find_leftovers, remove_leftovers, sync_folder

DELETING = ".deleting-"
_LOCK = ".lock"
_FAILED = "failed-step-*"
_KEEP = re.compile(r"best|last|[1-9]\d*")


@dataclass(frozen=True, slots=True)
class Prune:
    """What pruning one run would delete: checkpoints by step and leftovers by name, each with its bytes.

    ``kept`` says why each of the remaining checkpoints stays.
    """

    run: Place
    steps: dict[int, int]
    leftovers: dict[str, int]
    kept: dict[int, str] = field(default_factory=dict)

    @property
    def freed_bytes(self) -> int:
        """What the disk gains."""
        return sum(self.steps.values()) + sum(self.leftovers.values())


def check_unused(root: str | Path, places: Sequence[Place]) -> list[Link]:
    """Links from runs that stay to runs that would go.

    Without what they stand on, a run with an adapter cannot be loaded, and none can be resumed.
    """
    going = {run.name for place in places for run in runs_of(root, place)} | {place.name for place in places}
    return [link for link in find_links(root) if link.parent in going and link.child not in going]


def refuse_live(root: str | Path, place: Place) -> None:
    """Refuse if a process works in the run, in one of the comparison's, or in the comparison that it belongs to.

    Raises:
        RunConflict: with the folder.
    """
    above = comparison_of(place.path)
    own = [run.path for run in runs_of(root, place)] if place.is_comparison else []
    for folder in (place.path, *own, *([above] if above is not None else [])):
        if is_live(folder):
            raise RunConflict(
                f"{folder}: a process is working there. Nothing was changed; stop it (Ctrl-C saves a checkpoint) "
                "or wait for its end"
            )


def delete(root: str | Path, place: Place) -> int:
    """Delete a run or a comparison; returns the bytes that were freed.

    Raises:
        RunConflict: a process works there; nothing was changed.
        StorageError: the folder could not be removed. It is no longer listed, and ``finish_deletions`` goes on with it.
    """
    folder = Path(root)
    aside = folder / f"{DELETING}{place.name.replace('/', '-')}-{uuid4().hex[:8]}"
    size = disk_bytes(place.path)
    with _held(folder, place):
        with _removing(place.path, "Nothing was deleted"):
            os.rename(place.path, aside)
            sync_folder(place.path.parent)
        _remove(aside)
    return size


def unfinished_deletions(root: str | Path) -> dict[str, int]:
    """Names of what killed deletions left behind, with their bytes."""
    folder = Path(root)
    paths = folder.glob(f"{DELETING}*") if folder.is_dir() else ()
    return {item.name: disk_bytes(item) for item in sorted(paths) if item.is_dir() and not item.is_symlink()}


def finish_deletions(root: str | Path) -> dict[str, int]:
    """Remove what killed deletions left behind; returns names and bytes. One in progress is left to its process."""
    finished = {}
    for name, size in unfinished_deletions(root).items():
        aside = Path(root) / name
        if not is_live(aside):
            with lock_run(aside, to_delete=True):
                _remove(aside)
            finished[name] = size
    return finished


def parse_keep(text: str) -> tuple[str, ...]:
    """``best,last`` or ``best,3`` (the newest three) as its words.

    Raises:
        UsageError: another word, or none.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words or not all(_KEEP.fullmatch(word) for word in words):
        raise UsageError(f"--keep {text!r}: give best, last, a number of newest checkpoints, or several: best,last")
    return words


def plan_prune(root: str | Path, run: Place, keep: Sequence[str], links: Sequence[Link] = ()) -> Prune:
    """What would go if only the best checkpoint and those in ``keep`` stayed. Nothing is changed.

    A run that is not finished keeps its newest checkpoint in any case, from which it is resumed, and a
    checkpoint that another run stands on (``links``, from ``find_links``) stays as well. What killed writes
    and failed verifications left behind goes.

    Raises:
        UsageError: the run's ``checkpoints`` are a link to another place.
    """
    folder = _checkpoints_of(root, run)
    steps, best = checkpoint_steps(folder), best_step(folder)
    kept: dict[int, str] = {}
    for word in keep:
        newest = steps[-1:] if word == "last" else [] if word == "best" else steps[-int(word) :]
        kept |= {step: word if word == "last" else f"newest {word}" for step in newest if step not in kept}
    if best is not None:
        kept[best] = "best"
    if not kept:  # no checkpoint is the best one where nothing was evaluated
        kept = dict.fromkeys(steps[-1:], "last")
    kept |= {step: why for step, why in _needed(root, run, steps, links).items() if step not in kept}
    going = {step: disk_bytes(step_folder(folder, step)) for step in steps if step not in kept}
    left = [*folder.glob(f"{ASIDE}*"), *folder.glob(_FAILED)] if folder.is_dir() else []
    leftovers = {item.name: _size(item) for item in sorted(left)}
    leftovers |= {str(item.relative_to(run.path)): _size(item) for item in find_leftovers(run.path)}
    return Prune(run, going, leftovers, dict(sorted(kept.items())))


def plan_steps(
    root: str | Path, run: Place, chosen: Sequence[int], links: Sequence[Link] = (), *, force: bool = False
) -> Prune:
    """What would go if the checkpoints of the steps in ``chosen`` went, the best among them or not. Nothing is changed.

    Args:
        force: also one that another run or a resumption needs.

    Raises:
        UsageError: the run has no such checkpoint, or its ``checkpoints`` are a link to another place.
        RunConflict: a checkpoint is needed.
    """
    folder = _checkpoints_of(root, run)
    steps = checkpoint_steps(folder)
    missing = [step for step in chosen if step not in steps]
    if missing:
        there = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"--step {missing[0]}: {run.name} has no such checkpoint. It has: {there}")
    needed = _needed(root, run, steps, links)
    for step in chosen:
        if step in needed and not force:
            raise RunConflict(
                f"{run.name}: the checkpoint of step {step} stays ({needed[step]}). Nothing was changed; delete it all "
                "the same with --force"
            )
    return Prune(run, {step: disk_bytes(step_folder(folder, step)) for step in dict.fromkeys(chosen)}, {})


def _checkpoints_of(root: str | Path, run: Place) -> Path:
    folder = run.path / "checkpoints"
    if folder.is_symlink():
        raise UsageError(f"{folder}: this is a link to another place, and only what lies in {root} is changed")
    return folder


def _needed(root: str | Path, run: Place, steps: Sequence[int], links: Sequence[Link]) -> dict[int, str]:
    """The checkpoints that a resumption of the run, or another run, needs, each with the reason."""
    status = RunDirectory(run.path).read_status()
    is_finished = status is not None and status.state == "finished"
    needed = {} if is_finished else dict.fromkeys(steps[-1:], "to be resumed from")
    used = {step: f"{child} uses it" for step, child in steps_in_use(root, run.name, links).items()}
    return used | needed


def prune(root: str | Path, plan: Prune) -> None:
    """Delete what the plan says.

    Raises:
        RunConflict: a process works there; nothing was changed.
        StorageError: something could not be removed.
    """
    folder = plan.run.path / "checkpoints"
    with _held(Path(root), plan.run), _removing(folder, "What is left of it goes with the next prune"):
        for step in plan.steps:
            discard_checkpoint(folder, step)
        best = folder / BEST
        if best.is_symlink() and not best.exists():
            best.unlink()
        for name in plan.leftovers:
            item = folder / name
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)
        remove_leftovers(plan.run.path)


@contextmanager
def _held(root: Path, place: Place) -> Iterator[None]:
    """Hold the locks of all runs concerned, so that none is begun or resumed meanwhile."""
    refuse_live(root, place)
    with ExitStack() as locks:
        locks.enter_context(lock_run(place.path, to_delete=True))
        for run in runs_of(root, place) if place.is_comparison else []:
            locks.enter_context(lock_run(run.path, to_delete=True))
        yield


def _remove(aside: Path) -> None:
    """Remove a folder; the lock in it goes last, so that another process sees that someone is at work."""
    with _removing(aside, "The run is no longer listed; `posttrain runs delete` without a name goes on with it"):
        for item in aside.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            elif item.name != _LOCK:
                item.unlink()
        (aside / _LOCK).unlink(missing_ok=True)
        aside.rmdir()


@contextmanager
def _removing(place: Path, state: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{place}: cannot be removed: {error}. {state}") from error


def _size(item: Path) -> int:
    return 0 if item.is_symlink() else disk_bytes(item) if item.is_dir() else item.stat().st_size
