"""Define the interface of experiment trackers, services such as MLflow that receive a run's
metrics.

The metrics are written to ``metrics.jsonl`` in any case.

    StepMetrics ── listener ──> queue ── thread ──> each tracker: log(step, {"rl/reward": 0.46, …})

This module sends every metric under its stage's name. It sends the run's configuration once and
without secrets. A resumed run continues the same run at the service. No tracker can delay or end
training: one that fails is reported once and not used again.

Each other file in this folder has the class for one service. The class implements ``Tracker``.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.logging import ComponentLogger
from ramify.pip_install_command import install_command
from ramify.plugins import PluginRegistry
from ramify.train.config_redaction import redact_config
from ramify.train.metrics import StepMetrics

_log = ComponentLogger("train")
TRACKERS = PluginRegistry(
    "tracker",
    "ramify.trackers",
    {
        "tensorboard": "ramify.train.trackers.tensorboard:TensorBoardTracker",
        "wandb": "ramify.train.trackers.wandb:WandbTracker",
        "mlflow": "ramify.train.trackers.mlflow:MlflowTracker",
        "trackio": "ramify.train.trackers.trackio:TrackioTracker",
    },
)
"""Maps a name to the class that implements ``Tracker``."""
FILE = "trackers.json"
"""File in the run's folder that maps each tracker's name to the run's id at the service."""
CLOSE_S = 60.0
"""Seconds to wait at the end of a run until pending metrics are sent."""


class TrackerRunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a training run to an experiment tracker when the run begins."""

    name: str
    folder: Path
    """The run's folder. A tracker writes its local files inside it."""
    config: dict[str, Any]
    """Configuration as plain values by dotted option name, without secrets."""
    id: str = ""
    """Id of the run to continue at the service. Empty for a new run."""
    step: int = 0
    """The step that the run resumes from. Metrics of later steps will be logged again."""


class Tracker(Protocol):
    """The interface of an experiment tracker, which logs to one run at a tracking service such as
    MLflow.

    It is created as ``Class(about, **options)`` on the main thread before training. All other
    methods are called on a single background thread. A class may also have two optional methods:
    ``note(step, name, text)`` receives each problem that the run's diagnosis finds, and
    ``send_folder(folder)`` uploads the published policy as an artefact of the run.

    Example:
        ramify train recipes/tiny.py 'track=["my_package.tracker:Board"]'
    """

    modules: ClassVar[tuple[str, ...]]
    """Python modules that the class can use. At least one of them must be installed."""
    extra: ClassVar[str]
    """The extra that installs a module, such as ``tensorboard``. Empty for a user-defined class."""

    @property
    def id(self) -> str:
        """The id that the tracking service gave to this run.

        It is stored so that a resumed run can continue the same one.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Send all pending metrics and end the run at the service.

        ``failed`` is True if training ended with an error.
        """
        ...


class RunTrackers:
    """The experiment trackers of one training run.

    Call the instance with a step's metrics to pass them on to all trackers.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Check the names and options of the trackers without opening them.

        Raises ConfigError for an unknown name or option, or a missing package.
        """
        self._classes = {
            name: _class_of(name, options.get(name, {})) for name in dict.fromkeys(names)
        }
        self._options = options
        self._open: dict[str, Tracker] = {}
        self._queue: queue.SimpleQueue[StepMetrics | None] = queue.SimpleQueue()
        self._failed = False

    def __call__(self, measured: StepMetrics) -> None:
        self._queue.put(measured)

    @contextlib.contextmanager
    def open_all(
        self, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None = None
    ) -> Iterator[None]:
        """Open all trackers for the duration of a ``with`` block.

        ``resumed_at`` is the step from which a resumed run continues. Raises ConfigError if a
        tracker cannot be opened.
        """
        if not self._classes:
            yield
            return
        folder.mkdir(parents=True, exist_ok=True)
        stored_ids = _read_ids(folder) if resumed_at is not None else {}
        about = TrackerRunInfo(
            name=name, folder=folder, config=flatten_config(config), step=resumed_at or 0
        )
        sender = threading.Thread(target=self._send, daemon=True, name="ramify trackers")
        # Cleared only if the block ends without an error.
        self._failed = True
        try:
            for tracker_name, kind in self._classes.items():
                self._open[tracker_name] = self._opened_one(
                    tracker_name,
                    kind,
                    msgspec.structs.replace(about, id=stored_ids.get(tracker_name, "")),
                )
            new_ids = {tracker_name: tracker.id for tracker_name, tracker in self._open.items()}
            ids = {**stored_ids, **new_ids}
            (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(ids)))
            sender.start()
            yield
            self._failed = False
        finally:
            self._end(sender)

    def _opened_one(self, name: str, kind: Any, about: TrackerRunInfo) -> Tracker:
        try:
            tracker: Tracker = kind(about, **self._options.get(name, {}))
        except Exception as error:
            raise ConfigError(
                f"tracker '{name}' cannot be opened: {_short_error(error)}; remove it "
                "from the recipe to "
                "run without it"
            ) from error
        return tracker

    def _end(self, sender: threading.Thread) -> None:
        if not sender.ident:  # a tracker could not be opened
            self._close_all()
            return
        self._queue.put(None)
        sender.join(CLOSE_S)
        if sender.is_alive():
            _log.warning(
                "tracker_late",
                f"{', '.join(self._open)}: some metrics were not sent within {CLOSE_S:g} s; "
                "metrics.jsonl has all of them",
                shown=True,
            )

    def _send(self) -> None:
        while (measured := self._queue.get()) is not None:
            values = {f"{measured.stage}/{name}": value for name, value in measured.values.items()}
            for name, tracker in tuple(self._open.items()):
                try:
                    tracker.log(measured.step, values)
                    # A user's tracker may have no place for text.
                    if (note := getattr(tracker, "note", None)) is not None:
                        for found in measured.diagnoses:
                            note(measured.step, found.name, found.text)
                except Exception as error:  # noqa: BLE001 -- no tracker error may end a run
                    del self._open[name]
                    _log.warning(
                        "tracker_failed",
                        f"tracker '{name}' failed and is no longer used; the run continues: "
                        f"{_short_error(error)}",
                        shown=True,
                        tracker=name,
                    )
                    self._close(name, tracker, is_reported=True)
        self._close_all()

    def _close_all(self) -> None:
        for name, tracker in self._open.items():
            self._close(name, tracker)

    def _close(self, name: str, tracker: Tracker, is_reported: bool = False) -> None:
        try:
            tracker.close(self._failed or is_reported)
        except Exception as error:  # noqa: BLE001 -- as above
            if not is_reported:
                text = f"tracker '{name}' failed to close: {_short_error(error)}"
                _log.warning("tracker_failed", text, shown=True, tracker=name)


def send_folder(
    run_folder: Path,
    name: str,
    title: str,
    folder: Path,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """Upload ``folder`` to the tracker ``name`` as an artefact of the run in ``run_folder``.

    ``title`` is the training run's name. Returns ``name``. Raises ConfigError if the upload fails.
    """
    kind = _class_of(name, options)
    if not hasattr(kind, "send_folder"):
        raise ConfigError(f"tracker '{name}' cannot store files: use wandb or mlflow")
    about = TrackerRunInfo(
        name=title,
        folder=run_folder,
        config=flatten_config(config),
        id=_read_ids(run_folder).get(name, ""),
    )
    try:
        tracker = kind(about, **options)
        try:
            tracker.send_folder(folder)
        finally:
            tracker.close(failed=False)
    except Exception as error:  # noqa: BLE001 (each service has its own errors)
        raise ConfigError(
            f"tracker '{name}' could not store {folder}: {_short_error(error)}"
        ) from None
    return name


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration to dotted names.

    For example, ``{"rl": {"steps": 3}}`` becomes ``{"rl.steps": 3}``. Secrets and the trackers' own
    options are left out.
    """
    return dict(
        _leaves(
            redact_config({key: value for key, value in config.items() if key != "tracker_options"})
        )
    )


def _leaves(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        dotted = f"{name}.{key}" if name else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, dotted)
        else:
            yield (
                dotted,
                value
                if isinstance(value, str | int | float | bool)
                else msgspec.json.encode(value).decode(),
            )


def _class_of(name: str, options: Mapping[str, Any]) -> Any:
    kind = TRACKERS.resolve(name)
    if not callable(kind):
        raise ConfigError(f"tracker '{name}' is a {type(kind).__name__}, not a class")
    modules = getattr(kind, "modules", ())
    if modules and not any(find_spec(module) for module in modules):
        how = install_command(kind.extra) if kind.extra else f"pip install {modules[0]}"
        raise ConfigError(f"tracker '{name}' needs a package that is not installed: {how}")
    parameters = [*inspect.signature(kind).parameters.values()][1:]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters]
    for option in options:
        if not takes_all and option not in names:
            raise ConfigError(
                f"tracker '{name}' has no option '{option}': {did_you_mean(option, names)}"
            )
    return kind


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _short_error(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
