"""A tracker for TensorBoard.

It writes event files to the run's folder, and no data leaves the machine. View them with
``tensorboard --logdir DIR``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ramify.train.trackers.base import TrackerRunInfo


class TensorBoardTracker:
    """A tracker that writes TensorBoard event files.

    It uses ``tensorboardX`` if installed, and torch's writer otherwise. Both write the same files.
    """

    modules: ClassVar[tuple[str, ...]] = ("tensorboardX", "tensorboard")
    extra: ClassVar[str] = "tensorboard"

    def __init__(self, about: TrackerRunInfo, folder: str = "") -> None:
        """Open an event file in ``folder``, by default ``tensorboard`` in the run's folder.

        If the run was resumed, TensorBoard discards earlier events of the steps that are now
        repeated.
        """
        self.id = str(Path(folder) if folder else about.folder / "tensorboard")
        # File names have a resolution of one second: without a suffix, a run that is resumed within
        # the same second would overwrite its own file.
        resumed = (
            {"purge_step": about.step + 1, "filename_suffix": f".from-{about.step}"}
            if about.id
            else {}
        )
        self._writer: Any = _writer_class()(self.id, **resumed)
        if not about.id:
            config = msgspec.json.format(msgspec.json.encode(about.config)).decode()
            self._writer.add_text(
                "run", "\n".join(f"    {line}" for line in config.splitlines()), 0
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(f"doctor/{name}", text, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _writer_class() -> Any:
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ImportError(
        "neither tensorboardX nor torch with tensorboard can be imported: pip install tensorboardX"
    )
