"""Findings about a run, from its records."""

from __future__ import annotations

from pathlib import Path

from posttrain.api.arguments import plain_path
from posttrain.api.inputs import Place
from posttrain.registry import stop_import
from posttrain.runs.diagnosis.diagnose import diagnose_run
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.directory import find_run


def diagnose(run: Place, *, runs_dir: Place = "runs") -> list[RunFinding]:
    """Return what the files of a run say about its health, faults first, as ``posttrain doctor`` does.

    The run may be finished, running or interrupted. It is only read, and no code of it is run.

    Args:
        run: a run, its folder, or its name below ``runs_dir``.

    Raises:
        UsageError: there is no such run, or it has made no step yet.
        DataError: a file of it is damaged.

    Examples:
        >>> [one for one in pt.diagnose("runs/mine") if one.kind == "fault"]
        []
    """
    stop_import()
    folder = find_run(plain_path("runs_dir", runs_dir), plain_path("run", run))
    return list(diagnose_run(Path(folder)).findings)
