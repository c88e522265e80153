"""Trial records for comparisons: one small file per trial, kept after the run folder is deleted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from posttrain.errors import DataError
from posttrain.store.durable import replace_file
from posttrain.store.metrics import MetricsRow
from posttrain.store.reading import read_declared, read_record
from posttrain.store.rollouts import RolloutStore
from posttrain.sweeps.learning import read_trial
from posttrain.untrusted import first_fault

RECORDS = "records"
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """Results of one run.

    ``curve``: (step, accuracy) at each evaluation. ``outcomes``: one digit per problem, 1 if the last answer was
    correct. ``cpu_seconds``: time in updates, including sampling but not evaluation. ``whole_seconds``: total time.
    Both are None for interrupted runs.
    """

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    stage: Literal["tuning", "final"]
    row: str
    variant: Annotated[int, Field(ge=0)]
    rate: Annotated[float, Field(gt=0)]
    seed: int
    curve: Annotated[list[tuple[int, Share]], Field(min_length=2)]
    outcomes: Annotated[str, Field(pattern=r"^[01]+$")]
    sampled_tokens: Annotated[float, Field(ge=0)]
    cpu_seconds: Seconds | None = None
    whole_seconds: Seconds | None = None

    @property
    def accuracy(self) -> float:
        """Final accuracy."""
        return self.curve[-1][1]

    @property
    def peak(self) -> float:
        """Highest accuracy during training."""
        return max(accuracy for _, accuracy in self.curve)


def record_path(folder: Path, name: str) -> Path:
    """Build the path to a trial's record."""
    return folder / RECORDS / f"{name}.json"


def write_trial_record(path: Path, record: TrialRecord) -> None:
    """Write a record atomically and durably.

    Raises:
        StorageError: the disk is full or not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(record)).encode() + b"\n")


def read_trial_record(path: Path) -> TrialRecord | None:
    """Read a trial's record; None if missing.

    Raises:
        DataError: damaged.
    """
    with suppress(FileNotFoundError):
        return read_declared(path, TrialRecord)
    return None


def read_recorded(path: Path) -> list[TrialRecord]:
    """Read trial records from a comparison's results (``results.json``, key ``trials``).

    Raises:
        DataError: no such file, or no readable records in it.
    """
    try:
        content: Any = json.loads(read_record(path))
    except FileNotFoundError:
        raise DataError(path, "no such file; give a comparison's results.json") from None
    except ValueError:
        raise DataError(path, "not JSON; give a comparison's results.json") from None
    if not isinstance(content, dict) or not isinstance(content.get("trials"), list):
        raise DataError(path, "no trials in it; give a comparison's results.json")
    try:
        return TypeAdapter(list[TrialRecord]).validate_python(content["trials"])
    except ValidationError as error:
        raise DataError(path, f"trials: {first_fault(error)}") from None


def read_outcomes(path: Path, step: int, n: int) -> str:
    """Read outcomes for ``n`` problems from the answers recorded in ``rollouts.db`` at ``step``.

    Problems without an answer, because the prompt was too long, count as incorrect.
    """
    digits = ["0"] * n
    for rollout in RolloutStore(path, read_only=True).evaluations(step=step):
        if rollout.outcome == "right" and rollout.prompt_index < n:
            digits[rollout.prompt_index] = "1"
    return "".join(digits)


def facts_of_run(folder: Path, rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """Collect curve, outcomes and sampled tokens from a finished run.

    Raises:
        DataError: evaluations before the first or after the last update are missing, or answers were not graded.
    """
    trial = read_trial(rows, "", 0, "finished")
    if len(trial.points) < 2:
        raise DataError(
            folder, "fewer than two evaluations with graded answers; a comparison needs an initial and a final one"
        )
    last = trial.points[-1]
    return {
        "curve": [(point.step, point.results["accuracy"]) for point in trial.points],
        "outcomes": read_outcomes(folder / "rollouts.db", last.step, round(last.results["n"])),
        "sampled_tokens": trial.info.get("sampled_tokens", 0.0),
    }
