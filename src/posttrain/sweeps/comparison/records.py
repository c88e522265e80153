"""Records of the trials of a comparison: a small file each, which outlives the run's own folder."""

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
    """The results of one run.

    ``curve``: (step, accuracy) of its evaluations; ``outcomes``: a digit for each problem, 1 where the last answer was
    right. ``cpu_seconds``: of its updates, sampling included and evaluation excluded; ``whole_seconds``: of all that
    the run did. Both are None of a run that was interrupted.
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
        """The accuracy at the end."""
        return self.curve[-1][1]

    @property
    def peak(self) -> float:
        """The highest accuracy along the way."""
        return max(accuracy for _, accuracy in self.curve)


def record_path(folder: Path, name: str) -> Path:
    """Return the file of a trial's record in the folder of a comparison."""
    return folder / RECORDS / f"{name}.json"


def write_trial_record(path: Path, record: TrialRecord) -> None:
    """Put a record in place; atomic and durable.

    Raises:
        StorageError: the disk is full or not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(record)).encode() + b"\n")


def read_trial_record(path: Path) -> TrialRecord | None:
    """The record of a trial; None where there is none.

    Raises:
        DataError: damaged.
    """
    with suppress(FileNotFoundError):
        return read_declared(path, TrialRecord)
    return None


def read_recorded(path: Path) -> list[TrialRecord]:
    """The records in the results of a comparison (``results.json``, key ``trials``).

    Raises:
        DataError: no such file, or without records that can be read.
    """
    try:
        content: Any = json.loads(read_record(path))
    except FileNotFoundError:
        raise DataError(path, "there is no such file; give the results.json of a comparison") from None
    except ValueError:
        raise DataError(path, "not JSON; give the results.json of a comparison") from None
    if not isinstance(content, dict) or not isinstance(content.get("trials"), list):
        raise DataError(path, "it has no trials; give the results.json of a comparison")
    try:
        return TypeAdapter(list[TrialRecord]).validate_python(content["trials"])
    except ValidationError as error:
        raise DataError(path, f"trials: {first_fault(error)}") from None


def read_outcomes(path: Path, step: int, n: int) -> str:
    """The digits of ``n`` problems, from the answers that the evaluation at ``step`` recorded in ``rollouts.db``.

    A problem without an answer, because its prompt did not fit, counts as wrong.
    """
    digits = ["0"] * n
    for rollout in RolloutStore(path, read_only=True).evaluations(step=step):
        if rollout.outcome == "right" and rollout.prompt_index < n:
            digits[rollout.prompt_index] = "1"
    return "".join(digits)


def facts_of_run(folder: Path, rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """The curve, outcomes and sampled tokens of a finished run.

    Raises:
        DataError: it was not evaluated before the first and after the last update, or not by graded answers.
    """
    trial = read_trial(rows, "", 0, "finished")
    if len(trial.points) < 2:
        raise DataError(folder, "fewer than two evaluations with graded answers; a comparison needs a first and a last")
    last = trial.points[-1]
    return {
        "curve": [(point.step, point.results["accuracy"]) for point in trial.points],
        "outcomes": read_outcomes(folder / "rollouts.db", last.step, round(last.results["n"])),
        "sampled_tokens": trial.info.get("sampled_tokens", 0.0),
    }
