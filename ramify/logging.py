"""The ``ramify`` logger tree: one logger per room; records have an event, fields and a run's id.

    log = RoomLogger("clients")                             the logger ``ramify.clients``
    log.warning("retry", "openai: 429; trying again in 2.0 s", wait_s=2.0)
    with in_run("20261122-091500-1f2e"): …                  records inside carry this id
    with attached(LogFile(path, INFO)): …                   also write all of them to a file

    record ── without secrets ──┬─▶ attached outputs: OUT/run.log, stderr of the command
                                └─▶ Python's ``logging``, as the application configures it

A record has ``event`` (its name), ``run`` (the innermost run's id), ``outer_runs`` (ids of the runs
around it, such as the training run of a rollout), ``fields`` (a dict) and ``shown`` (True if a
command prints it without ``-v``). Secrets are removed before any output sees the record, also from
exceptions. A call whose level no output takes costs two comparisons.

``RAMIFY_LOG=engine=debug,train=info`` (or ``RAMIFY_LOG=debug``) writes records to stderr, in
library code too; ``RAMIFY_LOG_FORMAT=json`` writes them, and run logs, as JSON lines. A wrong part
is reported in one line and ignored: a setting for diagnosis must not stop a run. Progress (see
progress.py) is recorded only by ``progress=info``. Not here: the events of a run (see
types/event.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from logging import DEBUG, ERROR, INFO, WARNING, LogRecord
from typing import Any, Protocol

import msgspec

from ramify.log_text import cut, event_of, plain_field, room_of, runs_of, text_of
from ramify.secrets import MARK, SecretRedactor, names_a_secret, without_secrets

VARIABLE = "RAMIFY_LOG"
OFF = logging.CRITICAL + 1
_ROOT = logging.getLogger("ramify")


class Output(Protocol):
    """A destination of records in addition to Python's ``logging``."""

    @property
    def lowest(self) -> int:
        """Lowest level of any record that it takes."""
        ...

    def takes(self, record: LogRecord) -> bool:
        """Whether it writes ``record``."""
        ...

    def write(self, record: LogRecord) -> None:
        """Write one record. Must not raise, and may be called by any thread."""
        ...


_outputs: tuple[Output, ...] = ()
_lowest = OFF
"""Lowest level of any room that an output takes."""
_process = ""
"""Name of this process in records; empty for the run's own process."""
_runs: ContextVar[tuple[str, ...]] = ContextVar("ramify_runs", default=())
_process_runs: tuple[str, ...] = ()
"""Runs of records from threads that were not started inside ``in_run``."""
_on_warning: ContextVar[Callable[[str], None] | None] = ContextVar(
    "ramify_on_warning", default=None
)
_collected: ContextVar[list[str] | None] = ContextVar("ramify_collected", default=None)


class RoomLogger:
    """Logger of one room. ``shown=True`` marks a record that a command prints without ``-v``."""

    def __init__(self, room: str) -> None:
        self.room = room
        self._logger = logging.getLogger(f"ramify.{room}")

    def wants(self, level: int) -> bool:
        """True if a record of ``level`` goes anywhere: ask before preparing expensive fields."""
        return level >= _lowest or self._logger.isEnabledFor(level)

    def debug(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        if shown or _lowest <= DEBUG or self._logger.isEnabledFor(DEBUG):
            self._emit(DEBUG, event, message, fields, shown)

    def info(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        if _lowest <= INFO or self._logger.isEnabledFor(INFO):
            self._emit(INFO, event, message, fields, shown)

    def warning(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        if event == "warning":
            _tell_run(message)
        self._emit(WARNING, event, message, fields, shown)

    def error(
        self,
        event: str,
        message: str,
        /,
        *,
        shown: bool = False,
        error: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """``error`` adds its traceback to the record."""
        self._emit(ERROR, event, message, fields, shown, error)

    def warn(
        self, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1
    ) -> None:
        """``warnings.warn``, and a record of the event ``warning``, which the current run's journal
        keeps."""
        _tell_run(message)
        fields = {"category": category.__name__}
        self._emit(WARNING, "warning", message, fields, depth=stacklevel)
        warnings.warn(without_secrets(message), category, stacklevel=stacklevel + 1)

    def forward(self, sent: SentRecord, process: str) -> None:
        """Emit a record of another process here, under its own run."""
        fields = {**sent.fields, "process": process}
        message = f"{process}: {sent.message}"
        with _as_runs(sent.runs):
            self._emit(sent.level, sent.event, message, fields, sent.shown)

    def _emit(
        self,
        level: int,
        event: str,
        message: str,
        fields: Mapping[str, Any],
        shown: bool = False,
        error: BaseException | None = None,
        depth: int = 1,
    ) -> None:
        """``depth`` is the number of calls between this class and the place of the record."""
        logger, secrets = self._logger, SecretRedactor()
        runs = _runs.get() or _process_runs
        extra = {
            "event": event,
            "run": runs[-1] if runs else "",
            "outer_runs": runs[:-1],
            "fields": {
                name: MARK if names_a_secret(name) else plain_field(value, secrets)
                for name, value in fields.items()
            },
            "shown": shown,
            "is_delivered": True,
        }
        path, line, function, _ = logger.findCaller(stacklevel=depth + 2)
        text = cut(without_secrets(message, secrets))
        record = logger.makeRecord(logger.name, level, path, line, text, (), None, function, extra)
        if error is not None:
            # Only the text is kept: another handler would print the exception unredacted.
            trace = "".join(traceback.format_exception(error)).rstrip()
            record.exc_text = cut(without_secrets(trace, secrets))
        _deliver(record)
        if logger.isEnabledFor(level):
            logger.handle(record)


class SentRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record on its way from another process, which may run model-written code."""

    room: str
    level: int
    event: str
    message: str
    fields: dict[str, Any] = {}
    runs: tuple[str, ...] = ()
    shown: bool = False

    @classmethod
    def of(cls, record: LogRecord) -> SentRecord:
        return cls(
            room_of(record),
            record.levelno,
            event_of(record),
            text_of(record),
            getattr(record, "fields", {}),
            runs_of(record),
            getattr(record, "shown", False),
        )


def _tell_run(message: str) -> None:
    """Pass a warning to the current run, or keep it for the next one."""
    listener, collected = _on_warning.get(), _collected.get()
    if listener is not None:
        listener(cut(without_secrets(message)))
    elif collected is not None:
        collected.append(cut(without_secrets(message)))


# --- runs


@contextlib.contextmanager
def in_run(
    id: str,
    on_warning: Callable[[str], None] | None = None,
    *,
    all_threads: bool = False,
) -> Iterator[None]:
    """Give the records of the block, and of tasks and threads that inherit its context, the run's
    id. ``on_warning`` receives the text of each record of the event ``warning``. ``all_threads``:
    also those of threads that inherit no context, because this process has one run."""
    global _process_runs
    runs, before = (*_runs.get(), id), _process_runs
    token, listening = _runs.set(runs), _on_warning.set(on_warning or _on_warning.get())
    if all_threads:
        _process_runs = runs
    try:
        yield
    finally:
        _runs.reset(token)
        _on_warning.reset(listening)
        if all_threads:
            _process_runs = before


@contextlib.contextmanager
def in_outermost_run() -> Iterator[None]:
    """Give the records of the block the id of the outermost run, for events that concern it but
    that a run inside it, such as a rollout, noticed."""
    token = _runs.set((_runs.get() or _process_runs)[:1])
    try:
        yield
    finally:
        _runs.reset(token)


@contextlib.contextmanager
def _as_runs(runs: tuple[str, ...]) -> Iterator[None]:
    current = _runs.get() or _process_runs
    token = _runs.set((*current, *(run for run in runs if run not in current)))
    try:
        yield
    finally:
        _runs.reset(token)


def collect_warnings() -> None:
    """Keep the texts of records of the event ``warning`` for the next run of this context."""
    _collected.set([])


def take_collected() -> list[str]:
    """The texts that were collected, once."""
    collected = _collected.get()
    texts = list(collected or ())
    if collected is not None:
        collected.clear()
    return texts


# --- outputs


@contextlib.contextmanager
def attached(output: Output) -> Iterator[None]:
    """Send all records of the ``ramify`` tree to ``output`` too while the block runs."""
    attach(output)
    try:
        yield
    finally:
        detach(output)


def attach(output: Output) -> None:
    """Send all records of the ``ramify`` tree to ``output`` too, until ``detach``."""
    _set_outputs((*_outputs, output))


def detach(output: Output) -> None:
    """Undo ``attach``. Does nothing if it is not attached."""
    _set_outputs(tuple(other for other in _outputs if other is not output))


def outputs() -> tuple[Output, ...]:
    """All attached outputs."""
    return _outputs


def name_process(process: str, run: str) -> None:
    """Call this process ``process`` in its records, and give them the id of ``run``."""
    global _process, _process_runs
    _process, _process_runs = process, (run,)


def _set_outputs(outputs: tuple[Output, ...]) -> None:
    global _outputs, _lowest
    _outputs = outputs
    _lowest = min((output.lowest for output in outputs), default=OFF)


def _deliver(record: LogRecord) -> None:
    if _process:
        record.processName = _process
    for output in _outputs:
        if output.takes(record):
            output.write(record)


class _Bridge(logging.NullHandler):
    """Passes records of plain ``logging.getLogger("ramify.…")`` calls, such as a plug-in's, to the
    outputs."""

    def handle(self, record: LogRecord) -> bool:
        if not getattr(record, "is_delivered", False):
            _deliver(record)
        return True


if not any(isinstance(handler, _Bridge) for handler in _ROOT.handlers):
    _ROOT.addHandler(_Bridge())
if os.environ.get(VARIABLE):
    import ramify.log_outputs  # noqa: F401  its console writes the records that were asked for
