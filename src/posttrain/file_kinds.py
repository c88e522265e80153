"""What lies at a path, asked before it is opened: a pipe never ends, and a name may be longer than any file's."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

FileKind = Literal["file", "folder", "pipe", "device", "socket", "nothing"]


def kind_of_file(path: str | Path) -> FileKind:
    """The kind of file that a path leads to; ``nothing`` if none can be reached."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # no such file, a circle of links, a name too long, a NUL in it
        return "nothing"
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISFIFO(mode):
        return "pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
