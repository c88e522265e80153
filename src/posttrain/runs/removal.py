"""Delete runs and prune checkpoints, safe against kills: no half-deleted run keeps its name.

Each folder is renamed first, then removed. Only accepts folders from ``paths.locate``. Links are unlinked and never
followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

from posttrain.errors import RunConflict, StorageError, UsageError
from posttrain.runs.directory import RunDirectory, lock_run, refuse_live_folder
from posttrain.runs.listing import Link, find_links, steps_in_use
from posttrain.runs.paths import NamedFolder, runs_of, sweep_of
from posttrain.store.checkpoint_files import BEST, best_step, checkpoint_steps, clean_leftovers, discard_checkpoint
from posttrain.store.durable import ASIDE, remove_leftovers, remove_tree, sync_folder

_DELETING = ".deleting-"
_FAILED = "failed-step-*"
_KEEP = re.compile(r"best|last|[1-9]\d*")


def check_unused(root: str | Path, places: Sequence[NamedFolder]) -> list[Link]:
    """Find links from remaining runs to runs about to be deleted.

    Without its parent, a run with an adapter cannot be loaded, and no child can be resumed.
    """
    going = {place.name for place in places}
    for place in places:
        going |= {run.name for run in runs_of(root, place)}
    return [link for link in find_links(root) if link.parent in going and link.child not in going]


def refuse_live(root: str | Path, place: NamedFolder) -> None:
    """Refuse if a process is active in the run, in any run of the sweep, or in the enclosing sweep.

    Raises:
        RunConflict: names the folder.
    """
    folders = [place.path, *(run.path for run in runs_of(root, place))]
    above = sweep_of(place.path)
    if above is not None:
        folders.append(above)
    for folder in folders:
        refuse_live_folder(folder)


def delete(root: str | Path, place: NamedFolder) -> None:
    """Delete a run or sweep, plus remains from killed deletions.

    Raises:
        RunConflict: a process is active there. Nothing was changed.
        StorageError: the folder could not be removed. It is no longer listed; the next deletion removes it.
    """
    folder = Path(root)
    with _held(folder, place), _removing(place.path, "The next deletion removes the remains"):
        os.rename(place.path, folder / f"{_DELETING}{place.name.replace('/', '-')}-{uuid4().hex[:8]}")
        sync_folder(place.path.parent)
        for item in folder.glob(f"{_DELETING}*"):
            if item.is_dir() and not item.is_symlink():
                remove_tree(item)


def parse_keep(text: str) -> tuple[str, ...]:
    """Parse ``best,last`` or ``best,3`` (the newest three) into words.

    Raises:
        UsageError: unknown word, or empty.
    """
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words or not all(_KEEP.fullmatch(word) for word in words):
        raise UsageError(
            f"--keep {text!r}: give best, last, a number of newest checkpoints, or a combination: best,last"
        )
    return words


def plan_prune(root: str | Path, run: NamedFolder, keep: Sequence[str], links: Sequence[Link] = ()) -> list[int]:
    """List checkpoints to delete if only the best one and those in ``keep`` remain. Changes nothing.

    Unfinished runs always keep the newest checkpoint for resuming. Checkpoints used by other runs (``links``, from
    ``find_links``) also remain.

    Raises:
        UsageError: ``checkpoints`` is a link to another location.
    """
    steps = checkpoint_steps(_checkpoints_of(root, run))
    best = best_step(run.path / "checkpoints")
    kept = set()
    if best is not None:
        kept.add(best)
    for word in keep:
        if word == "last":
            kept.update(steps[-1:])
        elif word != "best":
            kept.update(steps[-int(word) :])
    if not kept:  # not evaluated yet, so no best checkpoint
        kept.update(steps[-1:])
    needed = _needed(root, run, steps, links)
    return [step for step in steps if step not in kept and step not in needed]


def find_leftovers(run: NamedFolder) -> list[Path]:
    """Find remains of killed writes and failed verifications among the checkpoints; ``prune`` deletes them."""
    folder = run.path / "checkpoints"
    return sorted(item for pattern in (f"{ASIDE}*", _FAILED) for item in folder.glob(pattern))


def check_steps(
    root: str | Path, run: NamedFolder, chosen: Sequence[int], links: Sequence[Link] = (), *, force: bool = False
) -> list[int]:
    """Check that the ``chosen`` checkpoints may be deleted, and drop duplicates. The best one may be included.

    Args:
        force: allow deleting checkpoints needed by other runs or for resuming.

    Raises:
        UsageError: no such checkpoint, or ``checkpoints`` is a link to another location.
        RunConflict: a checkpoint is needed.
    """
    steps = checkpoint_steps(_checkpoints_of(root, run))
    needed = _needed(root, run, steps, links)
    for step in chosen:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"--step {step}: no such checkpoint in {run.name}. Available: {there}")
        if step in needed and not force:
            raise RunConflict(
                f"{run.name}: the checkpoint at step {step} is kept ({needed[step]}). Nothing was changed; add --force "
                "to delete it anyway"
            )
    return list(dict.fromkeys(chosen))


def _checkpoints_of(root: str | Path, run: NamedFolder) -> Path:
    folder = run.path / "checkpoints"
    if folder.is_symlink():
        raise UsageError(f"{folder}: this links to another location, and only files inside {root} are changed")
    return folder


def _needed(root: str | Path, run: NamedFolder, steps: Sequence[int], links: Sequence[Link]) -> dict[int, str]:
    """Map checkpoints needed for resuming or by other runs to the reason."""
    needed = {step: f"{child} uses it" for step, child in steps_in_use(root, run.name, links).items()}
    status = RunDirectory(run.path).read_status()
    if status is None or status.state != "finished":
        needed |= dict.fromkeys(steps[-1:], "needed to resume")
    return needed


def prune(root: str | Path, run: NamedFolder, steps: Sequence[int]) -> None:
    """Delete checkpoints, plus remains from killed writes and failed verifications.

    Raises:
        RunConflict: a process is active there. Nothing was changed.
        StorageError: something could not be removed.
    """
    folder = run.path / "checkpoints"
    with _held(Path(root), run), _removing(folder, "The next prune removes the remains"):
        for step in steps:
            discard_checkpoint(folder, step)
        if (folder / BEST).is_symlink() and not (folder / BEST).exists():
            (folder / BEST).unlink()
        for item in folder.glob(_FAILED):
            if not item.is_symlink():
                remove_tree(item)
        clean_leftovers(folder)
        remove_leftovers(run.path)


@contextmanager
def _held(root: Path, place: NamedFolder) -> Iterator[None]:
    """Hold the locks of all affected runs to prevent starts and resumes meanwhile."""
    refuse_live(root, place)
    with ExitStack() as locks:
        for folder in dict.fromkeys([place.path, *(run.path for run in runs_of(root, place))]):
            locks.enter_context(lock_run(folder, to_delete=True))
        yield


@contextmanager
def _removing(place: Path, state: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{place}: cannot be removed: {error}. {state}") from error
