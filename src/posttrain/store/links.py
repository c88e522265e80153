"""Links that lead out of a folder: whoever writes in a folder of unknown origin looks for them first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from posttrain.errors import UsageError

# Files that are written where they stand; any other is written aside and renamed over what was there.
_IN_PLACE = (".lock", "*.txt", "*.log", "metrics.jsonl", "ledger.jsonl", "rollouts.db*", "*.png")
_WANDB = "wandb"  # W&B keeps links to logs of its own in the folders of its sessions, and writes new ones each time


def refuse_links(folder: str | Path) -> None:
    """Refuse a folder in which writing could change something outside of it. The folder itself may be a link.

    Links that stay inside are fine (``best`` to its checkpoint). Not fine are symbolic links to the outside, a second
    name (hard link) of a file that is appended to, and what is neither file nor folder.

    Raises:
        UsageError: such a thing, by name; nothing was changed.
    """
    root = Path(os.path.realpath(folder))
    for path, mode, num_links in _entries(root):
        if stat.S_ISLNK(mode):
            target = Path(os.path.realpath(path))
            if target != root and target.is_relative_to(root):
                continue
            what = f"a link that leads out of the folder, to {target}"
        elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            what = "neither a file nor a folder"
        elif stat.S_ISREG(mode) and num_links > 1 and any(fnmatchcase(path.name, name) for name in _IN_PLACE):
            what = "a file with a second name elsewhere (a hard link), which would be written to as well"
        else:
            continue
        raise UsageError(
            f"{path}: this is {what}. Nothing was changed; put the file itself in its place (cp -L), or work on a copy"
        )


def _entries(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """(path, mode, number of names) of everything below a folder; links are not followed."""
    if not folder.is_dir():
        return
    for item in os.scandir(folder):
        try:
            state = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # another process tidies up
            continue
        path = Path(item.path)
        yield path, state.st_mode, state.st_nlink
        if stat.S_ISDIR(state.st_mode) and folder.name != _WANDB:
            yield from _entries(path)
