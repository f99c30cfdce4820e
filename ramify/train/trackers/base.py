"""Services that a run's measurements are also sent to: by name, beside ``metrics.jsonl``, which has
all of them in any case.

    Measured ── listener ──> queue ── a thread ──> each tracker: log(step, {"rl/reward": 0.46, …})

Decides what is sent (every value, under its stage's name; the run's configuration once, never a
secret), that a resumed run goes on in the same run over there, and that nothing over there can hold
training up or end it: a tracker that fails is told of once and left alone. Leaves out what each
service wants: a file each, with a class that implements ``Tracker``.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.train.metrics import StepMetrics
from ramify.train.override import of_name
from ramify.train.redacted import redacted

TRACKERS = {
    "tensorboard": "ramify.train.trackers.tensorboard:TensorBoardTracker",
    "wandb": "ramify.train.trackers.wandb:WandbTracker",
    "mlflow": "ramify.train.trackers.mlflow:MlflowTracker",
    "trackio": "ramify.train.trackers.trackio:TrackioTracker",
}
"""Name -> class."""
FILE = "trackers.json"
"""Of a run's folder: name of a tracker -> id of the run over there."""
CLOSE_S = 60.0
"""For what is still to be sent when a run is over."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is told of a run at its beginning."""

    name: str
    folder: Path
    """Of the run; what a tracker writes to this disk belongs below it."""
    config: dict[str, Any]
    """Dotted name -> plain value, without secrets."""
    id: str = ""
    """Of the run over there that goes on; empty for a new one."""
    step: int = 0
    """The last step that was kept; what was sent of later ones will be measured again."""


class Tracker(Protocol):
    """One run at a service. Made as ``Class(about, **options)``, on the main thread, before
    anything is trained; everything else is called on one other thread."""

    modules: ClassVar[tuple[str, ...]]
    """What it imports; any one of them will do."""
    extra: ClassVar[str]
    """``tensorboard`` for ``pip install 'ramify[tensorboard]'``; empty for a class of one's own."""

    @property
    def id(self) -> str:
        """What to go on with this run by."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Send what is left. ``failed``: the run ended by an error."""
        ...


class RunTrackers:
    """The trackers of one run: a listener of its measurements."""

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        """Nothing is opened. Raises ConfigError for what could not be: an unknown name or option, a
        missing package."""
        self._classes = {
            name: _class_of(name, options.get(name, {})) for name in dict.fromkeys(names)
        }
        self._options, self._say = options, say
        self._open: dict[str, Tracker] = {}
        self._waiting: queue.SimpleQueue[StepMetrics | None] = queue.SimpleQueue()
        self._failed = False

    def __call__(self, measured: StepMetrics) -> None:
        if self._open:
            self._waiting.put(measured)

    @contextlib.contextmanager
    def opened(
        self, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None = None
    ) -> Iterator[None]:
        """Open all as long as the block lasts. ``resumed_at`` is the step that a run goes on from.
        Raises ConfigError where one cannot be opened."""
        if not self._classes:
            yield
            return
        folder.mkdir(parents=True, exist_ok=True)
        known = _ids(folder) if resumed_at is not None else {}
        about = RunInfo(name=name, folder=folder, config=flat(config), step=resumed_at or 0)
        sender = threading.Thread(target=self._send, daemon=True, name="ramify trackers")
        self._failed = True
        try:
            for each, kind in self._classes.items():
                self._open[each] = self._opened_one(
                    each, kind, msgspec.structs.replace(about, id=known.get(each, ""))
                )
            ids = {**known, **{each: tracker.id for each, tracker in self._open.items()}}
            (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(ids)))
            sender.start()
            yield
            self._failed = False
        finally:
            self._end(sender)

    def _opened_one(self, name: str, kind: Any, about: RunInfo) -> Tracker:
        try:
            tracker: Tracker = kind(about, **self._options.get(name, {}))
        except Exception as error:
            raise ConfigError(
                f"tracker '{name}' cannot be opened: {_short(error)}; leave it out to go on without"
            ) from error
        return tracker

    def _end(self, sender: threading.Thread) -> None:
        if not sender.ident:  # one could not be opened
            self._close_all()
            return
        self._waiting.put(None)
        sender.join(CLOSE_S)
        if sender.is_alive():
            self._say(
                f"{', '.join(self._open)}: not all was sent within {CLOSE_S:g} s; metrics.jsonl "
                "has it"
            )

    def _send(self) -> None:
        while (measured := self._waiting.get()) is not None:
            values = {f"{measured.stage}/{name}": value for name, value in measured.values.items()}
            for name, tracker in tuple(self._open.items()):
                try:
                    tracker.log(measured.step, values)
                except Exception as error:  # noqa: BLE001 -- whatever it raises, a paid run goes on
                    del self._open[name]
                    self._say(
                        f"tracker '{name}' failed and is told no more; the run goes on: "
                        f"{_short(error)}"
                    )
                    self._close(name, tracker, is_told=True)
        self._close_all()

    def _close_all(self) -> None:
        for name, tracker in self._open.items():
            self._close(name, tracker)

    def _close(self, name: str, tracker: Tracker, is_told: bool = False) -> None:
        try:
            tracker.close(self._failed or is_told)
        except Exception as error:  # noqa: BLE001 -- as above
            if not is_told:
                self._say(f"tracker '{name}' failed at the end: {_short(error)}")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """``{"rl": {"steps": 3}}`` -> ``{"rl.steps": 3}``, without secrets; options of trackers are
    left out."""
    return dict(
        _leaves(redacted({key: value for key, value in config.items() if key != "tracker_options"}))
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
    kind = of_name(name, TRACKERS, "tracker")
    modules = getattr(kind, "modules", ())
    if modules and not any(find_spec(module) for module in modules):
        how = f"pip install 'ramify[{kind.extra}]'" if kind.extra else f"pip install {modules[0]}"
        raise ConfigError(f"tracker '{name}' needs a package that is not installed: {how}")
    parameters = [*inspect.signature(kind).parameters.values()][1:]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    known = [each.name for each in parameters]
    for option in options:
        if not takes_all and option not in known:
            raise ConfigError(
                f"tracker '{name}' has no option '{option}': {nearest(option, known)}"
            )
    return kind


def _ids(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
