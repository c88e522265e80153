"""Audit one update."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import DataError
from posttrain.runs.diagnosis.audit.comparisons import compare_all
from posttrain.runs.diagnosis.audit.gradient import recompute
from posttrain.runs.diagnosis.audit.material import open_material
from posttrain.runs.diagnosis.faults import MISFITS
from posttrain.runs.diagnosis.findings import RunFinding


def audit_update(folder: Path, step: int) -> list[RunFinding]:
    """Recompute the gradient and optimizer step for update ``step`` (from 1), and compare them with the run.

    Reads the checkpoint right before the update, the update's record, and the checkpoint right after it if present.
    Uses transformers' forward pass, the loss formulas from the balances, and AdamW in float64.

    Raises:
        UsageError: the update cannot be audited. The message says why.
        DataError: a file is damaged.
    """
    material = open_material(folder, step)
    try:
        computed = recompute(
            material.model, material.rows, material.record.facts, material.temperature, material.reference
        )
        compared = list(compare_all(material, computed))
    except MISFITS as error:
        what = f"damaged: answers and checkpoint do not match update {step} ({type(error).__name__})"
        raise DataError(folder, what) from None
    found: list[RunFinding] = []
    for one in compared:
        check = f"audit: {one.check}"
        if one.agrees:
            found.append(RunFinding("audit", check, step, one.expected, one.found, "they match"))
        else:
            found.append(RunFinding("fault", check, step, one.expected, one.found, one.decided_by, one.causes))
    return found
