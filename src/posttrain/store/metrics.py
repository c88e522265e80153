"""``metrics.jsonl``: one line per step, readable by anything that reads JSON.

``{"step": 7, "metrics": {"reward": 0.5, ...}, "timing": {"step_seconds": 0.4, ...}}``. Metrics are
functions of the run's recipe alone, so two runs compare bit for bit without ``timing``.

It is the record; a tracker (``trackers``) is given every line after it was written here, and tells the same story. A
resumed run drops the steps behind its checkpoint and repeats them, so a tracker is told which lines stayed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from posttrain.errors import DataError
from posttrain.registry import find
from posttrain.store.durable import cut_torn_line, replace_file, storage_errors, sync_folder
from posttrain.store.reading import open_record

EVALUATION = "eval/"  # begins the name of an evaluation's result
MAX_BYTES = 1 << 33  # a million steps with two hundred metrics each stay below
_MAX_LINE_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 16
_MAX_CLOCK = 1 << 53  # more than any clock or memory measures; a step is below it, too


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The numbers of one step. ``timing`` holds what the clock measured (seconds, rates, bytes)."""

    step: int
    metrics: dict[str, float]
    timing: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrimmedMetrics:
    """What ``MetricsLog.trim`` dropped: whole lines past the step, and a torn last line (0 or 1)."""

    dropped_lines: int
    torn_lines: int


class MetricsLog:
    """The step metrics of one run; the file is created by the first line.

    Floats are written with their shortest exact text, so they come back bit for bit. JSON has no
    word for numbers that are not finite: these stand as the texts ``"nan"``, ``"inf"``, ``"-inf"``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._num_rows: int | None = None

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Add the line of one step.

        Raises:
            StorageError: the disk is full or not writable.
        """
        line = {"step": step, "metrics": _writable(metrics), "timing": _writable(timing or {})}
        content = json.dumps(line, allow_nan=False).encode() + b"\n"
        with storage_errors("metrics", self.path):
            descriptor = self._opened()
            written = os.write(descriptor, content)
            while written < len(content):
                written += os.write(descriptor, content[written:])
        if self._num_rows is not None:
            self._num_rows += 1

    def num_rows(self) -> int:
        """How many complete lines there are. Reads the file once, and counts what is added."""
        if self._num_rows is None:
            self._num_rows = len(self.read())
        return self._num_rows

    def flush(self) -> None:
        """Wait until every line is on the disk.

        Raises:
            StorageError: the disk is full or not writable.
        """
        if self._descriptor is not None:
            with storage_errors("metrics", self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close; appending again opens the file anew."""
        if self._descriptor is not None:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    def read(self) -> list[MetricsRow]:
        """All rows in file order; none when there is no file. A torn last line is left out.

        Raises:
            DataError: another line than the last is malformed, with its number.
        """
        return self._read()[0]

    def last(self, wanted: Callable[[MetricsRow], bool] = lambda row: True) -> MetricsRow | None:
        """The last complete row that is wanted, or None. Reads from the end, and no more than it needs.

        Raises:
            DataError: a line that was read is malformed, or the file is none.
        """
        try:
            with open_record(self.path, MAX_BYTES) as file:
                for line in _lines_from_the_end(file):
                    row = _parse_line(line, self.path, None)
                    if wanted(row):
                        return row
        except FileNotFoundError:
            pass
        return None

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> TrimmedMetrics:
        """Drop every line with ``step > after_step``, the evaluations of some steps, and a torn last line; atomic.

        Raises:
            DataError: another line than the last is malformed; the file is unchanged.
            StorageError: the disk is full or not writable; the file is unchanged.
        """
        self.close()
        self._num_rows = None
        rows, torn = self._read()
        keeps = [row.step <= after_step and not (row.step in unevaluated and is_evaluation(row)) for row in rows]
        dropped = len(rows) - sum(keeps)
        if dropped or torn:
            lines = self.path.read_bytes().split(b"\n")[: len(rows)]
            kept = [line + b"\n" for line, is_kept in zip(lines, keeps, strict=True) if is_kept]
            replace_file(self.path, b"".join(kept))
        return TrimmedMetrics(dropped, torn)

    def _opened(self) -> int:
        if self._descriptor is None:
            is_new = not self.path.exists()
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            cut_torn_line(self._descriptor)
            if is_new:
                sync_folder(self.path.parent)
        return self._descriptor

    def _read(self) -> tuple[list[MetricsRow], int]:
        rows: list[MetricsRow] = []
        try:
            with open_record(self.path, MAX_BYTES) as file:
                lines = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
                for number, line in enumerate(lines, start=1):
                    if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:  # cut off while it was written
                        return rows, 1
                    rows.append(_parse_line(line, self.path, number))
        except FileNotFoundError:
            pass
        return rows, 0


def _lines_from_the_end(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, last first, of at most its last ``_MAX_LINE_BYTES``; the torn one at its end is left out."""
    start = file.seek(0, os.SEEK_END)
    lowest = max(0, start - _MAX_LINE_BYTES)
    rest, is_torn = b"", True
    while start > lowest:
        size = min(start, _BLOCK_BYTES)
        start = file.seek(start - size)
        first, *lines = (file.read(size) + rest).split(b"\n")
        yield from reversed(lines[:-1] if is_torn else lines)
        is_torn = is_torn and not lines
        rest = b"" if is_torn else first
    if start == 0 and not is_torn:
        yield rest


def _writable(values: Mapping[str, float]) -> dict[str, Any]:
    # float() also turns NumPy and zero-dimensional tensor numbers into plain ones
    plain = {name: float(value) for name, value in values.items()}
    return {name: value if math.isfinite(value) else str(value) for name, value in plain.items()}


def _parse_line(line: bytes, path: Path, number: int | None) -> MetricsRow:
    try:
        data = json.loads(line)
        if b"\\ud" in line.lower():  # half of a surrogate pair is no text
            json.dumps(data, ensure_ascii=False).encode()
        metrics = {str(name): float(value) for name, value in data["metrics"].items()}
        timing = {str(name): float(value) for name, value in data.get("timing", {}).items()}
        if abs(step := int(data["step"])) >= _MAX_CLOCK:
            raise ValueError(f"a step of {len(str(step))} digits")
        if wrong := [name for name, value in timing.items() if not abs(value) < _MAX_CLOCK]:
            raise ValueError(f"timing: {wrong[0][:40]} is {timing[wrong[0]]:g}")
        return MetricsRow(step, metrics, timing)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"not a line of metrics ({type(error).__name__}: {error}); repair or delete this line, then try again"
        raise DataError(path, what, number) from None


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of its run: its folder, its resolved recipe, and whom to tell of trouble."""

    folder: Path
    recipe: Mapping[str, Any]
    notify: Callable[[str], None]


class Tracker(Protocol):
    """Shows rows of metrics somewhere."""

    def start(self, kept: Sequence[MetricsRow]) -> None:
        """Called before the first row: what the run has already, and nothing else may be shown of it."""
        ...

    def log(self, row: MetricsRow) -> None:
        """Show one more row. Several may have the same step (an update and its evaluations)."""
        ...

    def close(self) -> None:
        """Show all that was given. ``start`` may follow again."""
        ...


class TrackedMetrics(MetricsLog):
    """A ``MetricsLog`` whose rows trackers are given, too."""

    def __init__(self, path: str | Path, trackers: Sequence[Tracker]) -> None:
        super().__init__(path)
        self.trackers = trackers
        self._started = False

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """As ``MetricsLog.append``; trackers hear of it when the line is written."""
        if not self._started and self.trackers:
            kept = self.read()
            for tracker in self.trackers:
                tracker.start(kept)
            self._started = True
        super().append(step, metrics, timing)
        for tracker in self.trackers:
            tracker.log(MetricsRow(step, dict(metrics), dict(timing or {})))

    def close(self) -> None:
        """As ``MetricsLog.close``; closes the trackers, too."""
        try:
            super().close()
        finally:
            if self._started:
                self._started = False
                for tracker in self.trackers:
                    tracker.close()


def build_trackers(words: Sequence[Any], run: TrackedRun) -> list[Tracker]:
    """The trackers that a recipe names (``track``), none of them opened yet.

    Raises:
        MissingExtra: the package of one is not installed.
    """
    return [
        find("tracker", word.name, f"track.{index}").bind(word.options, f"track.{index}")(run)
        for index, word in enumerate(words)
    ]


def is_evaluation(row: MetricsRow) -> bool:
    """Whether a line is of an evaluation alone."""
    return bool(row.metrics) and all(name.startswith(EVALUATION) for name in row.metrics)


@dataclass(frozen=True)
class EvaluationPoint:
    """The results of one evaluation during a run (``evals/generation.py``) after ``step`` updates."""

    step: int
    name: str
    results: dict[str, float]


def evaluation_points(rows: Sequence[MetricsRow]) -> list[EvaluationPoint]:
    """The evaluations that a run's metrics record as ``eval/<task>/<result>``."""
    points = []
    for row in rows:
        by_task: dict[str, dict[str, float]] = {}
        for name, value in row.metrics.items():
            if name.startswith(EVALUATION):
                task, _, result = name.removeprefix(EVALUATION).rpartition("/")
                by_task.setdefault(task, {})[result] = value
        points += [EvaluationPoint(row.step, task, results) for task, results in by_task.items()]
    return points
