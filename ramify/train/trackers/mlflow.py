"""MLflow: a tracking server, or a store on disk, by ``MLFLOW_TRACKING_URI`` or the option
``uri``."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from ramify.train.trackers.base import RunInfo

_AT_ONCE = 100
"""Parameters of one request."""
_MOST_CHARS = 500
"""Of a parameter; older servers take no more."""


class MlflowTracker:
    """One run of an experiment."""

    modules: ClassVar[tuple[str, ...]] = ("mlflow",)
    extra: ClassVar[str] = "mlflow"

    def __init__(self, about: RunInfo, uri: str = "", experiment: str = "ramify") -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(
            logging.WARNING
        )  # it tells of every table that it makes
        self._client: Any = MlflowClient(uri or None)
        self._metric = Metric
        self.id = about.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.id = str(self._client.create_run(where, run_name=about.name).info.run_id)
        params = [Param(name, str(value)[:_MOST_CHARS]) for name, value in about.config.items()]
        for at in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self.id, params=params[at : at + _AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self.id,
            metrics=[self._metric(name, value, now_ms, step) for name, value in values.items()],
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
