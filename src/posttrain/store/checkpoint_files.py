"""Checkpoint folders of a run: naming, manifests, and safe renames.

Each manifest lists file sizes and SHA-256 digests, which detects even one flipped byte. Call ``refuse_damaged`` before
loading weights from a run. Does not import torch, so that listing runs stays fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from posttrain import __version__
from posttrain.errors import DataError
from posttrain.store.durable import ASIDE, remove_tree, storage_errors, sync_file, sync_folder

T = TypeVar("T")
MANIFEST = "manifest.json"
BEST = "best"
FORMAT = 1  # manifest format; later versions may add keys without raising it
STEP_FOLDER = re.compile(r"step-([0-9]{6,})")
_REPLACED = ".tmp-replaced-"
_FAILED = "failed-"
# Files that decide which weights are loaded. If one is missing from the manifest, it was added later.
_DECISIVE = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")


class Unverified(Exception):
    """Raised if a folder differs from its manifest. ``name``: the differing file, relative to the folder."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name = name
        self.what = what


def seal(path: Path, step: int) -> None:
    """Write a manifest for a finished folder and sync everything to disk."""
    names = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
    files = {}
    for name in names:
        files[name] = {"bytes": (path / name).stat().st_size, "sha256": digest_of(path / name)}
    (path / MANIFEST).write_bytes(_manifest_bytes(step, files))
    for name in [*names, MANIFEST]:
        sync_file(path / name)
    folders = {path}
    folders.update(item for item in path.rglob("*") if item.is_dir())
    for inner in folders:
        sync_folder(inner)


def verify(path: Path, step: int | None = None, *, by_size: bool = False) -> dict[str, Any]:
    """Verify a checkpoint and return its manifest entries by relative file name.

    Args:
        path: checkpoint folder.
        step: expected step; None accepts any step.
        by_size: check sizes only and read no files. Enough to list runs.

    Raises:
        Unverified: missing, changed or damaged files, a manifest for another step, or weights missing from the
            manifest.
    """
    if not (path / MANIFEST).is_file():
        raise Unverified(MANIFEST, "is missing")
    content = (path / MANIFEST).read_bytes()
    try:
        manifest = json.loads(content)
        files = dict(manifest["files"])
        manifest_step = int(manifest["step"])
        manifest_format = int(manifest["format"])
        expected = [(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Unverified(MANIFEST, f"is damaged ({error})") from None
    if content != _in_one_spelling(manifest) or manifest_format < 1 or step not in (None, manifest_step):
        raise Unverified(MANIFEST, "is damaged")
    if manifest_format > FORMAT:
        what = (
            f"was written by a later posttrain (format {manifest_format}; this is {__version__}, which reads {FORMAT})"
        )
        raise Unverified(MANIFEST, what)
    for name, size, digest in expected:
        file = path / name
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or str(parts) != name:
            raise Unverified(MANIFEST, f"names {name!r}, which leads out of the checkpoint")
        if not file.is_file():
            raise Unverified(name, "is missing")
        if file.stat().st_size != size:
            raise Unverified(name, f"has {file.stat().st_size} bytes instead of {size}")
        if not by_size and digest_of(file) != digest:
            raise Unverified(name, "differs from its SHA-256 in the manifest")
    there = sorted(item.name for pattern in _DECISIVE for item in path.glob(pattern))
    unknown = [name for name in there if name not in files]
    if unknown:
        raise Unverified(unknown[0], "is not in the manifest; it came later")
    return files


def manifest_digests(path: Path) -> dict[str, str]:
    """Read SHA-256 digests from a manifest without checking them. Empty if the manifest is missing or damaged."""
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def refuse_damaged(folder: str | Path) -> None:
    """Refuse a checkpoint that fails verification. Plain model folders pass.

    Raises:
        DataError: names the damaged file and, if available, another checkpoint that verifies.
    """
    path = Path(folder).resolve()
    if not _is_checkpoint(path):
        return
    try:
        verify(path, _step_of(path))
    except Unverified as reason:
        what = f"{reason.what}. This checkpoint is damaged and is not used"
        raise DataError(Path(folder) / reason.name, f"{what}; {_remedy(path, Path(folder))}") from None


def _is_checkpoint(path: Path) -> bool:
    """Check if ``path`` is a run's checkpoint, or a copy recognized by its manifest."""
    if _step_of(path) is not None and path.parent.name == "checkpoints":
        return (path / MANIFEST).is_file() or (path.parent.parent / "recipe.yaml").is_file()
    if not (path / MANIFEST).is_file():
        return False
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return (path / "state.json").is_file()
    return isinstance(manifest, dict) and manifest.keys() >= {"format", "step", "files"}


def _step_of(path: Path) -> int | None:
    match = STEP_FOLDER.fullmatch(path.name)
    if match:
        return int(match[1])
    return None


def _remedy(path: Path, shown: Path) -> str:
    """Suggest the newest earlier checkpoint that verifies, else a later one."""
    own = _step_of(path)
    if own is None:
        return "restore it from a copy"
    for step in sorted(checkpoint_steps(path.parent), key=lambda step: (step > own, -step)):
        with suppress(Unverified, OSError):
            verify(step_folder(path.parent, step), step)
            other = step_folder(shown.parent, step)
            return f"step {step} verifies: name {other} instead, or restore a copy"
    return "restore it from a copy, or train again; none of the checkpoints verifies"


def _manifest_bytes(step: int, files: Mapping[str, object]) -> bytes:
    return _in_one_spelling({"format": FORMAT, "step": step, "files": files})


def _in_one_spelling(manifest: Mapping[str, object]) -> bytes:
    # detects a flipped byte anywhere in the manifest
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def digest_of(path: Path) -> str:
    """Compute a file's SHA-256 digest, cached until inode, size or timestamps change."""
    about = path.stat()
    return _digest_of(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=1024)
def _digest_of(path: Path, *identity: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_folder(folder: str | Path, step: int) -> Path:
    """Build the checkpoint path for ``step``."""
    return Path(folder) / f"step-{step:06d}"


def checkpoint_steps(folder: str | Path) -> list[int]:
    """List steps with a finished checkpoint, ascending. Does not verify them."""
    root = Path(folder)
    if not root.is_dir():
        return []
    try:
        folders = [item for item in root.iterdir() if item.is_dir() and not item.is_symlink()]
    except OSError as error:
        raise DataError(root, f"cannot be read ({error.strerror})") from None
    steps = []
    for item in folders:
        step = _step_of(item)
        if step is not None and item == step_folder(root, step):
            steps.append(step)
    return sorted(steps)


def read_newest(
    root: Path, steps: Iterable[int], read: Callable[[Path, int], T], skipped: list[str]
) -> tuple[int, T] | None:
    """Read the newest checkpoint that verifies.

    Args:
        root: folder with checkpoints.
        steps: candidate steps.
        read: loads one checkpoint; raises ``Unverified`` if damaged.
        skipped: collects one reason per rejected checkpoint.

    Returns:
        Step and result of ``read``, or None if every candidate was rejected.
    """
    for step in sorted(steps, reverse=True):
        path = step_folder(root, step)
        try:
            return step, read(path, step)
        except (Unverified, OSError) as reason:
            skipped.append(f"{path.name}: {reason}")
    return None


def newest_state(folder: str | Path) -> tuple[int, dict[str, object]] | None:
    """Load ``state.json`` from the newest checkpoint whose file sizes match. Returns step and state, or None."""
    return read_newest(Path(folder), checkpoint_steps(folder), _read_state, [])


def _read_state(path: Path, step: int) -> dict[str, object]:
    if "state.json" not in verify(path, step, by_size=True):
        return {}
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise Unverified("state.json", f"is damaged ({error})") from None
    if not isinstance(state, dict):
        return {}
    return state


def best_step(folder: str | Path) -> int | None:
    """Resolve the ``best`` link to a step, or None if missing."""
    link = Path(folder) / BEST
    if not link.is_symlink():
        return None
    match = STEP_FOLDER.fullmatch(os.readlink(link))
    if match and link.is_dir():
        return int(match[1])
    return None


def prune_checkpoints(folder: str | Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete old checkpoints, keeping the newest ``keep``, ``protect`` and the best one. Returns deleted steps."""
    assert keep >= 1, "at least one checkpoint is kept"
    root = Path(folder)
    steps = checkpoint_steps(root)
    spared = {*steps[-keep:], *protect, best_step(root)}
    deleted = [step for step in steps if step not in spared]
    with storage_errors("checkpoints", root):
        for step in deleted:
            discard_checkpoint(root, step)
    return deleted


def discard_checkpoint(root: Path, step: int) -> None:
    """Delete one checkpoint, renaming it first so that a killed process never leaves a partial checkpoint."""
    aside = root / f"{ASIDE}pruned-{step_folder(root, step).name}"
    remove_tree(aside)
    os.rename(step_folder(root, step), aside)
    shutil.rmtree(aside)


def mark_best(folder: str | Path, step: int) -> None:
    """Atomically point the relative symlink ``best`` at the checkpoint for ``step``."""
    root = Path(folder)
    target = step_folder(root, step)
    assert target.is_dir(), "save a checkpoint before marking it as best"
    aside = root / f"{ASIDE}{BEST}-{os.getpid()}"
    with storage_errors("the link to the best checkpoint", root):
        aside.unlink(missing_ok=True)
        os.symlink(target.name, aside)
        os.replace(aside, root / BEST)
        sync_folder(root)


def clean_leftovers(folder: str | Path) -> list[str]:
    """Remove leftovers from killed writes and return their names.

    If a checkpoint was renamed for replacement but its replacement is missing, the old checkpoint is restored. Call
    this only while holding the run's lock.
    """
    root = Path(folder)
    removed: list[str] = []
    if not root.is_dir():
        return removed
    with storage_errors("checkpoints", root):
        for item in sorted(root.glob(f"{ASIDE}*")):
            original = root / item.name.removeprefix(_REPLACED)
            if item.name.startswith(_REPLACED) and not original.exists():
                os.rename(item, original)
                continue
            removed.append(item.name)
            remove_tree(item)
    return removed


def rename_into_place(aside: Path, final: Path) -> None:
    """Rename a finished folder to its final name, replacing any existing one."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():  # same step written twice; clean_leftovers repairs a kill between these renames
        remove_tree(replaced)
        os.rename(final, replaced)
    os.rename(aside, final)
    sync_folder(final.parent)
    remove_tree(replaced)


def set_aside_steps(root: Path, steps: Collection[int]) -> None:
    """Rename unverified checkpoints to ``failed-step-NNNNNN``."""
    with storage_errors("checkpoints", root):
        for step in steps:
            path = step_folder(root, step)
            aside = path.with_name(f"{_FAILED}{path.name}")
            remove_tree(aside)
            os.rename(path, aside)
        sync_folder(root)
