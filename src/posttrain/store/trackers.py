"""Trackers: the lines of ``metrics.jsonl``, shown by TensorBoard or Weights & Biases as well (others: ``tracking/``).

Only disk failures stop training; a tracker that cannot reach its server is left out. The only module that imports wandb
and tensorboard.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import MissingExtra, UsageError, first_line
from posttrain.option_types import shorten
from posttrain.registry import register
from posttrain.store.durable import storage_errors
from posttrain.store.metrics import MetricsRow, TrackedRun, Tracker

WANDB_MODES = ("offline", "online", "disabled")


@register("tracker")
def tensorboard(run: TrackedRun) -> Tracker:
    """TensorBoard event files in the folder ``tensorboard`` of the run: ``tensorboard --logdir runs``.

    Scalars under the names of ``metrics.jsonl`` (times under ``timing/``), rounded to fp32 by the format.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "track", "track: tensorboard") from error
    return _TensorBoard(run.folder / "tensorboard", SummaryWriter)


class _TensorBoard:
    def __init__(self, folder: Path, open_writer: Callable[..., Any]) -> None:
        self.folder = folder
        self.open_writer = open_writer

    def start(self, kept: Sequence[MetricsRow]) -> None:
        purge_step = max((row.step for row in kept), default=-1) + 1
        with storage_errors("events for TensorBoard", self.folder):
            self._writer: Any = self.open_writer(str(self.folder), purge_step=purge_step)

    def log(self, row: MetricsRow) -> None:
        with storage_errors("events for TensorBoard", self.folder):
            for name, value in _flat(row).items():
                self._writer.add_scalar(name, value, row.step)
            self._writer.flush()  # so that a killed process leaves all steps up to its last checkpoint

    def close(self) -> None:
        with storage_errors("events for TensorBoard", self.folder):
            self._writer.close()


@register("tracker")
def wandb(
    run: TrackedRun,
    *,
    project: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    mode: Literal["offline", "online", "disabled"] | None = None,
) -> Tracker:
    """Weights & Biases: each line of ``metrics.jsonl`` is a row of the history, over ``step``.

    ``offline``, nothing leaves this machine: ``wandb sync runs/NAME/wandb/offline-run-*`` uploads it later. The run's
    id is kept in its folder. A resumed run continues the one on the server, which leaves out the rows that it has;
    offline, whose format cannot be continued, all rows are written again and the older files removed. Its files are in
    the run's folder, or below ``WANDB_DIR``.

    Args:
        project: on the server; by default ``WANDB_PROJECT``, else ``posttrain``.
        entity: owner of the project; by default ``WANDB_ENTITY``, else the account's own.
        group: of runs that belong together.
        mode: ``online`` uploads while training. By default ``WANDB_MODE``; else ``online`` with ``WANDB_API_KEY``,
            ``offline`` without.

    Raises:
        UsageError: ``WANDB_MODE`` is none of these.
    """
    try:
        import wandb as library
    except ImportError as error:
        raise MissingExtra("wandb", "track", "track: wandb") from error
    if os.environ.get("WANDB_MODE"):
        chosen = os.environ["WANDB_MODE"]
    elif os.environ.get("WANDB_API_KEY"):
        chosen = "online"
    else:
        chosen = "offline"
    if mode is None and chosen not in WANDB_MODES:
        raise UsageError(f"WANDB_MODE is {shorten(chosen)}; set it to {', '.join(WANDB_MODES)}, or unset it")
    place = {
        "project": project or os.environ.get("WANDB_PROJECT") or "posttrain",
        "group": group,
        "entity": entity or os.environ.get("WANDB_ENTITY") or None,
        "mode": mode or chosen,
    }
    return _WeightsAndBiases(run, library, place)


class _WeightsAndBiases:
    def __init__(self, run: TrackedRun, library: Any, place: Mapping[str, Any]) -> None:
        self.run = run
        self.library = library
        self.place = place
        self._session: Any = None
        self._rows = 0

    def start(self, kept: Sequence[MetricsRow]) -> None:
        folder = self.run.folder / "wandb"
        home = Path(os.environ.get("WANDB_DIR") or self.run.folder)
        with storage_errors("files for Weights & Biases", folder):
            folder.mkdir(exist_ok=True)
            identity = folder / "run-id.txt"
            if not identity.is_file():
                identity.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
            name = identity.read_text(encoding="utf-8")
            home.mkdir(parents=True, exist_ok=True)
            before = list((home / "wandb").glob(f"offline-run-*-{name}"))
        self._rows = 0
        self._attempt("could not be started", lambda: self._open(name, str(home)))
        for row in kept:
            self.log(row)
        if self._session is not None and self._session.settings.mode == "offline":
            for stale in before:  # uploaded after the new one, it would replace it
                shutil.rmtree(stale, ignore_errors=True)

    def log(self, row: MetricsRow) -> None:
        if self._session is not None:
            line = {"step": row.step, **_flat(row)}
            number = self._rows
            self._attempt("stopped taking metrics", lambda: self._session.log(line, step=number))
        self._rows += 1

    def close(self) -> None:
        if self._session is not None:
            self._attempt("could not be closed", lambda: self._session.finish())
        self._session = None

    def _open(self, name: str, home: str) -> None:
        options = {"silent": True, "console": "off", "save_code": False, "x_disable_stats": True}
        self._session = self.library.init(
            **self.place,
            id=name,
            name=self.run.folder.name,
            dir=home,
            resume="allow",
            reinit="create_new",
            config=dict(self.run.recipe),
            settings=self.library.Settings(**options, init_timeout=30, finish_timeout=30),
        )
        self._session.define_metric("*", step_metric="step")

    def _attempt(self, trouble: str, act: Callable[[], None]) -> None:
        """Call a function of W&B; where it fails, W&B is left out with a notice, and training goes on."""
        try:
            act()
        except Exception as error:  # W&B's own errors have no class in common
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package != "wandb":
                raise
            self._session = None
            reason = f"{first_line(error)}; WANDB_MODE=offline needs no server"
            self.run.notify(f"track: wandb {trouble} ({reason}); training goes on, metrics.jsonl has everything")


def _flat(row: MetricsRow) -> dict[str, float]:
    numbers = {name: float(value) for name, value in row.metrics.items()}
    for name, value in row.timing.items():
        numbers[f"timing/{name}"] = float(value)
    return numbers
