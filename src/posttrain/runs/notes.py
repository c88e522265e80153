"""What people say about a run: ``notes.json`` in its directory, with tags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import RunConflict, UsageError
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.locks import Held, hold
from posttrain.store.reading import read_json, read_stated
from posttrain.untrusted import harmless_json

NOTES = "notes.json"
_PATIENCE_SECONDS = 10.0
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Notes:
    """The tags of a run, in the order in which they were given."""

    tags: tuple[str, ...]


def read_notes(folder: str | Path) -> Notes:
    """The notes of a run; empty where nobody made any.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return read_stated(Path(folder) / NOTES, Notes)
    except FileNotFoundError:
        return Notes(())


def change_tags(folder: str | Path, changes: Sequence[str]) -> Notes:
    """Add and take away tags: ``good`` and ``+good`` add, ``-good`` takes away. Returns the new notes.

    A tag that is there is not added again, and one that is not there need not be taken away.

    Raises:
        UsageError: a malformed tag; nothing was changed.
    """
    with _alone(Path(folder)):
        tags = list(read_notes(folder).tags)
        for change in changes:
            tag = change[1:] if change[:1] in ("+", "-") else change
            if not _TAG.fullmatch(tag):
                raise UsageError(
                    f"{change!r}: a tag is made of letters, digits, '.', '_' and '-', such as +good or -good"
                )
            if change.startswith("-"):
                tags = [kept for kept in tags if kept != tag]
            elif tag not in tags:
                tags.append(tag)
        return _write(folder, Notes(tuple(tags)))


def _write(folder: str | Path, notes: Notes) -> Notes:
    path = Path(folder) / NOTES
    others = read_json(path) if path.exists() else {}  # such as remarks of earlier versions
    content = harmless_json(json.dumps(others | asdict(notes), indent=1, ensure_ascii=False))
    replace_file(path, content.encode() + b"\n")
    return notes


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One change after the other; not the run's lock, for a run that is training may be tagged as well."""
    with ExitStack() as stack:
        try:
            with storage_errors(NOTES, folder):
                stack.enter_context(hold(folder / ".lock-notes", _PATIENCE_SECONDS))
        except Held as held:
            raise RunConflict(
                f"{folder / NOTES}: another process is changing it ({held}). Nothing was changed"
            ) from None
        yield
