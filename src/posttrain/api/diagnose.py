"""Findings about a run, from its records."""

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
    """Return what the files of a run say about its health, faults first, as ``posttrain doctor`` does.

    The run may be finished, running or interrupted. It is only read, and no code of it is run.

    Args:
        run: a run, its folder, or its name below ``runs_dir``.
        audit: an update (from 1) whose gradient and optimizer step are computed again by transformers' own forward pass
            and plain code. It takes a checkpoint right before it; with one behind it, all weights are compared.
        trainer: ``"trl"`` or ``"nemo-rl"``: ``run`` is a file or a folder of this trainer's records.

    Raises:
        UsageError: there is no such run, it has made no step yet, or the update cannot be audited.
        DataError: a file of it is damaged.

    Examples:
        >>> [one for one in pt.diagnose("runs/mine") if one.kind == "fault"]
        []
    """
    stop_import()
    root, name = plain_path("runs_dir", runs_dir), plain_path("run", run)
    if trainer is not None:
        if audit is not None:
            raise UsageError("audit: it takes a checkpoint of posttrain, which records of others are not. Leave it out")
        return list(diagnose_records(Path(name), _checked_trainer(trainer)).findings)
    update: int | None = None
    if audit is not None:
        check_whole("audit", audit)
        update = int(audit)
        if update < 1:
            raise UsageError(f"audit: {update} is no update. They are numbered from 1")
    return list(diagnose_run(Path(find_run(root, name)), update).findings)


def _checked_trainer(trainer: object) -> str:
    """Return the name of a trainer whose records can be read.

    Raises:
        UsageError: it is another.
    """
    if not isinstance(trainer, str) or trainer not in READERS:
        raise UsageError(f"trainer: records of {shorten(trainer)} cannot be read. Give {' or '.join(READERS)}")
    return trainer
