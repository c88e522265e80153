"""A tracker of a library that may fail: it is left out with one notice, and training goes on."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from posttrain.errors import first_line, hide_secrets
from posttrain.store.durable import storage_errors
from posttrain.store.metrics import MetricsRow, TrackedRun


class TrackingSession(ABC):
    """One run of a tracking library. A run that starts again writes all its rows anew and removes the older copy.

    Args:
        run: its folder, recipe and the function that takes notices.
        name: of the tracker, in notices and as the folder of its files.
        packages: the packages whose errors are the library's.
        remedy: what needs no server.
    """

    def __init__(self, run: TrackedRun, name: str, packages: Sequence[str], remedy: str) -> None:
        self.run = run
        self.name = name
        self.packages = packages
        self.remedy = remedy
        self.is_open = False

    @abstractmethod
    def open(self, before: str | None) -> str:
        """Open a new run of the library, remove the one with the id ``before``, and return the new id."""

    @abstractmethod
    def write(self, row: MetricsRow) -> None:
        """Write one row."""

    @abstractmethod
    def end(self) -> None:
        """Close the library's run."""

    def start(self, kept: Sequence[MetricsRow]) -> None:
        """Open a run and write the rows that it has already."""
        folder = self.run.folder / self.name
        with storage_errors(f"files for {self.name}", folder):
            folder.mkdir(exist_ok=True)
            place = folder / "run-id.txt"
            before = _read_id(place)
        opened: list[str] = []
        self.is_open = True
        self._attempt("could not be started", lambda: opened.append(self.open(before)))
        if not opened:
            return
        with storage_errors(f"files for {self.name}", folder):
            place.write_text(opened[0], encoding="utf-8")
        for row in kept:
            self.log(row)

    def log(self, row: MetricsRow) -> None:
        """Write one more row."""
        if self.is_open:
            self._attempt("stopped taking metrics", lambda: self.write(row))

    def close(self) -> None:
        """Close the run."""
        if self.is_open:
            self._attempt("could not be closed", self.end)
        self.is_open = False

    def _attempt(self, trouble: str, act: Callable[[], object]) -> None:
        """Call the library, whose lines on the terminal are not shown."""
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                act()
        except Exception as error:  # the errors of these libraries have no class in common
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError | ValueError | RuntimeError) and package not in self.packages:
                raise
            self.is_open = False
            reason = hide_secrets(f"{first_line(error)}; {self.remedy}")
            what = f"track: {self.name} {trouble} ({reason}); training goes on, metrics.jsonl has everything"
            self.run.notify(what)


def flat(row: MetricsRow) -> dict[str, float]:
    """Return the numbers of a row by name, times under ``timing/``."""
    numbers = {name: float(value) for name, value in row.metrics.items()}
    for name, value in row.timing.items():
        numbers[f"timing/{name}"] = float(value)
    return numbers


def keys_of(recipe: Mapping[str, object], limit: int) -> dict[str, str]:
    """Return the values of a recipe by dotted key, as text of at most ``limit`` characters."""
    found: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{below}": text for below, text in keys_of(value, limit).items()}
        else:
            found[key] = hide_secrets(str(value))[:limit]
    return found


def _read_id(place: Path) -> str | None:
    if place.is_symlink() or not place.is_file():
        return None
    return place.read_text(encoding="utf-8").strip() or None
