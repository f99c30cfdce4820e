"""The ``ramify`` logger tree: one logger per room; records have an event, fields and a run's id.

    log = RoomLogger("clients")                             the logger ``ramify.clients``
    log.warning("retry", "openai: 429; trying again in 2.0 s", wait_s=2.0)
    with in_run("20261122-091500-1f2e"): …                  records inside carry this id
    with attached(LogFile(path)): …                   also write all of them to a file

    record ── without secrets ──┬─▶ attached outputs: OUT/run.log, stderr of the command
                                └─▶ Python's ``logging``, as the application configures it

A record has ``event`` (its name), ``run`` (the innermost run's id), ``outer_runs`` (ids of the runs
around it, such as the training run of a rollout), ``fields`` (a dict) and ``shown`` (True if a
command prints it without ``-v``). Secrets are removed before any output sees the record, also from
exceptions. A call whose level no output takes costs two comparisons.

``RAMIFY_LOG=engine=debug,train=info`` (or ``RAMIFY_LOG=debug``) writes records to stderr, in
library code too; ``RAMIFY_LOG_FORMAT=json`` writes them, and run logs, as JSON lines. A wrong part
is reported in one line and ignored: a setting for diagnosis must not stop a run. Progress (see
progress.py) is recorded only by ``progress=info``.

The text of a record is one line for a file, a short one for a terminal, or a JSON object:

    2026-11-22T09:15:00.123Z WARNING train my-run restart: worker 2 is lost  worker=2
    09:15:00 warning train restart: worker 2 is lost  worker=2

Every function that writes one removes secrets and bounds the length. Not here: the events of a run
(see types/event.py), and where records go (``log_outputs.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from logging import DEBUG, ERROR, INFO, WARNING, LogRecord
from typing import Any, Protocol

import msgspec

from ramify.printable import escaped
from ramify.secrets import MARK, SecretRedactor, names_a_secret, without_secrets

FORMAT_VARIABLE = "RAMIFY_LOG_FORMAT"
MAX_CHARS = 4000
"""Longest message, field or traceback in characters; the middle of a longer one is left out."""


def room_of(record: LogRecord) -> str:
    """``ramify.engine.x`` -> ``engine``"""
    return record.name.removeprefix("ramify.").partition(".")[0]


def runs_of(record: LogRecord) -> tuple[str, ...]:
    """Ids of the record's runs, outermost first."""
    run = getattr(record, "run", "")
    return (*getattr(record, "outer_runs", ()), run) if run else ()


def process_of(record: LogRecord) -> str:
    """Name of the record's process; empty for the run's own."""
    name = record.processName or ""
    return "" if name == "MainProcess" else name


def text_of(record: LogRecord) -> str:
    """Message of a record on one line, without secrets."""
    return _one_line(cut(without_secrets(record.getMessage())))


def text_line(record: LogRecord) -> str:
    """``2026-11-22T09:15:00.123Z WARNING train my-run restart: worker 2 is lost  worker=2``"""
    run = "/".join(runs_of(record)) or "-"
    process = f" [{name}]" if (name := process_of(record)) else ""
    return f"{_moment(record)} {record.levelname} {room_of(record)} {run}{process} {_rest(record)}"


def short_line(record: LogRecord) -> str:
    """``09:15:00 warning train restart: worker 2 is lost  worker=2``"""
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    return f"{clock} {record.levelname.lower()} {room_of(record)} {_rest(record)}"


def json_line(record: LogRecord) -> str:
    """The record as one JSON object with the keys of ``text_line``, fields, and any traceback."""
    runs = runs_of(record)
    row = {
        "at": _moment(record),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": event_of(record),
        "run": runs[-1] if runs else "",
        **({"outer_runs": runs[:-1]} if runs[1:] else {}),
        **({"process": name} if (name := process_of(record)) else {}),
        "message": text_of(record),
        "fields": getattr(record, "fields", {}),
        **({"traceback": trace} if (trace := _trace(record)) else {}),
    }
    return escaped(msgspec.json.encode(row, enc_hook=str)).decode()


def wants_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE, "") == "json"


def _rest(record: LogRecord) -> str:
    fields = getattr(record, "fields", {})
    shown = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    trace = _trace(record)
    parts = [f"{event_of(record)}: {text_of(record)}", shown, _one_line(trace)]
    return "  ".join(filter(None, parts))


def event_of(record: LogRecord) -> str:
    """Name of the record's event; ``message`` for one of plain ``logging`` calls."""
    return getattr(record, "event", "message")


def _moment(record: LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.created % 1 * 1000):03d}Z"


def _trace(record: LogRecord) -> str:
    if record.exc_text:
        return cut(without_secrets(record.exc_text))
    if record.exc_info and record.exc_info[1] is not None:
        trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return cut(without_secrets(trace))
    return ""


def plain_field(value: Any, secrets: SecretRedactor) -> Any:
    """A field as JSON can hold it: a number, or text without secrets."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    return cut(without_secrets(str(value), secrets))


def _value(value: Any) -> str:
    text = str(value)
    is_word = text and not any(char.isspace() or char in '"=' for char in text)
    return _one_line(text if is_word else msgspec.json.encode(text).decode())


def cut(text: str) -> str:
    """``text``, with the middle left out if it is longer than ``MAX_CHARS``."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def _one_line(text: str) -> str:
    return "".join(
        char if char.isprintable() else " | " if char == "\n" else repr(char)[1:-1] for char in text
    )


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
