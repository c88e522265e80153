"""All findings about a run, from its files."""

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
    """The findings about a run, faults first; ``num_records``: its updates whose balances were drawn again."""

    state: RunState
    step: int
    steps: int
    num_records: int
    findings: tuple[RunFinding, ...]

    def of(self, kind: str) -> list[RunFinding]:
        """Return the findings of a kind."""
        return [one for one in self.findings if one.kind == kind]


def diagnose_run(folder: Path, audit: int | None = None) -> Diagnosis:
    """Read a run, which may be finished, running or interrupted, and return what is found; no code of it is run.

    ``audit``: the update that is computed again (``audit.audit_update``); None: none is.

    Raises:
        UsageError: it trains no language model, has made no step yet, or the update cannot be audited.
        DataError: a file of it is damaged.
    """
    directory = RunDirectory(folder)
    if "dictionary" in directory.read_recipe():
        raise UsageError(f"{folder}: this run trains a sparse autoencoder. Give a run of `posttrain train`")
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
        raise UsageError(f"{folder}: no step is recorded, so nothing can be read. Wait for its first step, or train it")
    found = [*updates.faults.values(), *_ended(status, summary.state), *_not_finite(rows)]
    found += [*read_warnings(rows), *read_levels(curves, primary)]
    found += [*_state_of(summary.state, summary.step, summary.steps), *_unread(directory, has_database, updates)]
    found += [*_missing(curves), *explain_curves(curves)]
    if audit is not None:
        from posttrain.runs.diagnosis.audit.audit import audit_update  # it loads models

        found += audit_update(folder, audit)
    ordered = sorted(_once(found), key=lambda one: (KINDS.index(one.kind), one.step or 0))
    return Diagnosis(summary.state, summary.step, summary.steps, updates.curves.num_records, tuple(ordered))


def _once(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Without a level about a number that a level before it is about."""
    kept: dict[tuple[str, str, str], RunFinding] = {}
    for one in findings:
        key = (one.kind, one.check, "" if one.kind == "level" else one.expected)
        kept.setdefault(key, one)
    return list(kept.values())


def _ended(status: RunStatus | None, state: RunState) -> Iterator[RunFinding]:
    """A run that failed says why."""
    if status is not None and state == "failed":
        found = status.message or "it failed, and recorded no reason"
        decide = "log.txt has the events before it; `posttrain runs resume` goes on from the newest checkpoint"
        yield RunFinding("fault", "run", status.step, "a run that ends", found, decide, ("see the message",))


def _not_finite(rows: Sequence[MetricsRow]) -> Iterator[RunFinding]:
    """Metrics of updates that are NaN or infinite."""
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
            "train the steps before it again in fp32 with a lower train.lr",
            ("a reward that is NaN", "fp16", "a learning rate that is too high"),
            len(steps),
        )


def _state_of(state: RunState, step: int, steps: int) -> Iterator[RunFinding]:
    so_far = f"{step:,} of {steps:,} steps"
    if state == "running":
        yield explanation(
            "run", "a run that is finished", f"still running: {so_far}", "what is on disk so far was read"
        )
    elif state in ("interrupted", "dead"):
        why = "a run may be stopped; `posttrain runs resume` goes on from its newest checkpoint"
        yield explanation("run", "a run that is finished", f"{state}: {so_far}", why)


def _unread(directory: RunDirectory, has_database: bool, updates: UpdatesRead) -> Iterator[RunFinding]:
    """Records that are not there, so that no balance was drawn."""
    if updates.curves.num_records:
        return
    found = "no rollouts.db"
    if has_database:
        found = "none"
        made_by = directory.made_by()
        if made_by is not None and not updates.has_facts:
            found = f"none; posttrain {made_by[:40]} began this run before updates were recorded"
    why = "without records no balance can be drawn, only levels are read; train it again to have them"
    yield explanation("records", "a record of each update in rollouts.db", found, why)


def _missing(curves: MetricCurves) -> Iterator[RunFinding]:
    """Metrics that levels are read from, and that the run has not."""
    names: tuple[str, ...] = OF_ROWS
    if curves.has("reward") or curves.updates.first_losses:
        names = (*OF_ROLLOUTS, *OF_ROWS)
    missing = [name for name in names if not curves.has(name)]
    if not curves.num_steps:
        missing = ["all of them"]
    if missing:
        yield explanation(
            "metrics",
            "numbers of each step in metrics.jsonl",
            f"missing: {', '.join(missing)}",
            "levels of missing numbers are not read",
        )
