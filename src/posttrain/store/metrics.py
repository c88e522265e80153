"""``metrics.jsonl``: one line of JSON per step.

``{"step": 7, "metrics": {"reward": 0.5, ...}, "timing": {"step_seconds": 0.4, ...}}``. Metrics are functions of the
run's recipe alone, so two runs compare bit for bit without ``timing``. Trackers get every line after it was written.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import DataError, RecipeError
from posttrain.registry import call, find, takes_one
from posttrain.store.durable import cut_torn_line, replace_file, storage_errors, sync_folder
from posttrain.store.reading import open_record

EVALUATION = "eval/"  # begins the name of an evaluation's result
MAX_BYTES = 1 << 33  # a million steps with two hundred metrics each stay below
_MAX_LINE_BYTES = 1 << 24
_TASK_AND_RESULT = re.compile(r"(?:(.*?)/)?((?:sampled_)?reward/[^/]*|[^/]*)", re.DOTALL)
_TAIL_BYTES = 1 << 20
_MAX_CLOCK = 1 << 53  # more than any clock or memory measures; a step is below it, too


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The numbers of one step. ``timing`` holds what the clock measured (seconds, rates, bytes)."""

    step: int
    metrics: dict[str, float]
    timing: dict[str, float] = field(default_factory=dict)


class MetricsLog:
    """The step metrics of one run; the file is created by the first line.

    Floats are written with their shortest exact text, so they come back bit for bit. Numbers that are not finite, for
    which JSON has no word, are the texts ``"nan"``, ``"inf"``, ``"-inf"``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Add the line of one step; raises StorageError if the disk is full or not writable."""
        if timing is None:
            timing = {}
        line = {"step": step, "metrics": _writable(metrics), "timing": _writable(timing)}
        content = json.dumps(line, allow_nan=False).encode() + b"\n"
        with storage_errors("metrics", self.path):
            if self._descriptor is None:
                is_new = not self.path.exists()
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                cut_torn_line(self._descriptor)
                if is_new:
                    sync_folder(self.path.parent)
            written = os.write(self._descriptor, content)
            while written < len(content):
                written += os.write(self._descriptor, content[written:])

    def num_rows(self) -> int:
        """Return the number of complete lines."""
        if self.path.exists():
            return self.path.read_bytes().count(b"\n")
        return 0

    def flush(self) -> None:
        """Wait until every line is on the disk."""
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
        """Return all rows in file order; none when there is no file. A torn last line is left out.

        Raises DataError, with the number, if another line is malformed.
        """
        return self._read()[0]

    def last(self, wanted: Callable[[MetricsRow], bool] = lambda row: True) -> MetricsRow | None:
        """Return the last complete row that is wanted, of the last megabyte of the file, or None."""
        try:
            with open_record(self.path, MAX_BYTES) as file:
                size = file.seek(0, os.SEEK_END)
                start = file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        if start:
            lines = lines[1:]  # the first one is cut
        rows = (_parse_line(line, self.path, None) for line in reversed(lines))
        return next(filter(wanted, rows), None)

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> int:
        """Drop every line with ``step > after_step``, the evaluations of some steps, and a torn last line; atomic.

        Returns the number of whole lines that were dropped.

        Raises:
            DataError: another line than the last is malformed; the file is unchanged.
            StorageError: the disk is full or not writable; the file is unchanged.
        """
        self.close()
        rows, is_torn = self._read()
        keeps = []
        for row in rows:
            is_unevaluated = row.step in unevaluated and is_evaluation(row)
            keeps.append(row.step <= after_step and not is_unevaluated)
        dropped = len(rows) - sum(keeps)
        if dropped or is_torn:
            lines = self.path.read_bytes().split(b"\n")[: len(rows)]
            kept = [line + b"\n" for line, is_kept in zip(lines, keeps, strict=True) if is_kept]
            replace_file(self.path, b"".join(kept))
        return dropped

    def _read(self) -> tuple[list[MetricsRow], bool]:
        """Return the rows, and True if a torn line follows them."""
        rows: list[MetricsRow] = []
        try:
            with open_record(self.path, MAX_BYTES) as file:
                lines = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
                for number, line in enumerate(lines, start=1):
                    if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:  # cut off while it was written
                        return rows, True
                    rows.append(_parse_line(line, self.path, number))
        except FileNotFoundError:
            pass
        return rows, False


def _writable(values: Mapping[str, float]) -> dict[str, float | str]:
    writable: dict[str, float | str] = {}
    for name, value in values.items():
        number = float(value)  # a plain number, of one of NumPy's or of a zero-dimensional tensor
        if math.isfinite(number):
            writable[name] = number
        else:
            writable[name] = str(number)
    return writable


def _parse_line(line: bytes, path: Path, number: int | None) -> MetricsRow:
    try:
        data = json.loads(line)
        if b"\\ud" in line.lower():  # half of a surrogate pair is no text
            json.dumps(data, ensure_ascii=False).encode()
        metrics = {str(name): float(value) for name, value in data["metrics"].items()}
        timing = {str(name): float(value) for name, value in data.get("timing", {}).items()}
        step = int(data["step"])
        if abs(step) >= _MAX_CLOCK:
            raise ValueError(f"a step of {len(str(step))} digits")
        for name, value in timing.items():
            if not abs(value) < _MAX_CLOCK:
                raise ValueError(f"timing: {name[:40]} is {value:g}")
        return MetricsRow(step, metrics, timing)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"not a line of metrics ({type(error).__name__}: {error}); repair or delete this line, then try again"
        raise DataError(path, what, number) from None


@dataclass(frozen=True)
class TrackedRun:
    """The run of a tracker: its folder, its resolved recipe, and a function that is given messages about trouble."""

    folder: Path
    recipe: Mapping[str, Any]
    notify: Callable[[str], None]


class Tracker(Protocol):
    """Shows rows of metrics somewhere.

    ``start`` comes before the first row, with the rows that the run has already: nothing else may be shown of it.
    ``log`` shows one more row; several may have the same step. After ``close``, ``start`` may follow again.
    """

    def start(self, kept: Sequence[MetricsRow]) -> None: ...

    def log(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...


class TrackedMetrics(MetricsLog):
    """A ``MetricsLog`` whose rows are given to trackers, too."""

    def __init__(self, path: str | Path, trackers: Sequence[Tracker]) -> None:
        super().__init__(path)
        self.trackers = trackers
        self._started = False

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Add the line of one step as ``MetricsLog.append`` does, and give it to the trackers once it is written."""
        if not self._started and self.trackers:
            kept = self.read()
            for tracker in self.trackers:
                tracker.start(kept)
            self._started = True
        super().append(step, metrics, timing)
        row = MetricsRow(step, dict(metrics), dict(timing or ()))
        for tracker in self.trackers:
            tracker.log(row)

    def close(self) -> None:
        """Close the file and the trackers."""
        try:
            super().close()
        finally:
            if self._started:
                self._started = False
                for tracker in self.trackers:
                    tracker.close()


def build_trackers(components: Sequence[Any], run: TrackedRun) -> list[Tracker]:
    """Return the trackers that a recipe names (``track``), none of them opened yet.

    Raises:
        RecipeError: a function of the user takes something else than the run, or returns no tracker.
    """
    return [_build_tracker(component, f"track.{index}", run) for index, component in enumerate(components)]


def _build_tracker(component: Any, key: str, run: TrackedRun) -> Tracker:
    make = find("tracker", component.name, key).bind(component.options, key)
    if not takes_one(make):
        raise RecipeError(f"{key}: {component.name} must take one argument, the run. Give def tracker(run)")
    tracker: Tracker = call(key, make, run)
    missing = [name for name in ("start", "log", "close") if not callable(getattr(tracker, name, None))]
    if missing:
        raise RecipeError(
            f"{key}: {component.name} returned {type(tracker).__name__}, which has no {', '.join(missing)}. Return an "
            "object with the methods start, log and close"
        )
    return tracker


def is_evaluation(row: MetricsRow) -> bool:
    """Return whether a line is of an evaluation alone."""
    return bool(row.metrics) and all(name.startswith(EVALUATION) for name in row.metrics)


@dataclass(frozen=True)
class EvaluationPoint:
    """The results of one evaluation during a run (``evaluation/generation.py``) after ``step`` updates."""

    step: int
    name: str
    results: dict[str, float]


def evaluation_points(rows: Sequence[MetricsRow]) -> list[EvaluationPoint]:
    """Return the evaluations that a run's metrics record as ``eval/<task>/<result>``."""
    points = []
    for row in rows:
        by_task: dict[str, dict[str, float]] = {}
        for name, value in row.metrics.items():
            if name.startswith(EVALUATION):
                found = _TASK_AND_RESULT.fullmatch(name, len(EVALUATION))
                assert found is not None, "both parts may be empty"
                by_task.setdefault(found[1] or "", {})[found[2]] = value
        points += [EvaluationPoint(row.step, task, results) for task, results in by_task.items()]
    return points


NUM_BATCHES = 3  # without a difference in reward, or without a gradient, before a warning
NUM_STEPS = 10  # in which no weight moved, before a warning
MOVED = "weights_moved"  # 1 where a step changed one of a sample of the weights, else 0; of the first steps alone
# Causes of equal rewards: a metric that lies between two values in all batches, and what to do.
_CAUSES = (
    ("truncated", 0.9, 1.0, "Nearly all answers are cut off: raise rollout.max_tokens"),
    ("format", 0.0, 0.0, "No answer has the format that the reward reads. Start from a model after SFT on that format "
     "(tiny-sft, or a run), or set prompt.template to one that it knows"),
    ("accuracy", 0.0, 0.0, "No answer is right. Take easier problems, a model after SFT, or a larger "
     "rollout.group_size; read some with `posttrain generate`"),
    ("accuracy", 1.0, 1.0, "Every answer is right: take harder problems"),
)  # fmt: skip
_OTHER_CAUSE = (
    "Every answer of a group earned the same (mean reward {reward:.3f}). Raise rollout.temperature or "
    "rollout.group_size, or check the reward"
)


def learning_warnings(rows: Sequence[MetricsRow]) -> dict[str, str]:
    """Return by metric why a run does not learn, with likely causes and remedies; empty for a run that may learn.

    ``uniform_groups``: in the first three batches no group differed in reward. ``grad_norm``: the gradient of the
    first three steps was 0. ``weights_moved``: no weight moved in the first ten steps. Of several, which have one
    cause, the first.
    """
    steps = [row.metrics for row in rows if not is_evaluation(row)]
    batches = [metrics for metrics in steps if "uniform_groups" in metrics][:NUM_BATCHES]
    # all rewards of a group are equal, and no other answer gives them an advantage
    is_uniform = [one["uniform_groups"] == 1.0 and one.get("advantage_std", 1.0) == 0.0 for one in batches]
    if len(batches) == NUM_BATCHES and all(is_uniform):
        cause = _OTHER_CAUSE
        for name, low, high, text in _CAUSES:
            if all(low <= one.get(name, -1.0) <= high for one in batches):
                cause = text
                break
        cause = cause.format(**batches[-1])
        what = f"in the first {NUM_BATCHES} batches no group of answers differed in reward, so nothing can be learned"
        return {"uniform_groups": f"{what}. {cause}"}
    if len(steps) >= NUM_BATCHES and all(metrics.get("grad_norm") == 0.0 for metrics in steps[:NUM_BATCHES]):
        cause = "No token was trained: look at the rows with `posttrain data show`, and at rollout.select"
        if any(metrics.get("trained_tokens") for metrics in steps[:NUM_BATCHES]):
            cause = "Check that the weights of objective and rewards are not 0, and that answers differ"
        return {"grad_norm": f"the gradient of the first {NUM_BATCHES} steps is 0. {cause}"}
    moved = [metrics[MOVED] for metrics in steps[:NUM_STEPS] if MOVED in metrics]
    if len(moved) == NUM_STEPS and not any(moved):
        rate = max(metrics.get("lr", 0.0) for metrics in steps[:NUM_STEPS])
        cause = "is too small for the dtype of the weights: raise train.lr, or set model.dtype fp32"
        return {MOVED: f"no weight has moved in {NUM_STEPS} steps. The learning rate of {rate:g} {cause}"}
    return {}
