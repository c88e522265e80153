"""Run families: which run was trained from, by, or on which other one.

A recipe names another run by its path (``model.name: runs/demo-sft``, ``teacher.name``,
``rewards[].run``, or a checkpoint in one). Whatever value of a recipe leads into a run of the same runs
folder makes that run a parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import DataError
from posttrain.runs.listing import NAMES, names_run, recipe_facts
from posttrain.runs.paths import every_run_name
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.store.reading import read_json

# What a parent is to its child, by the first part of the key that names it.
ROLES = {"model": "start", "teacher": "teacher", "rewards": "reward", "task": "data", "eval": "evaluation"}
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Link:
    """One run stands on another. Names are relative to the runs folder.

    ``key`` and ``value``: where the child's recipe says so, and how. ``step``: the checkpoint of the
    parent, where that is known. ``is_there``: whether the parent still exists.
    """

    child: str
    role: str
    parent: str
    key: str
    value: str
    step: int | None = None
    is_there: bool = True


def find_links(root: str | Path, names: Sequence[str] | None = None, *, of: str | None = None) -> list[Link]:
    """The links of all runs under ``root`` (comparisons included) to their parents there.

    A run whose recipe cannot be read has none.

    Args:
        names: only of these children.
        of: only those in which this run is the child or the parent.
    """
    folder = Path(root)
    known = set(every_run_name(folder))
    real = folder.resolve()
    bases = list(dict.fromkeys([Path.cwd(), *real.parents]))  # what a relative path in a recipe may be relative to
    links: list[Link] = []
    for name in sorted(known) if names is None else names:
        try:
            links += _links_of((folder, real), name, recipe_facts(folder / name).leads, (known, bases), of)
        except DataError:
            continue
    return links


def find_links_around(root: str | Path, names: Sequence[str]) -> list[Link]:
    """The links of these runs to their parents, of those to theirs, and so on."""
    links: list[Link] = []
    waiting, seen = list(names), set(names)
    while waiting:
        new_links = find_links(root, waiting)
        links += new_links
        waiting = list(dict.fromkeys(link.parent for link in new_links if link.is_there and link.parent not in seen))
        seen.update(waiting)
    return links


def steps_in_use(root: str | Path, parent: str, links: Iterable[Link]) -> dict[int, str]:
    """Checkpoints of ``parent`` that other runs stand on, with the name of one of them.

    A child that names the whole run stands on its best checkpoint, else its newest, unless its own
    checkpoints tell which one it was.
    """
    folder = Path(root) / parent / "checkpoints"
    steps = checkpoint_steps(folder)
    default = best_step(folder) or (steps[-1] if steps else None)
    used: dict[int, str] = {}
    for link in links:
        if link.parent == parent and link.child != parent:
            step = link.step if link.step is not None else default
            if step is not None:
                used.setdefault(step, link.child)
    return used


def _links_of(
    roots: tuple[Path, Path], name: str, leads: dict[str, str], about: tuple[set[str], list[Path]], of: str | None
) -> Iterator[Link]:
    (root, real), (known, bases) = roots, about
    for key, value in leads.items():
        if key in NAMES and value in ("tiny", "self"):
            continue
        inner = _inside(value, real, [*bases, real] if names_run(key) else bases)
        if inner is None:
            continue
        parts = Path(inner).parts
        ends = [n for n in range(1, len(parts) + 1) if "/".join(parts[:n]) in known]
        cut = parts.index("checkpoints") if "checkpoints" in parts else len(parts)
        parent = "/".join(parts[: ends[0]] if ends else parts[:cut])
        if not parent or parent == name or (not ends and key not in NAMES and not names_run(key)):
            continue
        if of not in (None, name, parent):
            continue
        role = ROLES.get(key.partition(".")[0], key)
        step = _step_of(root, (name, key, value, parent), parts[ends[0] if ends else cut :])
        yield Link(name, role, parent, key, value, step, bool(ends))


def _inside(value: str, root: Path, bases: Sequence[Path]) -> str | None:
    """``value`` relative to the runs folder, or None if it does not lead into it."""
    for base in bases:
        path = os.path.normpath(base / os.path.expanduser(value))
        if path != str(root) and Path(path).is_relative_to(root):
            return Path(path).relative_to(root).as_posix()
    return None


def _step_of(root: Path, link: tuple[str, str, str, str], rest: Sequence[str]) -> int | None:
    """The parent's checkpoint: said by the path, or else by what the child's own checkpoints remember."""
    child, key, value, parent = link
    if len(rest) > 1 and rest[0] == "checkpoints":
        if rest[1] == "best":
            return best_step(root / parent / "checkpoints")
        match = _STEP.fullmatch(rest[1])
        return int(match[1]) if match else None
    folder = root / child / "checkpoints"
    for step in reversed(checkpoint_steps(folder)):
        try:
            state = read_json(step_folder(folder, step) / "state.json")
        except (OSError, DataError):
            continue  # an unfinished or damaged checkpoint; another one may tell
        section = state.get(key.partition(".")[0]) if isinstance(state, dict) else None
        match = _STEP.fullmatch(str(section.get(value) if isinstance(section, dict) else section))
        if match:
            return int(match[1])
    return None
