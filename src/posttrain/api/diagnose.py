"""Findings about a run's health."""

from __future__ import annotations

from pathlib import Path

from posttrain.api.arguments import check_whole, plain_path
from posttrain.api.inputs import Place
from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.registry import stop_import
from posttrain.runs.diagnosis.diagnose import diagnose_run
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.diagnosis.others.checks import READERS, diagnose_records
from posttrain.runs.directory import find_run


def diagnose(
    run: Place, *, audit: int | None = None, trainer: str | None = None, runs_dir: Place = "runs"
) -> list[RunFinding]:
    """Diagnose a run from its files, like ``posttrain doctor``.

    The run may be finished, running or interrupted. It is opened read-only, and its code is never executed.

    Args:
        run: a run, a folder, or a run name in ``runs_dir``.
        audit: update to recompute, counted from 1. Gradients and the optimizer step are recomputed with the
            transformers forward pass and plain code. Needs a checkpoint right before the update; if there is also one
            right after it, all weights are compared.
        trainer: ``"trl"`` or ``"nemo-rl"`` if ``run`` is a file or folder written by that trainer.

    Returns:
        Findings, faults first.

    Raises:
        UsageError: unknown run, no finished step, or an update that cannot be audited.
        DataError: a damaged file.

    Examples:
        >>> [finding for finding in pt.diagnose("runs/mine") if finding.kind == "fault"]
        []
    """
    stop_import()
    root, name = plain_path("runs_dir", runs_dir), plain_path("run", run)
    if trainer is not None:
        if audit is not None:
            raise UsageError(
                "audit: needs a posttrain checkpoint, so other trainers' records cannot be audited. Remove it"
            )
        return list(diagnose_records(Path(name), _checked_trainer(trainer)).findings)
    update: int | None = None
    if audit is not None:
        check_whole("audit", audit)
        update = int(audit)
        if update < 1:
            raise UsageError(f"audit: {update} is not an update. Updates are numbered from 1")
    return list(diagnose_run(Path(find_run(root, name)), update).findings)


def _checked_trainer(trainer: object) -> str:
    """Check a trainer name.

    Raises:
        UsageError: records from this trainer cannot be read.
    """
    if not isinstance(trainer, str) or trainer not in READERS:
        raise UsageError(f"trainer: cannot read records from {shorten(trainer)}. Give {' or '.join(READERS)}")
    return trainer
