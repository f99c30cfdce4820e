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
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from difflib import get_close_matches
from logging import DEBUG, ERROR, INFO, WARNING, LogRecord
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ramify.secrets import MARK, SecretRedactor, names_a_secret, without_secrets

VARIABLE = "RAMIFY_LOG"
FORMAT_VARIABLE = "RAMIFY_LOG_FORMAT"
_FILE_VARIABLE = "RAMIFY_RUN_LOG"
"""Set for child processes: their records go to this file too, if they find its folder."""
_RUN_VARIABLE = "RAMIFY_RUN_ID"
RUN_LOG = "run.log"
"""Name of a training run's log in its folder."""
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
OFF = logging.CRITICAL + 1
MAX_CHARS = 4000
"""Longest message, field or traceback in characters; the middle of a longer one is left out."""
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
                name: MARK if names_a_secret(name) else _plain(value, secrets)
                for name, value in fields.items()
            },
            "shown": shown,
            "is_delivered": True,
        }
        path, line, function, _ = logger.findCaller(stacklevel=depth + 2)
        text = _cut(without_secrets(message, secrets))
        record = logger.makeRecord(logger.name, level, path, line, text, (), None, function, extra)
        if _process:
            record.processName = _process
        if error is not None:
            # Only the text is kept: another handler would print the exception unredacted.
            trace = "".join(traceback.format_exception(error)).rstrip()
            record.exc_text = _cut(without_secrets(trace, secrets))
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
            _event(record),
            text_of(record),
            getattr(record, "fields", {}),
            runs_of(record),
            getattr(record, "shown", False),
        )


def _tell_run(message: str) -> None:
    """Pass a warning to the current run, or keep it for the next one."""
    listener, collected = _on_warning.get(), _collected.get()
    if listener is not None:
        listener(_cut(without_secrets(message)))
    elif collected is not None:
        collected.append(_cut(without_secrets(message)))


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


def _set_outputs(outputs: tuple[Output, ...]) -> None:
    global _outputs, _lowest
    _outputs = outputs
    _lowest = min((output.lowest for output in outputs), default=OFF)


def _deliver(record: LogRecord) -> None:
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


class LogFile:
    """A log file: one line of bounded length per record, appended by any number of processes."""

    def __init__(self, path: Path, level: int = INFO, *, waits: bool = False) -> None:
        """The file is created at the first record, readable by its owner only. With ``waits``,
        records are held back until ``begin``."""
        self.path = path
        self._levels = _with_floor(level)
        self._fd: int | None = None
        self._held: list[LogRecord] | None = [] if waits else None

    @property
    def lowest(self) -> int:
        return min(self._levels.values())

    def takes(self, record: LogRecord) -> bool:
        return record.levelno >= _level_in(self._levels, room_of(record))

    def begin(self) -> None:
        """Write what was held back, and every record from now on."""
        held, self._held = self._held, None
        for record in held or ():
            self.write(record)

    def write(self, record: LogRecord) -> None:
        if self._held is not None:
            self._held.append(record)
            return
        # A full disk or a removed folder must not end a run.
        with contextlib.suppress(OSError):
            if self._fd is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
            line = json_line(record) if wants_json() else text_line(record)
            os.write(self._fd, line.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class Console:
    """Records on a terminal: those that are ``shown``, and those of ``levels`` in a short form."""

    def __init__(
        self, show: Callable[[str], None], levels: Mapping[str, int] | None = None
    ) -> None:
        """``show`` prints one line. ``levels`` maps a room, or ``""`` for all, to its level."""
        self.show = show
        self.levels = dict(levels or {})
        self.hidden: set[str] = set()
        """Events that the command prints itself, unless the format is JSON."""

    @property
    def lowest(self) -> int:
        return min(self.levels.values(), default=INFO)

    def takes(self, record: LogRecord) -> bool:
        if _event(record) in self.hidden and not wants_json():
            return False
        is_wanted = record.levelno >= _level_in(self.levels, room_of(record))
        return is_wanted or getattr(record, "shown", False)

    def write(self, record: LogRecord) -> None:
        # A terminal that was closed must not end a run: run.log still has the record.
        with contextlib.suppress(OSError, ValueError):
            if not self.levels:
                self.show(text_of(record))
            elif wants_json():
                self.show(json_line(record))
            else:
                self.show(short_line(record))


class Sender:
    """Passes records to another process."""

    def __init__(self, send: Callable[[SentRecord], None]) -> None:
        self._send = send
        self._levels = _with_floor(INFO)

    @property
    def lowest(self) -> int:
        return min(self._levels.values())

    def takes(self, record: LogRecord) -> bool:
        return record.levelno >= _level_in(self._levels, room_of(record))

    def write(self, record: LogRecord) -> None:
        self._send(SentRecord.of(record))


# --- levels


def levels_of(setting: str) -> tuple[dict[str, int], list[str]]:
    """``"engine=debug,info"`` -> levels by room (``""`` is all rooms), and one line for each part
    that is wrong."""
    levels: dict[str, int] = {}
    problems = []
    for part in filter(None, (part.strip() for part in setting.split(","))):
        room, _, name = part.rpartition("=")
        room = room.strip().removeprefix("ramify.")
        level = LEVELS.get(name.strip().lower())
        if level is not None and (room in ROOMS or (not room and "=" not in part)):
            levels["" if room == "ramify" else room] = level
            continue
        given, known = (name, LEVELS) if level is None else (room, ROOMS)
        close = get_close_matches(given.strip().lower(), known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"
        shown = without_secrets(part if len(part) <= 60 else part[:59] + "…")
        problems.append(
            f"{VARIABLE}: {shown!r} is ignored; write LEVEL or ROOM=LEVEL, as in "
            f"engine=debug,train=info: {hint}"
        )
    return levels, problems


ROOMS = [
    "ramify",
    "cli",
    "clients",
    "cluster",
    "combinators",
    "engine",
    "evaluate",
    "inference",
    "models",
    "progress",
    "sandbox",
    "serve",
    "sources",
    "store",
    "tasks",
    "testing",
    "train",
    "viewer",
]
"""Rooms that have a logger; ``ramify`` stands for all of them."""


def _level_in(levels: Mapping[str, int], room: str) -> int:
    # Progress is displayed by other means: it is recorded only if its room is named.
    return levels.get(room, OFF if room == "progress" else levels.get("", OFF))


def _with_floor(level: int) -> dict[str, int]:
    """Levels by room: ``level``, and lower where ``RAMIFY_LOG`` asks for more."""
    levels, _ = levels_of(os.environ.get(VARIABLE, ""))
    return {"": level} | {room: min(level, own) for room, own in levels.items()}


def configure(show: Callable[[str], None], verbosity: int = 0) -> Console:
    """Attach the console of this process, replacing an earlier one. ``verbosity`` is the number of
    ``-v``: 1 for INFO, 2 for DEBUG. A wrong ``RAMIFY_LOG`` is reported by ``show``."""
    levels, problems = levels_of(os.environ.get(VARIABLE, ""))
    if (form := os.environ.get(FORMAT_VARIABLE, "")) not in ("", "text", "json"):
        show(f"ramify: {FORMAT_VARIABLE}: '{form}' is ignored; write json, or text")
        os.environ[FORMAT_VARIABLE] = ""
    if problems:
        show(f"ramify: {'; '.join(problems)}")
        # Child processes need not report it again.
        named = {value: name for name, value in LEVELS.items()}
        os.environ[VARIABLE] = ",".join(
            f"{room}={named[level]}" if room else named[level] for room, level in levels.items()
        )
    if verbosity:
        levels = _with_floor(DEBUG if verbosity > 1 else INFO)
    if (console := current_console()) is not None:
        detach(console)
    console = Console(show, levels)
    attach(console)
    return console


def current_console() -> Console | None:
    """The console that ``configure`` attached."""
    return next((output for output in _outputs if isinstance(output, Console)), None)


def to_stderr(text: str) -> None:
    """Print ``text`` on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


# --- processes of a run


@contextlib.contextmanager
def run_log(path: Path, id: str) -> Iterator[LogFile]:
    """The log file of the run ``id``, for all threads and child processes of this process. It
    takes records of INFO and above, and more if ``RAMIFY_LOG`` asks for more. Nothing is written
    before its ``begin``, so that a run with a wrong configuration leaves no file."""
    file = LogFile(path, waits=True)
    variables = {_FILE_VARIABLE: str(path.absolute()), _RUN_VARIABLE: id}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with in_run(id, all_threads=True), attached(file):
            yield file
    finally:
        file.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def join_run(process: str) -> None:
    """Call this process ``process`` in its records, and write them to the log of the run that
    started it, if one did and its folder is on this machine."""
    global _process, _process_runs
    file = Path(os.environ.get(_FILE_VARIABLE, ""))
    if not file.name:
        return
    _process, _process_runs = process, (os.environ[_RUN_VARIABLE],)
    if file.parent.is_dir():
        attach(LogFile(file))


# --- text of a record


def room_of(record: LogRecord) -> str:
    """``ramify.engine.x`` -> ``engine``"""
    return record.name.removeprefix("ramify.").partition(".")[0]


def runs_of(record: LogRecord) -> tuple[str, ...]:
    """Ids of the record's runs, outermost first."""
    run = getattr(record, "run", "")
    return (*getattr(record, "outer_runs", ()), run) if run else ()


def text_of(record: LogRecord) -> str:
    """Message of a record on one line, without secrets."""
    return _one_line(_cut(without_secrets(record.getMessage())))


def text_line(record: LogRecord) -> str:
    """``2026-11-22T09:15:00.123Z WARNING train my-run restart: worker 2 is lost  worker=2``"""
    run = "/".join(runs_of(record)) or "-"
    process = f" [{_process}]" if _process else ""
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
        "event": _event(record),
        "run": runs[-1] if runs else "",
        **({"outer_runs": runs[:-1]} if runs[1:] else {}),
        **({"process": _process} if _process else {}),
        "message": text_of(record),
        "fields": getattr(record, "fields", {}),
        **({"traceback": trace} if (trace := _trace(record)) else {}),
    }
    return msgspec.json.encode(row, enc_hook=str).decode()


def wants_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE, "") == "json"


def _rest(record: LogRecord) -> str:
    fields = getattr(record, "fields", {})
    shown = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    trace = _trace(record)
    parts = [f"{_event(record)}: {text_of(record)}", shown, _one_line(trace)]
    return "  ".join(filter(None, parts))


def _event(record: LogRecord) -> str:
    return getattr(record, "event", "message")


def _moment(record: LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.created % 1 * 1000):03d}Z"


def _trace(record: LogRecord) -> str:
    if record.exc_text:
        return _cut(without_secrets(record.exc_text))
    if record.exc_info and record.exc_info[1] is not None:
        trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return _cut(without_secrets(trace))
    return ""


def _plain(value: Any, secrets: SecretRedactor) -> Any:
    """A field as JSON can hold it: a number, or text without secrets."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    return _cut(without_secrets(str(value), secrets))


def _value(value: Any) -> str:
    text = str(value)
    is_word = text and not any(char.isspace() or char in '"=' for char in text)
    return _one_line(text if is_word else msgspec.json.encode(text).decode())


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def _one_line(text: str) -> str:
    return "".join(
        char if char.isprintable() else " | " if char == "\n" else repr(char)[1:-1] for char in text
    )


if not any(isinstance(handler, _Bridge) for handler in _ROOT.handlers):
    _ROOT.addHandler(_Bridge())
if os.environ.get(VARIABLE):
    configure(to_stderr)
