"""Handlers and formatters that send log records to a terminal, to a file, or to another process.

    ConsoleLogHandler     prints records on a terminal, as ``-v`` or ``RAMIFY_LOG`` asks
    FileLogHandler        appends records to ``OUT/run.log``, the log file of a training run
    ForwardingLogHandler  sends the records of a rollout worker to the trainer

This module decides the log levels of each part of the package and the format of a log line. It also
ensures that a full disk or a closed terminal never ends a run. A record is written as a long line
for files, as a short one for terminals, or as a JSON object:

    2026-11-22T09:15:00.123Z WARNING train my-run restart: worker 2 is lost  worker=2
    09:15:00 warning train restart: worker 2 is lost  worker=2

What a record contains, and which handlers receive it, is decided by ``logging.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from logging import DEBUG, ERROR, INFO, WARNING, LogRecord
from pathlib import Path
from typing import Any

import msgspec

from ramify.nearest_name import nearest_name
from ramify.secret_redaction import redact_likely_secrets
from ramify.terminal_sanitizer import escape_json_controls

VARIABLE = "RAMIFY_LOG"
FORMAT_VARIABLE = "RAMIFY_LOG_FORMAT"
RUN_LOG = "run.log"
"""Name of the log file in a training run's folder."""
OFF = logging.CRITICAL + 1
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
ROOMS = [
    *("ramify", "actors", "cli", "clients", "cluster", "engine", "evaluate", "inference", "maps"),
    *("models", "plans", "progress", "sandbox", "serve", "sources", "store", "tasks", "testing"),
    *("train", "viewer"),
]
"""Names that a log-level setting accepts: the subpackages with a separate logger, and ``ramify``
for all other loggers."""


# --- levels


def parse_log_levels(setting: str) -> tuple[dict[str, int], list[str]]:
    """Parse a log-level setting such as ``engine=debug,info``.

    Returns the level of each logger by name, with ``""`` for all others, and an error message for
    each invalid item.
    """
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
        close = nearest_name(given.strip(), known)
        hint = f"did you mean '{close}'?" if close else f"known are {', '.join(known)}"
        shown = redact_likely_secrets(part if len(part) <= 60 else part[:59] + "…")
        problems.append(
            f"{VARIABLE}: {shown!r} is ignored; write LEVEL or ROOM=LEVEL, as in "
            f"engine=debug,train=info: {hint}"
        )
    return levels, problems


def component_levels(level: int) -> dict[str, int]:
    """Return a dict of log levels by logger name, in which ``""`` holds the default level.

    The level is ``level``, or lower if the variable ``RAMIFY_LOG`` asks for more detail.
    """
    levels, _ = parse_log_levels(os.environ.get(VARIABLE, ""))
    return {"": level} | {room: min(level, own) for room, own in levels.items()}


# --- text of a record, to which ``LogRedactionFilter`` has given its event, runs and fields


class LogLineFormatter(logging.Formatter):
    """A formatter that writes a log record as one line of text.

    ``short=True`` gives the shorter form for terminals.
    """

    def __init__(self, *, short: bool = False) -> None:
        super().__init__()
        self._is_short = short

    def format(self, record: LogRecord) -> str:
        given = vars(record)
        if self._is_short:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            start = f"{clock} {record.levelname.lower()} {component_of(record)}"
        else:
            runs, process = "/".join(record_run_ids(record)) or "-", _process_of(record)
            start = f"{_format_timestamp(record)} {record.levelname} {component_of(record)} {runs}"
            start += f" [{process}]" if process else ""
        fields = " ".join(
            f"{name}={_format_field_value(value)}" for name, value in given["fields"].items()
        )
        text = f"{start} {given['event']}: {record.getMessage()}"
        return _one_line("  ".join(filter(None, (text, fields, record.exc_text))))


class JsonFormatter(logging.Formatter):
    """A formatter that writes a log record as one line of JSON."""

    def format(self, record: LogRecord) -> str:
        runs, process = record_run_ids(record), _process_of(record)
        row = {
            "at": _format_timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": vars(record)["event"],
            "run": runs[-1] if runs else "",
            **({"outer_runs": runs[:-1]} if runs[1:] else {}),
            **({"process": process} if process else {}),
            "message": one_line_message(record),
            "fields": vars(record)["fields"],
            **({"traceback": record.exc_text} if record.exc_text else {}),
        }
        try:
            return escape_json_controls(msgspec.json.encode(row)).decode()
        except UnicodeEncodeError:  # lone surrogates can only be written as escapes
            return json.dumps(row)


def component_of(record: LogRecord) -> str:
    """Return the subpackage that a log record belongs to, such as ``engine`` for the logger
    ``ramify.engine.x``."""
    return record.name.removeprefix("ramify.").partition(".")[0]


def record_run_ids(record: LogRecord) -> tuple[str, ...]:
    """Return the ids of the runs that were active when a log record was made, from the outermost to
    the innermost."""
    given = vars(record)
    return (*given["outer_runs"], given["run"]) if given["run"] else ()


def one_line_message(record: LogRecord) -> str:
    """Return the message of a log record with line breaks removed."""
    return _one_line(record.getMessage())


def _process_of(record: LogRecord) -> str:
    """Return the name of the process that wrote a log record, or ``""`` for the run's main
    process."""
    name = record.processName or ""
    return "" if name == "MainProcess" else name


def _format_timestamp(record: LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.created % 1 * 1000):03d}Z"


def _format_field_value(value: Any) -> str:
    text = str(value)
    is_word = text and not any(char.isspace() or char in '"=' for char in text)
    return text if is_word else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(map(_escape_unprintable, text))


def _escape_unprintable(char: str) -> str:
    return char if char.isprintable() else " | " if char == "\n" else repr(char)[1:-1]


# --- handlers


class _ComponentLogHandler(logging.Handler):
    """A log handler with a separate log level for each logger of the package."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        """Create a log handler that applies the level given in ``levels`` to each logger.

        ``levels`` maps a logger name, such as ``engine``, to its log level, with ``""`` for all
        others.
        """
        super().__init__(min(levels.values(), default=INFO))
        self.levels = dict(levels)
        self.is_json = os.environ.get(FORMAT_VARIABLE, "") == "json"
        self.setFormatter(JsonFormatter() if self.is_json else LogLineFormatter())

    def filter(self, record: LogRecord) -> bool:
        # Progress is displayed by other means: it is recorded only if its room is named.
        room = component_of(record)
        default = OFF if room == "progress" else self.levels.get("", OFF)
        return record.levelno >= self.levels.get(room, default)


class FileLogHandler(_ComponentLogHandler):
    """A handler that appends log records of level INFO and above to a file.

    It limits the length of each line. Several processes may append to the same file.
    """

    def __init__(self, path: Path, *, waits: bool = False) -> None:
        """Create a handler that appends log records to the file at ``path``.

        The first record creates the file, which only its owner can read. With ``waits``, records
        stay in memory until ``release_held_records`` is called.
        """
        super().__init__(component_levels(INFO))
        self.path = path
        self._fd: int | None = None
        self._held: list[LogRecord] | None = [] if waits else None

    def release_held_records(self) -> None:
        """Write the log records held in memory to the file, and write all later ones
        immediately."""
        held, self._held = self._held, None
        for record in held or ():
            self.handle(record)

    def emit(self, record: LogRecord) -> None:
        if self._held is not None:
            self._held.append(record)
            return
        # A full disk or a removed folder must not end a run.
        with contextlib.suppress(OSError):
            if self._fd is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
            line = self.format(record)
            os.write(self._fd, line.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        """Close the file.

        A later record opens it again, because ``logging.config`` closes all handlers of a process.
        """
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        super().close()


class ConsoleLogHandler(_ComponentLogHandler):
    """A handler that prints log records on the terminal in a short form.

    It prints the records logged with ``shown=True``, and those at or above the configured log
    levels.
    """

    def __init__(
        self, show: Callable[[str], None], levels: Mapping[str, int] | None = None
    ) -> None:
        """Create a handler that passes each formatted log line to the function ``show``."""
        super().__init__(levels or {})
        self.show = show
        self.hidden: set[str] = set()
        """Names of log events that are not printed as text, because the command itself prints them.
        In JSON output they are included."""
        if self.level > DEBUG:
            self.setLevel(logging.NOTSET)  # a record that is shown may have any level
        if not self.is_json:
            self.setFormatter(LogLineFormatter(short=True))

    def filter(self, record: LogRecord) -> bool:
        given = vars(record)
        if given["event"] in self.hidden and not self.is_json:
            return False
        return given["shown"] or super().filter(record)

    def format(self, record: LogRecord) -> str:
        return super().format(record) if self.levels else one_line_message(record)

    def emit(self, record: LogRecord) -> None:
        # A terminal that was closed must not end a run: run.log still has the record.
        with contextlib.suppress(OSError, ValueError):
            self.show(self.format(record))


class ForwardedLogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A log record that one process sends to another.

    It contains plain data only, because the sender may run code written by a model.
    """

    room: str
    level: int
    event: str
    message: str
    fields: dict[str, Any] = {}
    runs: tuple[str, ...] = ()
    shown: bool = False


class ForwardingLogHandler(_ComponentLogHandler):
    """A handler that sends log records of level INFO and above to another process."""

    def __init__(self, send: Callable[[ForwardedLogRecord], None]) -> None:
        super().__init__(component_levels(INFO))
        self._send = send

    def emit(self, record: LogRecord) -> None:
        given = vars(record)
        self._send(
            ForwardedLogRecord(
                component_of(record),
                record.levelno,
                given["event"],
                one_line_message(record),
                given["fields"],
                record_run_ids(record),
                given["shown"],
            )
        )
