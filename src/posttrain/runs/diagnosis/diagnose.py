"""Collect all findings about a run from its files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import DataError, UsageError
from posttrain.runs.diagnosis.explanations import explain_curves
from posttrain.runs.diagnosis.faults import UpdatesRead, read_updates
from posttrain.runs.diagnosis.findings import RunFinding, explanation
from posttrain.runs.diagnosis.levels import read_levels, read_warnings
from posttrain.runs.diagnosis.metric_curves import MetricCurves, curves_of
from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.runs.listing import RunState, summarize_run
from posttrain.store.metrics import MetricsLog, MetricsRow
from posttrain.untrusted import kind_of_file

OF_ROLLOUTS = ("reward", "entropy", "truncated", "uniform_groups")
OF_ROWS = ("loss", "grad_norm")
KINDS = ("fault", "audit", "level", "explanation")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about a run, faults first. ``num_records``: updates with rechecked balances."""

    state: RunState
    step: int
    steps: int
    num_records: int
    findings: tuple[RunFinding, ...]

    def of(self, kind: str) -> list[RunFinding]:
        """Select findings by kind."""
        return [one for one in self.findings if one.kind == kind]


def diagnose_run(folder: Path, audit: int | None = None) -> Diagnosis:
    """Diagnose a finished, running or interrupted run without executing any of its code.

    ``audit``: the update to recompute (``audit.audit_update``), or None.

    Raises:
        UsageError: not a language model run, no steps yet, or the update cannot be audited.
        DataError: a file is damaged.
    """
    directory = RunDirectory(folder)
    if "dictionary" in directory.read_recipe():
        raise UsageError(f"{folder}: this run trains a sparse autoencoder. Choose one from `posttrain train`")
    status = directory.read_status()
    primary = directory.primary_metric()
    summary = summarize_run(folder)
    if summary.problem:
        raise DataError(folder, f"damaged: {summary.problem}")
    rows = MetricsLog(folder / "metrics.jsonl").read()
    updates = UpdatesRead()
    database = folder / "rollouts.db"
    has_database = kind_of_file(database) != "nothing"
    if has_database:
        updates = read_updates(database)
    curves = curves_of(rows, updates.curves)
    if not curves.num_steps and not updates.curves.num_records:
        raise UsageError(f"{folder}: no training step is recorded yet. Start training, or wait until a step completes")
    found = [*updates.faults.values(), *_ended(status, summary.state), *_not_finite(rows)]
    found += [*read_warnings(rows), *read_levels(curves, primary)]
    found += [*_state_of(summary.state, summary.step, summary.steps), *_unread(directory, has_database, updates)]
    found += [*_missing(curves), *explain_curves(curves)]
    if audit is not None:
        from posttrain.runs.diagnosis.audit.audit import audit_update  # imported late, because it loads models

        found += audit_update(folder, audit)
    ordered = sorted(_once(found), key=lambda one: (KINDS.index(one.kind), one.step or 0))
    return Diagnosis(summary.state, summary.step, summary.steps, updates.curves.num_records, tuple(ordered))


def _once(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Drop repeated levels about the same metric."""
    kept: dict[tuple[str, str, str], RunFinding] = {}
    for one in findings:
        key = (one.kind, one.check, "" if one.kind == "level" else one.expected)
        kept.setdefault(key, one)
    return list(kept.values())


def _ended(status: RunStatus | None, state: RunState) -> Iterator[RunFinding]:
    """Report the message of a failed run."""
    if status is not None and state == "failed":
        found = status.message or "it failed without recording a reason"
        decide = "see the preceding events in log.txt; `posttrain runs resume` continues from the newest checkpoint"
        yield RunFinding("fault", "run", status.step, "a run that completes", found, decide, ("see the message",))


def _not_finite(rows: Sequence[MetricsRow]) -> Iterator[RunFinding]:
    """Report NaN or infinite training metrics."""
    first: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            if name in ("loss", "reward", "grad_norm") and not math.isfinite(value):
                first.setdefault(name, []).append(row.step)
    for name, steps in first.items():
        yield RunFinding(
            "fault",
            name,
            steps[0],
            "a finite number",
            "NaN or infinity",
            "repeat the preceding steps in fp32 with a lower train.lr",
            ("a NaN reward", "fp16", "a learning rate that is too high"),
            len(steps),
        )


def _state_of(state: RunState, step: int, steps: int) -> Iterator[RunFinding]:
    so_far = f"{step:,} of {steps:,} steps"
    if state == "running":
        yield explanation(
            "run", "a finished run", f"still running: {so_far}", "the diagnosis covers the steps recorded so far"
        )
    elif state in ("interrupted", "dead"):
        why = "stopping is normal; `posttrain runs resume` continues from the newest checkpoint"
        yield explanation("run", "a finished run", f"{state}: {so_far}", why)


def _unread(directory: RunDirectory, has_database: bool, updates: UpdatesRead) -> Iterator[RunFinding]:
    """Report missing records, without which no balance can be checked."""
    if updates.curves.num_records:
        return
    found = "no rollouts.db"
    if has_database:
        found = "none"
        made_by = directory.made_by()
        if made_by is not None and not updates.has_facts:
            found = f"none; posttrain {made_by[:40]}, which started this run, did not record updates"
    why = "balances need records, so only levels were checked; retrain to get them"
    yield explanation("records", "update records in rollouts.db", found, why)


def _missing(curves: MetricCurves) -> Iterator[RunFinding]:
    """Report absent metrics that levels depend on."""
    names: tuple[str, ...] = OF_ROWS
    if curves.has("reward") or curves.updates.first_losses:
        names = (*OF_ROLLOUTS, *OF_ROWS)
    missing = [name for name in names if not curves.has(name)]
    if not curves.num_steps:
        missing = ["all metrics"]
    if missing:
        yield explanation(
            "metrics",
            "metrics for every step in metrics.jsonl",
            f"missing: {', '.join(missing)}",
            "levels that need them were skipped",
        )
