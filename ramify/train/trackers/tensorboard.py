"""TensorBoard: event files in the run's folder, for ``tensorboard --logdir DIR``. Nothing leaves
the machine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ramify.train.trackers.base import RunInfo


class TensorBoardTracker:
    """Written by ``tensorboardX``, or by torch where TensorBoard itself is installed; both write
    the same files."""

    modules: ClassVar[tuple[str, ...]] = ("tensorboardX", "tensorboard")
    extra: ClassVar[str] = "tensorboard"

    def __init__(self, about: RunInfo, folder: str = "") -> None:
        """``folder``: by default ``tensorboard`` in the run's. What was written of later steps than
        a resumed run goes on from is dropped by whoever reads the files."""
        self.id = str(Path(folder) if folder else about.folder / "tensorboard")
        # Files are named by the second: without a suffix, a run resumed within one would write over
        # what it wrote.
        resumed = (
            {"purge_step": about.step + 1, "filename_suffix": f".from-{about.step}"}
            if about.id
            else {}
        )
        self._writer: Any = _writer_class()(self.id, **resumed)
        if not about.id:
            shown = msgspec.json.format(msgspec.json.encode(about.config)).decode()
            self._writer.add_text("run", "\n".join(f"    {line}" for line in shown.splitlines()), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
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
