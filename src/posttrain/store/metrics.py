"""``metrics.jsonl``: one JSON line per step.

``{"step": 7, "metrics": {"reward": 0.5, ...}, "timing": {"step_seconds": 0.4, ...}}``. Metrics depend only on the
recipe, so runs can be compared bit for bit after dropping ``timing``. Trackers receive each line once written.
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

EVALUATION = "eval/"  # prefix of evaluation metrics
MAX_BYTES = 1 << 33  # fits a million steps with 200 metrics each
_MAX_LINE_BYTES = 1 << 24
_TASK_AND_RESULT = re.compile(r"(?:(.*?)/)?((?:sampled_)?reward/[^/]*|[^/]*)", re.DOTALL)
_TAIL_BYTES = 1 << 20
_MAX_CLOCK = 1 << 53  # upper bound for steps, clock times and memory sizes


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics for one step. ``timing`` contains measured seconds, rates and bytes."""

    step: int
    metrics: dict[str, float]
    timing: dict[str, float] = field(default_factory=dict)


class MetricsLog:
    """Step metrics for one run, created when the first line is written.

    Floats are written as their shortest exact representation, so they are restored bit for bit. JSON lacks non-finite
    numbers, so they are written as ``"nan"``, ``"inf"`` and ``"-inf"``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Append one step; raises StorageError if the disk cannot be written."""
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
        """Count complete lines."""
        if self.path.exists():
            return self.path.read_bytes().count(b"\n")
        return 0

    def flush(self) -> None:
        """Sync all lines to disk."""
        if self._descriptor is not None:
            with storage_errors("metrics", self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close; a later append reopens the log."""
        if self._descriptor is not None:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    def read(self) -> list[MetricsRow]:
        """Read all rows in file order, ignoring a torn last line. Empty if missing.

        Raises DataError with a line number if any other line is malformed.
        """
        return self._read()[0]

    def last(self, wanted: Callable[[MetricsRow], bool] = lambda row: True) -> MetricsRow | None:
        """Find the last complete matching row in the final megabyte, or None."""
        try:
            with open_record(self.path, MAX_BYTES) as file:
                size = file.seek(0, os.SEEK_END)
                start = file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        if start:
            lines = lines[1:]  # partial first line
        rows = (_parse_line(line, self.path, None) for line in reversed(lines))
        return next(filter(wanted, rows), None)

    def trim(self, after_step: int, unevaluated: Collection[int] = ()) -> int:
        """Atomically drop lines with ``step > after_step``, evaluations at ``unevaluated`` steps, and a torn last
        line.

        Returns the number of complete lines dropped.

        Raises:
            DataError: malformed line before the last one; nothing was changed.
            StorageError: disk full or not writable; nothing was changed.
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
        """Read rows and report if a torn line follows."""
        rows: list[MetricsRow] = []
        try:
            with open_record(self.path, MAX_BYTES) as file:
                lines = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
                for number, line in enumerate(lines, start=1):
                    if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:  # torn by a kill
                        return rows, True
                    rows.append(_parse_line(line, self.path, number))
        except FileNotFoundError:
            pass
        return rows, False


def _writable(values: Mapping[str, float]) -> dict[str, float | str]:
    writable: dict[str, float | str] = {}
    for name, value in values.items():
        number = float(value)  # converts NumPy scalars and 0-d tensors
        if math.isfinite(number):
            writable[name] = number
        else:
            writable[name] = str(number)
    return writable


def _parse_line(line: bytes, path: Path, number: int | None) -> MetricsRow:
    try:
        data = json.loads(line)
        if b"\\ud" in line.lower():  # a lone surrogate is not valid text
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
    """Run information for trackers: folder, resolved recipe, and a callback for warnings."""

    folder: Path
    recipe: Mapping[str, Any]
    notify: Callable[[str], None]


class Tracker(Protocol):
    """Displays metrics in another tool.

    ``start`` receives existing rows before ``log`` is called, and replaces anything shown earlier for this run.
    ``log`` shows one row; several rows may share a step. After ``close``, ``start`` may be called again.
    """

    def start(self, kept: Sequence[MetricsRow]) -> None: ...

    def log(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...


class TrackedMetrics(MetricsLog):
    """A ``MetricsLog`` that also forwards rows to trackers."""

    def __init__(self, path: str | Path, trackers: Sequence[Tracker]) -> None:
        super().__init__(path)
        self.trackers = trackers
        self._started = False

    def append(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float] | None = None) -> None:
        """Append one step through ``MetricsLog.append``, then forward it to trackers."""
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
        """Close this log and all trackers."""
        try:
            super().close()
        finally:
            if self._started:
                self._started = False
                for tracker in self.trackers:
                    tracker.close()


def build_trackers(components: Sequence[Any], run: TrackedRun) -> list[Tracker]:
    """Build trackers from a recipe's ``track`` list without starting them.

    Raises:
        RecipeError: a custom function has the wrong signature, or did not return a tracker.
    """
    return [_build_tracker(component, f"track.{index}", run) for index, component in enumerate(components)]


def _build_tracker(component: Any, key: str, run: TrackedRun) -> Tracker:
    make = find("tracker", component.name, key).bind(component.options, key)
    if not takes_one(make):
        raise RecipeError(f"{key}: {component.name} must take one argument. Write def tracker(run)")
    tracker: Tracker = call(key, make, run)
    missing = [name for name in ("start", "log", "close") if not callable(getattr(tracker, name, None))]
    if missing:
        raise RecipeError(
            f"{key}: {component.name} returned {type(tracker).__name__}, which has no {', '.join(missing)}. Return "
            "objects with start, log and close methods"
        )
    return tracker


def is_evaluation(row: MetricsRow) -> bool:
    """Check if a row contains only evaluation metrics."""
    return bool(row.metrics) and all(name.startswith(EVALUATION) for name in row.metrics)


@dataclass(frozen=True)
class EvaluationPoint:
    """Evaluation results after ``step`` updates of a run (``evaluation/generation.py``)."""

    step: int
    name: str
    results: dict[str, float]


def evaluation_points(rows: Sequence[MetricsRow]) -> list[EvaluationPoint]:
    """Collect evaluations from metrics named ``eval/<task>/<result>``."""
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


NUM_BATCHES = 3  # batches with equal rewards, or steps without gradients, before a warning
NUM_STEPS = 10  # steps without a changed weight before a warning
MOVED = "weights_moved"  # 1 if any sampled weight changed, else 0; recorded only for early steps
# Causes of equal rewards: metric, lower and upper bound in every batch, remedy.
_CAUSES = (
    ("truncated", 0.9, 1.0, "Nearly all answers are cut off: raise rollout.max_tokens"),
    ("format", 0.0, 0.0, "Answers never match the reward's format. Start from a model after SFT on this format "
     "(tiny-sft, or your run), or choose a matching prompt.template"),
    ("accuracy", 0.0, 0.0, "Accuracy is 0. Use easier problems, a model after SFT, or a larger "
     "rollout.group_size; read some answers with `posttrain generate`"),
    ("accuracy", 1.0, 1.0, "Accuracy is 1: use harder problems"),
)  # fmt: skip
_OTHER_CAUSE = (
    "Rewards are equal within each group (mean reward {reward:.3f}). Raise rollout.temperature or "
    "rollout.group_size, or check the reward"
)


def learning_warnings(rows: Sequence[MetricsRow]) -> dict[str, str]:
    """Explain why a run does not learn, with likely causes and remedies by metric. Empty if no problem is found.

    ``uniform_groups``: every group had equal rewards throughout the first three batches. ``grad_norm``: zero
    gradients for three steps. ``weights_moved``: unchanged weights after ten steps. If several apply, only the first
    is reported, since they share a cause.
    """
    steps = [row.metrics for row in rows if not is_evaluation(row)]
    batches = [metrics for metrics in steps if "uniform_groups" in metrics][:NUM_BATCHES]
    # rewards are equal within every group, and advantages are equal across answers
    is_uniform = [one["uniform_groups"] == 1.0 and one.get("advantage_std", 1.0) == 0.0 for one in batches]
    if len(batches) == NUM_BATCHES and all(is_uniform):
        cause = _OTHER_CAUSE
        for name, low, high, text in _CAUSES:
            if all(low <= one.get(name, -1.0) <= high for one in batches):
                cause = text
                break
        cause = cause.format(**batches[-1])
        what = f"in the first {NUM_BATCHES} batches rewards were equal within every group, so nothing can be learned"
        return {"uniform_groups": f"{what}. {cause}"}
    if len(steps) >= NUM_BATCHES and all(metrics.get("grad_norm") == 0.0 for metrics in steps[:NUM_BATCHES]):
        cause = "No tokens were trained: check your rows with `posttrain data show`, and check rollout.select"
        if any(metrics.get("trained_tokens") for metrics in steps[:NUM_BATCHES]):
            cause = "Check that objective and reward weights are nonzero, and that answers differ"
        return {"grad_norm": f"the gradient of the first {NUM_BATCHES} steps is 0. {cause}"}
    moved = [metrics[MOVED] for metrics in steps[:NUM_STEPS] if MOVED in metrics]
    if len(moved) == NUM_STEPS and not any(moved):
        rate = max(metrics.get("lr", 0.0) for metrics in steps[:NUM_STEPS])
        cause = "is too small for this weight dtype: raise train.lr, or set model.dtype fp32"
        return {MOVED: f"no weight has moved in {NUM_STEPS} steps. The learning rate of {rate:g} {cause}"}
    return {}
