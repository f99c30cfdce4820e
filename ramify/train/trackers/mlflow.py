"""A tracker for MLflow.

It logs to the tracking server or local store that the option ``uri`` or the environment variable
``MLFLOW_TRACKING_URI`` names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ramify.train.trackers.base import TrackerRunInfo

_PARAMS_PER_REQUEST = 100
"""Maximum number of parameters per request."""
_MAX_CHARS = 500
"""Maximum length of a parameter's value, because older servers accept no more."""


class MlflowTracker:
    """A tracker that logs the metrics of a training run to one run of an MLflow experiment."""

    modules: ClassVar[tuple[str, ...]] = ("mlflow",)
    extra: ClassVar[str] = "mlflow"

    def __init__(self, about: TrackerRunInfo, uri: str = "", experiment: str = "ramify") -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        # MLflow logs every table that it creates.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client: Any = MlflowClient(uri or None)
        self._metric = Metric
        self.id = about.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            self._client.create_experiment(experiment)
            if existing is None
            else existing.experiment_id
        )
        self.id = str(self._client.create_run(experiment_id, run_name=about.name).info.run_id)
        params = [Param(name, str(value)[:_MAX_CHARS]) for name, value in about.config.items()]
        for start in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(self.id, params=params[start : start + _PARAMS_PER_REQUEST])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self.id,
            metrics=[self._metric(name, value, now_ms, step) for name, value in values.items()],
        )

    def note(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self.id, f"doctor.{name}", f"step {step}: {text}")

    def send_folder(self, folder: Path) -> None:
        """Upload ``folder`` to the MLflow run as artefacts below the path ``policy``."""
        self._client.log_artifacts(self.id, str(folder), "policy")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
