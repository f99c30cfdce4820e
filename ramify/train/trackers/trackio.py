"""A tracker for Trackio.

Metrics appear on a local dashboard (``trackio show``), or in a Hugging Face Space if the option
``space_id`` names one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from ramify.train.trackers.base import TrackerRunInfo


class TrackioTracker:
    """A tracker that logs the metrics of a training run to Trackio.

    It accepts the options of ``trackio.init``. Trackio identifies a run by its name, so a unique
    suffix is added to the name.
    """

    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    extra: ClassVar[str] = "trackio"

    def __init__(self, about: TrackerRunInfo, project: str = "ramify", **options: Any) -> None:
        import trackio

        self.id = about.id or f"{about.name}-{uuid.uuid4().hex[:6]}"
        run_options = {"auto_log_cpu": False, "auto_log_gpu": False, **options}
        begin = functools.partial(
            trackio.init,
            project=project,
            name=self.id,
            resume="allow" if about.id else "never",
            embed=False,
            config=about.config,
            **run_options,
        )
        # In a separate context, or the run would be finished again when the process ends.
        with _suppress_output():
            self._run: Any = contextvars.copy_context().run(begin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        with _suppress_output():
            self._run.finish()


def _suppress_output() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that suppresses Trackio's usage hints.

    Standard output is reserved for the command's own output.
    """
    return contextlib.redirect_stdout(io.StringIO())
