"""SwanLab: rows in files of the run's folder, or on a server."""

from __future__ import annotations

import os
import shutil
from typing import Any, Literal

from posttrain.errors import MissingExtra
from posttrain.registry import register
from posttrain.store.metrics import MetricsRow, TrackedRun, Tracker
from posttrain.store.tracking.sessions import TrackingSession, flat


@register("tracker")
def swanlab(
    run: TrackedRun,
    *,
    project: str = "posttrain",
    workspace: str | None = None,
    mode: Literal["offline", "online"] | None = None,
) -> Tracker:
    """SwanLab. ``offline``, nothing leaves this machine: ``swanlab sync runs/NAME/swanlab/run-*`` uploads it later.

    Its files are in the run's folder. A resumed run writes all rows again and removes the older files.

    Args:
        project: on the server.
        workspace: its owner; by default the account's.
        mode: ``online`` uploads while training. By default ``online`` with ``SWANLAB_API_KEY``, else ``offline``.
    """
    try:
        import swanlab as library
    except ImportError as error:
        raise MissingExtra("swanlab", "swanlab", "track: swanlab") from error
    chosen: str = mode or "offline"
    if mode is None and os.environ.get("SWANLAB_API_KEY"):
        chosen = "online"
    return _SwanLab(run, library, {"project": project, "workspace": workspace, "mode": chosen})


# Nothing of the machine or the terminal is collected.
_NO_PROBE = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)


class _SwanLab(TrackingSession):
    def __init__(self, run: TrackedRun, library: Any, place: dict[str, str | None]) -> None:
        super().__init__(run, "swanlab", ("swanlab", "requests", "urllib3"), "mode: offline needs no server")
        self.library = library
        self.place = place
        self._run: Any = None

    def open(self, before: str | None) -> str:
        folder = self.run.folder / "swanlab"
        stale = list(folder.glob(f"run-*-{before}"))
        self._run = self.library.init(
            **self.place,
            name=self.run.folder.name,
            config=dict(self.run.recipe),
            log_dir=str(folder),
            reinit=True,
            settings=self.library.Settings(interactive=False, probe=_NO_PROBE, terminal={"proxy_type": "none"}),
        )
        for one in stale:
            shutil.rmtree(one, ignore_errors=True)
        return str(self._run.id)

    def write(self, row: MetricsRow) -> None:
        self._run.log(flat(row), step=row.step)

    def end(self) -> None:
        self._run.finish()
