"""MLflow: rows as metrics of a run on a tracking server."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from posttrain.errors import MissingExtra, UsageError, hide_secrets
from posttrain.option_types import shorten
from posttrain.registry import register
from posttrain.store.metrics import MetricsRow, TrackedRun, Tracker
from posttrain.store.tracking.sessions import TrackingSession, flat, keys_of

_URI = re.compile(r"databricks(://\S+)?|(https?|sqlite|postgresql|mysql|mssql)(\+\w+)?://\S+")
_KEY = re.compile(r"[^\w\-. /]")
_PER_REQUEST = 100  # parameters; a server takes no more at once
_PARAMETER_CHARS = 500
# Else an hour passes before the client gives up on a server that does not answer.
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@register("tracker")
def mlflow(run: TrackedRun, *, uri: str | None = None, experiment: str = "posttrain") -> Tracker:
    """MLflow, by the URI of its server: metrics over ``step``, and the keys of the recipe as parameters.

    A resumed run is a new one on the server with all its rows; the older one is deleted there.

    Args:
        uri: of the tracking server, such as ``http://127.0.0.1:5000``; by default ``MLFLOW_TRACKING_URI``.
        experiment: its name; it is made if there is none.

    Raises:
        UsageError: there is no URI, or it is none of a server or database.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as error:
        raise MissingExtra("mlflow", "mlflow", "track: mlflow") from error
    given = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not given:
        raise UsageError("track: mlflow needs the URI of a server: uri: http://127.0.0.1:5000, or MLFLOW_TRACKING_URI")
    if _URI.fullmatch(given) is None:
        raise UsageError(
            f"track: mlflow: uri {shorten(hide_secrets(given))} is none of a server; give one such as "
            "http://127.0.0.1:5000"
        )
    for name, value in _LIMITS.items():
        os.environ.setdefault(name, value)
    return _MLflow(run, MlflowClient(tracking_uri=given), experiment, Metric, Param)


class _MLflow(TrackingSession):
    def __init__(self, run: TrackedRun, client: Any, experiment: str, metric: Any, parameter: Any) -> None:
        super().__init__(run, "mlflow", ("mlflow", "requests", "urllib3"), "track: trackio needs no server")
        self.client = client
        self.experiment = experiment
        self.metric = metric
        self.parameter = parameter
        self._id = ""

    def open(self, before: str | None) -> str:
        known = self.client.get_experiment_by_name(self.experiment)
        if known is None:
            place = self.client.create_experiment(self.experiment)
        else:
            place = known.experiment_id
        self._id = self.client.create_run(place, run_name=self.run.folder.name).info.run_id
        found = keys_of(self.run.recipe, _PARAMETER_CHARS)
        parameters = [self.parameter(_KEY.sub("_", key), value) for key, value in found.items()]
        for start in range(0, len(parameters), _PER_REQUEST):
            self.client.log_batch(self._id, params=parameters[start : start + _PER_REQUEST])
        if before is not None:
            self.client.delete_run(before)
        return self._id

    def write(self, row: MetricsRow) -> None:
        now = int(1000 * time.time())
        named = {_KEY.sub("_", name): value for name, value in flat(row).items()}
        self.client.log_batch(self._id, [self.metric(name, value, now, row.step) for name, value in named.items()])

    def end(self) -> None:
        self.client.set_terminated(self._id)
