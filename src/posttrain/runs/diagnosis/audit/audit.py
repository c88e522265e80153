"""The audit of one update of a run."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import DataError
from posttrain.runs.diagnosis.audit.comparisons import compare_all
from posttrain.runs.diagnosis.audit.gradient import recompute
from posttrain.runs.diagnosis.audit.material import open_material
from posttrain.runs.diagnosis.faults import MISFITS
from posttrain.runs.diagnosis.findings import RunFinding


def audit_update(folder: Path, step: int) -> list[RunFinding]:
    """Compute gradient and optimizer step of update ``step`` (from 1) again, and return what agrees and what does not.

    It reads the checkpoint right before the update, its record, and the checkpoint behind it where there is one. The
    forward pass is transformers' own, the loss that of the balances, and AdamW is computed in float64.

    Raises:
        UsageError: the update cannot be audited; with the reason.
        DataError: a file is damaged.
    """
    material = open_material(folder, step)
    try:
        computed = recompute(
            material.model, material.rows, material.record.facts, material.temperature, material.reference
        )
        compared = list(compare_all(material, computed))
    except MISFITS as error:
        what = f"damaged: update {step}, its answers and its checkpoint do not fit together ({type(error).__name__})"
        raise DataError(folder, what) from None
    found: list[RunFinding] = []
    for one in compared:
        check = f"audit: {one.check}"
        if one.agrees:
            found.append(RunFinding("audit", check, step, one.expected, one.found, "it agrees"))
        else:
            found.append(RunFinding("fault", check, step, one.expected, one.found, one.decided_by, one.causes))
    return found
