"""Trackers: mirror ``metrics.jsonl`` to TensorBoard or Weights & Biases. Others are in ``tracking/``.

If a tracker loses its server, training continues without it; disk errors stop training. Only this module imports wandb
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
    """TensorBoard event files in the run's ``tensorboard`` folder; view with ``tensorboard --logdir runs``.

    Scalars use the names in ``metrics.jsonl`` (times under ``timing/``), rounded to fp32 by the event format.
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
            self._writer.flush()  # keeps all steps before a kill

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
    """Weights & Biases: logs each line of ``metrics.jsonl`` as a history row over ``step``.

    In ``offline`` mode nothing leaves this machine; upload later with ``wandb sync runs/NAME/wandb/offline-run-*``.
    The W&B run id is stored in the run's folder. Resuming online continues the server's run, which ignores known
    rows. Offline runs cannot be continued, so resuming rewrites all rows and deletes older offline files. Files are
    stored in the run's folder, or below ``WANDB_DIR``.

    Args:
        project: W&B project; defaults to ``WANDB_PROJECT``, then ``posttrain``.
        entity: project owner; defaults to ``WANDB_ENTITY``, then your account.
        group: groups related runs.
        mode: ``online`` uploads while training. Defaults to ``WANDB_MODE``, then ``online`` if ``WANDB_API_KEY`` is
            set, else ``offline``.

    Raises:
        UsageError: invalid ``WANDB_MODE``.
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
            for stale in before:  # if uploaded later, it would replace the new run
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
        """Call W&B; if it fails, notify and continue training without W&B."""
        try:
            act()
        except Exception as error:  # W&B errors have no common base class
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package != "wandb":
                raise
            self._session = None
            reason = f"{first_line(error)}; WANDB_MODE=offline needs no server"
            self.run.notify(f"track: wandb {trouble} ({reason}); training continues, metrics.jsonl has everything")


def _flat(row: MetricsRow) -> dict[str, float]:
    numbers = {name: float(value) for name, value in row.metrics.items()}
    for name, value in row.timing.items():
        numbers[f"timing/{name}"] = float(value)
    return numbers
