"""Results of what-if: differences from the unchanged future, and a bit-exact comparison with the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from posttrain.evaluation.statistics import Summary, summarize_seeds
from posttrain.evaluation.tables import NOTHING, TextTable, to_markdown
from posttrain.runs.directory import RunDirectory
from posttrain.runs.what_if.plan import (
    UNCHANGED,
    Future,
    WhatIfPlan,
    explain_change,
    future_folder,
    read_plan,
)
from posttrain.store.checkpoint_files import manifest_digests, step_folder
from posttrain.store.durable import sayable
from posttrain.store.metric_names import Metric, metric_of
from posttrain.store.metrics import EvaluationPoint, MetricsLog, MetricsRow, evaluation_points, is_evaluation
from posttrain.untrusted import bullets, plain

# Metric for comparing steps: reward if the run samples, else loss.
TRAINING = ("reward", "loss")


@dataclass(frozen=True)
class FutureResult:
    """One played future: state, step metrics, and held-out results.

    ``state``: ``finished`` or ``stopped`` if complete, else ``failed`` (see ``message``), ``interrupted`` or
    ``running``. ``folder``: run directory, for ``pt.load_run``.
    """

    future: Future
    folder: Path
    state: str
    step: int
    message: str | None
    rows: list[MetricsRow]
    evaluations: list[EvaluationPoint]

    @property
    def steps(self) -> list[MetricsRow]:
        """Metrics rows for training steps."""
        return [row for row in self.rows if not is_evaluation(row)]

    def mean(self, name: str) -> float | None:
        """Average a metric over the steps that have it."""
        values = [row.metrics[name] for row in self.steps if name in row.metrics]
        if not values:
            return None
        return fmean(values)

    def last(self, name: str) -> float | None:
        """Average a held-out metric over tasks at the last evaluated step."""
        steps = [point.step for point in self.evaluations]
        if not steps:
            return None
        return metric_of(name).mean(point.results for point in self.evaluations if point.step == max(steps))


@dataclass(frozen=True)
class Equality:
    """Bit-exact comparison between the unchanged future and the run's records.

    ``num_steps`` and ``num_values``: amount compared. ``weights``: weights and optimizer state after the last step are
    equal; None if the run has no checkpoint for it. ``difference``: the first difference, if any.
    """

    num_steps: int
    num_values: int
    weights: bool | None
    difference: str | None

    @property
    def holds(self) -> bool:
        """True if everything matches."""
        return self.difference is None and self.weights is not False

    def describe(self, plan: WhatIfPlan) -> str:
        """Describe the comparison in one sentence."""
        run = Path(plan.run).name
        if self.difference is not None:
            return (
                f"the unchanged future DIFFERS from {run}: {self.difference}. Library versions or hardware changed, or "
                "the engine is not deterministic; compare the futures only with each other"
            )
        if self.weights is False:
            return f"the unchanged future DIFFERS from {run} in the weights after step {plan.end}"
        parts = []
        if self.num_steps:
            parts.append(f"in all {self.num_values:,} numbers of {self.num_steps} steps")
        if self.weights:
            parts.append(f"in weights and optimizer state after step {plan.end}")
        if not parts:
            return f"{run} did not record these steps, so nothing could be compared"
        return f"the unchanged future equals {run} to the bit {' and '.join(parts)}"


@dataclass(frozen=True)
class WhatIfResults:
    """Everything reported: the plan, the comparison with the run, and all futures.

    ``primary``: held-out metric. ``training``: metric for training steps.
    """

    plan: WhatIfPlan
    equality: Equality
    futures: list[FutureResult]
    primary: Metric
    training: Metric
    run_rows: list[MetricsRow]

    def unchanged(self, seed: int = 0) -> FutureResult | None:
        """Find the unchanged future with this seed, if complete."""
        for one in self.futures:
            if one.future.is_unchanged and one.future.seed == seed and self.is_whole(one):
                return one
        return None

    def is_whole(self, one: FutureResult) -> bool:
        """Check if a future was played to the end."""
        return one.state in ("finished", "stopped") and one.step == self.plan.end

    def labels(self) -> list[str]:
        """List change labels, the unchanged one first."""
        return list(dict.fromkeys(one.future.label for one in self.futures))

    def of(self, label: str) -> list[FutureResult]:
        """List completed futures with this change, by seed."""
        return [one for one in self.futures if one.future.label == label and self.is_whole(one)]

    def summary(self, label: str, name: str, *, held_out: bool = False) -> Summary | None:
        """Average a metric over seeds: from training steps, or from the last evaluation."""
        return summarize_seeds(list(self._values(label, name, held_out).values()))

    def difference(self, label: str, name: str, *, held_out: bool = False) -> Summary | None:
        """Average over seeds the difference from the unchanged future with the same seed."""
        base = self._values(UNCHANGED, name, held_out)
        own = self._values(label, name, held_out)
        return summarize_seeds([own[seed] - base[seed] for seed in own if seed in base])

    def _values(self, label: str, name: str, held_out: bool) -> dict[int, float]:
        values = {}
        for one in self.of(label):
            value = one.last(name) if held_out else one.mean(name)
            if value is not None and math.isfinite(value):
                values[one.future.seed] = value
        return values

    @property
    def has_evaluations(self) -> bool:
        """True if any future was evaluated with the primary metric."""
        return any(one.last(self.primary.name) is not None for one in self.futures)

    @property
    def failures(self) -> dict[str, str]:
        """Map labels of failed futures to the reason."""
        return {explain_change(one.future): one.message or "no reason" for one in self.futures if one.state == "failed"}

    def table(self) -> TextTable:
        """Build a table with one row per change: means over seeds, and differences from the unchanged future."""
        steps = f"steps {self.plan.at + 1}–{self.plan.end}"
        header = ["future", f"{self.training.label}, {steps}", "difference"]
        if self.has_evaluations:
            header += [f"held-out {self.primary.label}, last", "difference"]
        lines = [self._line(label) for label in self.labels()]
        return TextTable(f"Futures after step {self.plan.at} of {Path(self.plan.run).name}", header, lines)

    def _line(self, label: str) -> list[str]:
        done = len(self.of(label))
        shown = label
        if done < self.plan.num_seeds:
            shown = f"{label} ({self._missing(label)})"
        line = [shown]
        columns = [(self.training, False)]
        if self.has_evaluations:
            columns.append((self.primary, True))
        for metric, held_out in columns:
            line.append(_show(metric, self.summary(label, metric.name, held_out=held_out)))
            difference = None
            if label != UNCHANGED:
                difference = self.difference(label, metric.name, held_out=held_out)
            line.append(_show(metric, difference, is_signed=True))
        return line

    def _missing(self, label: str) -> str:
        states = [one.state for one in self.futures if one.future.label == label and not self.is_whole(one)]
        return ", ".join(dict.fromkeys(states))

    def to_markdown(self) -> str:
        """Render ``table.md``."""
        lines = [self.equality.describe(self.plan), *self.notes()]
        lines += [f"{label}: {message}" for label, message in self.failures.items()]
        table = self.table()
        return "\n".join([f"# {plain(table.title)}\n", to_markdown(replace(table, title="")), bullets(lines)])

    def notes(self) -> list[str]:
        """Notes on reading the numbers."""
        first = self.plan.at + 1
        lines = [f"changes take effect at step {first}; prompts and answers are numbered from 0"]
        if self.plan.num_seeds > 1:
            lines.append(
                f"{self.plan.num_seeds} seeds: the run's seed, and new ones starting with the second rollout batch; "
                "differences are relative to the unchanged future with the same seed, ± 95 % interval"
            )
        else:
            lines.append("one seed: differences are exact but may not hold for other seeds; use --seeds for more")
        lines += [f"{label}: no effect; all metrics equal the unchanged future's" for label in self.idle()]
        return lines

    def idle(self) -> list[str]:
        """List changes without any effect on the metrics."""
        found = []
        for label in self.labels():
            pairs = [(one, self.unchanged(one.future.seed)) for one in self.of(label)]
            if label == UNCHANGED or not pairs:
                continue
            if all(base is not None and _numbers(one) == _numbers(base) for one, base in pairs):
                found.append(label)
        return found

    def to_json(self) -> str:
        """Render ``results.json``: all results, unrounded."""
        content = {
            "run": self.plan.run,
            "at": self.plan.at,
            "end": self.plan.end,
            "equality": {"holds": self.equality.holds, "says": self.equality.describe(self.plan)},
            "training": self.training.name,
            "primary": self.primary.name,
            "futures": [self._entry(one) for one in self.futures],
        }
        return json.dumps(sayable(content), indent=1, allow_nan=False)

    def _entry(self, one: FutureResult) -> dict[str, object]:
        return {
            "name": one.future.name,
            "change": one.future.label,
            "seed": one.future.seed,
            "state": one.state,
            "message": one.message,
            "step": one.step,
            self.training.name: one.mean(self.training.name),
            "held_out": one.last(self.primary.name),
        }


def _numbers(one: FutureResult) -> list[tuple[int, dict[str, str]]]:
    """Serialize all metrics exactly for comparison."""
    return [(row.step, {name: value.hex() for name, value in row.metrics.items()}) for row in one.rows]


def _show(metric: Metric, summary: Summary | None, *, is_signed: bool = False) -> str:
    """Format a mean, with its interval if there are several seeds: ``0.512``, ``+0.021 ± 0.010``."""
    if summary is None:
        return NOTHING
    text = metric.show(summary.mean)
    if is_signed and summary.mean == 0:
        text = "0"
    elif is_signed:
        text = f"{'+' if summary.mean > 0 else ''}{_precise(metric, summary.mean)}"
    if summary.half_width:
        text = f"{text} ± {_precise(metric, summary.half_width)}"
    return text


def _precise(metric: Metric, value: float) -> str:
    """Format a difference, which may be tiny, with at least one nonzero digit."""
    text = metric.show(value)
    if not any(digit in text for digit in "123456789"):
        return f"{value:.1e}"
    return text


def read_results(folder: Path) -> WhatIfResults:
    """Load the results in a folder.

    Raises:
        UsageError: no futures in it. DataError: a record is damaged.
    """
    plan = read_plan(folder)
    futures = [_read_future(folder, future) for future in plan.futures]
    run = Path(plan.run)
    run_rows: list[MetricsRow] = []
    if (run / "metrics.jsonl").is_file():
        run_rows = MetricsLog(run / "metrics.jsonl").read()
    names = {name for one in futures for row in one.steps for name in row.metrics}
    training = next((name for name in TRAINING if name in names), TRAINING[0])
    equality = compare_with_run(plan, futures[0], run_rows)
    return WhatIfResults(plan, equality, futures, metric_of(plan.primary), metric_of(training), run_rows)


def _read_future(folder: Path, future: Future) -> FutureResult:
    place = future_folder(folder, future)
    status = RunDirectory(place).read_status()
    rows = MetricsLog(place / "metrics.jsonl").read()
    points = evaluation_points(rows)
    if status is None:
        return FutureResult(future, place, "interrupted", 0, None, rows, points)
    return FutureResult(future, place, status.state, status.step, status.message, rows, points)


def compare_with_run(plan: WhatIfPlan, unchanged: FutureResult, run_rows: Sequence[MetricsRow]) -> Equality:
    """Compare the unchanged future (with the run's seed) with the run's records for the same steps."""
    ours = _by_place(plan, unchanged.rows)
    theirs = _by_place(plan, run_rows)
    shared = [place for place in ours if place in theirs]
    num_values = 0
    difference = None
    for place in shared:
        num_values += len(theirs[place])
        if difference is None:
            difference = _first_difference(place[0], ours[place], theirs[place])
    steps = {step for step, _ in shared}
    weights = _same_weights(plan, unchanged)
    return Equality(len(steps), num_values, weights, difference)


def _by_place(plan: WhatIfPlan, rows: Sequence[MetricsRow]) -> dict[tuple[int, bool], dict[str, float]]:
    """Group metrics by step and kind (training or held-out), within the played steps."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for row in rows:
        if plan.at < row.step <= plan.end:
            found.setdefault((row.step, is_evaluation(row)), {}).update(row.metrics)
    return found


def _first_difference(step: int, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str | None:
    for name in {**theirs, **ours}:
        if name not in ours or name not in theirs:
            return f"{name} at step {step} is present only on one side"
        one = ours[name]
        other = theirs[name]
        if one.hex() != other.hex():  # bitwise: equal NaNs match, and -0.0 differs from 0.0
            return f"{name} at step {step} is {one!r}, but was {other!r}"
    return None


def _same_weights(plan: WhatIfPlan, unchanged: FutureResult) -> bool | None:
    """Compare weight and optimizer files after the last step; None if the run did not keep them."""
    ours = manifest_digests(step_folder(unchanged.folder / "checkpoints", plan.end))
    theirs = manifest_digests(step_folder(Path(plan.run) / "checkpoints", plan.end))
    names = [name for name in theirs if name.endswith(".safetensors")]
    if not names or not ours:
        return None
    return all(ours.get(name) == theirs[name] for name in names)
