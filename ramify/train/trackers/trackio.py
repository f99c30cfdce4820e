"""Trackio: a local dashboard (``trackio show``), or a Space of Hugging Face by the option
``space_id``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from ramify.train.trackers.base import RunInfo


class TrackioTracker:
    """Options are those of ``trackio.init``. A run is known by its name, which is therefore made
    unique."""

    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    extra: ClassVar[str] = "trackio"

    def __init__(self, about: RunInfo, project: str = "ramify", **options: Any) -> None:
        import trackio

        self.id = about.id or f"{about.name}-{uuid.uuid4().hex[:6]}"
        given = {"auto_log_cpu": False, "auto_log_gpu": False, **options}
        begin = functools.partial(
            trackio.init,
            project=project,
            name=self.id,
            resume="allow" if about.id else "never",
            embed=False,
            config=about.config,
            **given,
        )
        with (
            _zero_variance()
        ):  # in a context of its own, or it would be finished again when the process ends
            self._run: Any = contextvars.copy_context().run(begin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        with _zero_variance():
            self._run.finish()


def _zero_variance() -> contextlib.AbstractContextManager[Any]:
    """It prints how to look at a run; standard output is the command's."""
    return contextlib.redirect_stdout(io.StringIO())
