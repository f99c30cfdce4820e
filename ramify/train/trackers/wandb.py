"""A tracker for Weights & Biases.

With ``WANDB_MODE=offline`` the data stays on this machine until ``wandb sync`` is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ramify.train.trackers.base import TrackerRunInfo


class WandbTracker:
    """A tracker that logs the metrics of a training run to Weights & Biases.

    It accepts the options of ``wandb.init``, such as ``project``, ``entity``, ``group``, ``tags``
    and ``mode``.
    """

    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    extra: ClassVar[str] = "wandb"

    def __init__(self, about: TrackerRunInfo, project: str = "ramify", **options: Any) -> None:
        import wandb

        # Only ``ramify train`` itself writes to the terminal.
        settings = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(
            project=project,
            name=about.name,
            id=about.id or None,
            resume="allow" if about.id else None,
            config=None if about.id else about.config,
            dir=str(about.folder),
            settings=settings,
            **options,
        )
        # W&B's own step counter cannot go back to the step of a checkpoint.
        self._run.define_metric("*", step_metric="step")

    @property
    def id(self) -> str:
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def note(self, step: int, name: str, text: str) -> None:
        # Shown on the run's page; a project may send it on by mail.
        self._run.alert(title=f"step {step}: {name}", text=text)

    def send_folder(self, folder: Path) -> None:
        """Upload ``folder`` as an artefact of type ``model``."""
        import wandb

        name = re.sub(r"[^\w.-]", "-", str(self._run.name or self._run.id))
        artefact = wandb.Artifact(name, type="model")
        artefact.add_dir(str(folder))
        self._run.log_artifact(artefact)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
