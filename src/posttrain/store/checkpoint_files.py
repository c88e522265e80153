"""The folders of a run's checkpoints: their names, and moving them about safely; ``store/manifest.py`` verifies them.

No torch here, so that listing runs stays quick.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.store.durable import storage_errors, sync_folder
from posttrain.store.manifest import STEP_FOLDER, Unverified, verify

BEST = "best"
ASIDE = ".tmp-"
_REPLACED = ".tmp-replaced-"
_FAILED = "failed-"


def step_folder(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands."""
    return Path(folder) / f"step-{step:06d}"


def checkpoint_steps(folder: str | Path) -> list[int]:
    """Steps that have a checkpoint under its final name (not verified), ascending.

    Raises:
        DataError: the folder cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        return []
    try:
        folders = [item for item in root.iterdir() if STEP_FOLDER.fullmatch(item.name)]
    except OSError as error:
        raise DataError(root, f"cannot be read ({error.strerror})") from None
    steps = {int(item.name.removeprefix("step-")): item for item in folders if item.is_dir() and not item.is_symlink()}
    return sorted(step for step, item in steps.items() if item == step_folder(root, step))


def newest_state(folder: str | Path) -> tuple[int, dict[str, Any]] | None:
    """Step and ``state.json`` of the newest checkpoint that verifies, or None; nothing else of it is read."""
    for step in reversed(checkpoint_steps(folder)):
        path = step_folder(folder, step)
        try:
            names = verify(path, step)
            state = json.loads((path / "state.json").read_bytes()) if "state.json" in names else {}
        except (Unverified, OSError, ValueError, RecursionError):
            continue
        return step, state if isinstance(state, dict) else {}
    return None


def best_step(folder: str | Path) -> int | None:
    """The step that ``best`` points to, or None."""
    link = Path(folder) / BEST
    match = STEP_FOLDER.fullmatch(os.readlink(link)) if link.is_symlink() else None
    return int(match[1]) if match and link.is_dir() else None


def prune_checkpoints(folder: str | Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all but the newest ``keep`` checkpoints, those in ``protect`` and the best one.

    Returns the deleted steps. A folder is renamed aside before its files go, so a kill in between
    leaves no part of a checkpoint under a final name.

    Raises:
        StorageError: the folder is not writable.
    """
    assert keep >= 1, "at least one checkpoint is kept"
    root = Path(folder)
    steps = checkpoint_steps(root)
    spared = {*steps[-keep:], *protect, best_step(root)}
    deleted = [step for step in steps if step not in spared]
    with storage_errors("checkpoints", root):
        for step in deleted:
            aside = root / f"{ASIDE}pruned-{step_folder(root, step).name}"
            remove_tree(aside)
            os.rename(step_folder(root, step), aside)
            shutil.rmtree(aside)
    return deleted


def mark_best(folder: str | Path, step: int) -> None:
    """Point the relative symlink ``best`` at the checkpoint of ``step``, in one atomic step.

    Raises:
        StorageError: the folder is not writable.
    """
    root = Path(folder)
    target = step_folder(root, step)
    assert target.is_dir(), "the best checkpoint is marked after it is saved"
    aside = root / f"{ASIDE}{BEST}-{os.getpid()}"
    with storage_errors("the link to the best checkpoint", root):
        aside.unlink(missing_ok=True)
        os.symlink(target.name, aside)
        os.replace(aside, root / BEST)
        sync_folder(root)


def clean_leftovers(folder: str | Path) -> list[str]:
    """Remove what killed writes left behind; returns the names.

    A checkpoint that was renamed aside to be replaced, without its replacement having come, gets
    its name back. Only for the process that holds the run's lock.

    Raises:
        StorageError: the folder is not writable.
    """
    root = Path(folder)
    removed: list[str] = []
    with storage_errors("checkpoints", root):
        for item in sorted(root.glob(f"{ASIDE}*")) if root.is_dir() else []:
            original = root / item.name.removeprefix(_REPLACED)
            if item.name.startswith(_REPLACED) and not original.exists():
                os.rename(item, original)
                continue
            removed.append(item.name)
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()
    return removed


def rename_into_place(aside: Path, final: Path) -> None:
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():  # the same step written again; a kill between the renames is mended by clean_leftovers
        remove_tree(replaced)
        os.rename(final, replaced)
    os.rename(aside, final)
    sync_folder(final.parent)
    remove_tree(replaced)


def set_aside_steps(root: Path, steps: Collection[int]) -> None:
    with storage_errors("checkpoints", root):
        for step in steps:
            path = step_folder(root, step)
            aside = path.with_name(f"{_FAILED}{path.name}")
            remove_tree(aside)
            os.rename(path, aside)
        sync_folder(root)


def remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
