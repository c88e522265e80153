"""Trackers: the lines of ``metrics.jsonl``, shown by TensorBoard or Weights & Biases as well.

Only disk failures stop training; a tracker that cannot reach its server goes on without it.

The only module that imports wandb and tensorboard.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import MissingExtra, UsageError
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
        self.folder, self.open_writer = folder, open_writer
        self._writer: Any = None

    def start(self, kept: Sequence[MetricsRow]) -> None:
        purge_step = max((row.step for row in kept), default=-1) + 1
        with storage_errors("events for TensorBoard", self.folder):
            self._writer = self.open_writer(str(self.folder), purge_step=purge_step)

    def log(self, row: MetricsRow) -> None:
        with storage_errors("events for TensorBoard", self.folder):
            for name, value in _flat(row).items():
                self._writer.add_scalar(name, value, row.step)
            self._writer.flush()  # so that a killed process leaves all steps up to its last checkpoint

    def close(self) -> None:
        if self._writer is not None:
            with storage_errors("events for TensorBoard", self.folder):
                self._writer.close()
            self._writer = None


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
        project: on the server; by default what ``WANDB_PROJECT`` says, else ``posttrain``.
        entity: whose project; by default what ``WANDB_ENTITY`` says, else the account's own.
        group: of runs that belong together.
        mode: ``online`` uploads while training, and becomes ``offline`` with a notice where there is no server. By
            default what ``WANDB_MODE`` says; else ``online`` with ``WANDB_API_KEY``, ``offline`` without.

    Raises:
        UsageError: ``WANDB_MODE`` says none of these.
    """
    try:
        import wandb as library
    except ImportError as error:
        raise MissingExtra("wandb", "track", "track: wandb") from error
    place = {"project": project or os.environ.get("WANDB_PROJECT") or "posttrain", "group": group}
    place["entity"] = entity or os.environ.get("WANDB_ENTITY") or None
    return _WeightsAndBiases(run, library, place, mode or _mode_of_environment())


def _mode_of_environment() -> str:
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    if mode not in WANDB_MODES:
        raise UsageError(f"WANDB_MODE is {shorten(mode)}; set it to {', '.join(WANDB_MODES)}, or unset it")
    return mode


class _WeightsAndBiases:
    def __init__(self, run: TrackedRun, library: Any, place: Mapping[str, Any], mode: str) -> None:
        self.run, self.library, self.place, self.mode = run, library, place, mode
        self.home = Path(os.environ.get("WANDB_DIR") or run.folder)  # the library's files are in its folder ``wandb``
        self._session: Any = None
        self._rows = 0

    def start(self, kept: Sequence[MetricsRow]) -> None:
        folder = self.run.folder / "wandb"
        with storage_errors("files for Weights & Biases", folder):
            folder.mkdir(exist_ok=True)
            identity = folder / "run-id.txt"
            if not identity.is_file():
                identity.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
            name = identity.read_text(encoding="utf-8")
            self.home.mkdir(parents=True, exist_ok=True)
            before = list((self.home / "wandb").glob(f"offline-run-*-{name}"))
        self._rows = 0
        self._attempt("could not be started", lambda: self._open(name))
        for row in kept:
            self.log(row)
        if self._session is not None and self._session.settings.mode == "offline":
            for stale in before:  # uploaded after the new one, it would replace it
                shutil.rmtree(stale, ignore_errors=True)

    def log(self, row: MetricsRow) -> None:
        if self._session is not None:
            line, number = {"step": row.step, **_flat(row)}, self._rows
            self._attempt("stopped taking metrics", lambda: self._session.log(line, step=number))
        self._rows += 1

    def close(self) -> None:
        if self._session is not None:
            self._attempt("could not be closed", lambda: self._session.finish())
        self._session = None

    def _open(self, name: str) -> None:
        try:
            self._session = self._begin(name, self.mode)
        except Exception as error:
            if self.mode == "offline" or not _is_theirs(error):
                raise
            self.library.teardown()  # lets go of the id
            folder = self.home / "wandb"
            self.run.notify(f"track: wandb: the server cannot be used ({_line(error)}); offline instead, in {folder}")
            self._session = self._begin(name, "offline")
        self._session.define_metric("*", step_metric="step")

    def _begin(self, name: str, mode: str) -> Any:
        settings = self.library.Settings(
            silent=True,
            console="off",
            save_code=False,
            x_disable_stats=True,
            init_timeout=30,
            finish_timeout=30,
        )
        return self.library.init(
            **self.place,
            id=name,
            name=self.run.folder.name,
            dir=str(self.home),
            mode=mode,
            resume="allow",
            reinit="create_new",
            config=dict(self.run.recipe),
            settings=settings,
        )

    def _attempt(self, trouble: str, act: Callable[[], None]) -> None:
        """Do something that may fail without training being the worse for it; then W&B is left out, and it is said."""
        try:
            act()
        except Exception as error:
            if not _is_theirs(error):
                raise
            self._session = None
            self.run.notify(f"track: wandb {trouble} ({_line(error)}); training goes on, metrics.jsonl has everything")


def _is_theirs(error: Exception) -> bool:
    """Whether an error comes from W&B or the network; W&B's own have no class in common."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "wandb"


def _flat(row: MetricsRow) -> dict[str, float]:
    return {name: float(value) for name, value in row.metrics.items()} | {
        f"timing/{name}": float(value) for name, value in row.timing.items()
    }


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
