"""trackio: an experiment tracker without an account, on this machine or in a Space of the hub."""

from __future__ import annotations

from typing import Any

from posttrain.errors import MissingExtra
from posttrain.registry import register
from posttrain.store.metrics import MetricsRow, TrackedRun, Tracker
from posttrain.store.tracking.sessions import TrackingSession, flat


@register("tracker")
def trackio(
    run: TrackedRun, *, project: str = "posttrain", group: str | None = None, space: str | None = None
) -> Tracker:
    """trackio, which needs no account: ``trackio show --project posttrain`` opens the dashboard on this machine.

    Its data are in ``TRACKIO_DIR``, by default in the cache of the hub. A resumed run replaces its older copy.

    Args:
        project: on the dashboard.
        group: of runs that belong together.
        space: a Space of the Hugging Face hub, such as ``me/runs``, that shows it to others; by default nothing leaves
            this machine.
    """
    try:
        import trackio as library
    except ImportError as error:
        raise MissingExtra("trackio", "trackio", "track: trackio") from error
    return _Trackio(run, library, {"project": project, "group": group, "space_id": space})


class _Trackio(TrackingSession):
    def __init__(self, run: TrackedRun, library: Any, place: dict[str, str | None]) -> None:
        super().__init__(run, "trackio", ("trackio", "httpx", "huggingface_hub"), "without space nothing is uploaded")
        self.library = library
        self.place = place
        self._run: Any = None

    def open(self, before: str | None) -> str:
        if before is not None:  # else the project may not exist
            for one in self.library.Api().runs(self.place["project"]):
                if one.id == before:
                    one.delete()
        self._run = self.library.init(
            **self.place,
            name=self.run.folder.name,
            config=dict(self.run.recipe),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.id)

    def write(self, row: MetricsRow) -> None:
        self._run.log(flat(row), step=row.step)

    def end(self) -> None:
        self._run.finish()
