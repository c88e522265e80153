"""Run families: the runs that a run was trained from, by, or on.

A recipe names another run by its path (``model.name: runs/demo-sft``, ``teacher.name``, ``rewards[].run``, or a
checkpoint in one). Any value of a recipe that leads into a run of the same runs folder makes that run a parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import DataError
from posttrain.recipes.document import flatten
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.runs.directory import RunDirectory
from posttrain.runs.paths import every_run_name
from posttrain.store.checkpoint_files import STEP_FOLDER, best_step, checkpoint_steps, newest_state

# The role of a parent, by the first part of the key that names it.
ROLES = {"model": "start", "teacher": "teacher", "rewards": "reward", "task": "data", "eval": "evaluation"}
_NAMES = ("model.name", "teacher.name")  # `tiny` and names of the hub may be their values, too


@dataclass(frozen=True, slots=True)
class Link:
    """One run depends on another. Names are relative to the runs folder.

    ``step``: the checkpoint of the parent, where that is known. ``is_there``: whether the parent still exists.
    """

    child: str
    role: str
    parent: str
    step: int | None = None
    is_there: bool = True


def find_links(root: str | Path) -> list[Link]:
    """Return the links of all runs under ``root`` (sweeps included) to their parents there.

    A run whose recipe cannot be read has none.
    """
    folder, links = Path(root), []
    known = every_run_name(folder)
    for name in sorted(known):
        try:
            values = flatten(RunDirectory(folder / name).read_recipe())
        except DataError:
            continue
        links += [link for key, value in values.items() for link in _find_parent(folder, known, name, key, value)]
    return links


def steps_in_use(root: str | Path, parent: str, links: Iterable[Link]) -> dict[int, str]:
    """Return the checkpoints of ``parent`` that other runs depend on, with the name of one of them.

    A child that names the whole run depends on its best checkpoint, else its newest, unless its own checkpoints record
    which one it was.
    """
    folder = Path(root) / parent / "checkpoints"
    default = best_step(folder) or max(checkpoint_steps(folder), default=None)
    used: dict[int, str] = {}
    for link in links:
        step = default if link.step is None else link.step
        if link.parent == parent and step is not None:
            used.setdefault(step, link.child)
    return used


def _find_parent(root: Path, known: Sequence[str], child: str, key: str, value: object) -> Iterator[Link]:
    is_run, is_name = key.endswith(".run"), key in _NAMES
    if not isinstance(value, str) or (is_name and value in ("self", *EMBEDDED_MODELS)):
        return
    if not (is_run or is_name or "/" in value):
        return
    real = root.resolve()
    for base in (Path.cwd(), *real.parents, *([real] if is_run else [])):  # a relative path may be relative to these
        path = Path(os.path.normpath(base / os.path.expanduser(value)))
        if path == real or not path.is_relative_to(real):
            continue
        parts = path.relative_to(real).parts
        end = parts.index("checkpoints") if "checkpoints" in parts else len(parts)
        end = next((n for n in range(1, len(parts) + 1) if "/".join(parts[:n]) in known), end)
        parent = "/".join(parts[:end])
        if parent not in ("", child) and (parent in known or is_run or is_name):
            section = key.partition(".")[0]
            step = _step_of(root, child, parent, section, value, parts[end:])
            yield Link(child, ROLES.get(section, key), parent, step, parent in known)
        return


def _step_of(root: Path, child: str, parent: str, section: str, value: str, rest: Sequence[str]) -> int | None:
    """The parent's checkpoint: by the path, else as the child's own newest checkpoint records it."""
    if len(rest) > 1 and rest[0] == "checkpoints":
        match = STEP_FOLDER.fullmatch(rest[1])
        return int(match[1]) if match else best_step(root / parent / "checkpoints")
    _, state = newest_state(root / child / "checkpoints") or (0, {})
    recorded = state.get(section)
    match = re.fullmatch(STEP_FOLDER, str(recorded.get(value) if isinstance(recorded, dict) else recorded))
    return int(match[1]) if match else None
