"""Structured logging for the package: records have an event name, fields and a run id.

Each subpackage has its own logger below ``ramify``, and each record has an event name, fields and
the id of a run.

    log = ComponentLogger("clients")                        the logger ``ramify.clients``
    log.warning("retry", "openai: 429; trying again in 2.0 s", wait_s=2.0)
    with run_log_context("20261122-091500-1f2e"): …         records inside carry this id
    with attached(FileLogHandler(path)): …                  also write all of them to a file

    record ── LogRedactionFilter ──┬─▶ attached handlers: OUT/run.log, stderr of the command
                                   └─▶ Python's ``logging``, as the application configures it

A record has ``event`` (its name), ``run`` (the innermost run's id), ``outer_runs`` (ids of the runs
around it, such as the training run of a rollout), ``fields`` (a dict) and ``shown`` (True if a
command prints it without ``-v``). Secrets are removed before any handler sees the record, also from
exceptions. A call whose level no handler takes costs two comparisons.

``RAMIFY_LOG=engine=debug,train=info`` (or ``RAMIFY_LOG=debug``) writes records to stderr, also when
Ramify is used as a library; ``RAMIFY_LOG_FORMAT=json`` writes them, and run logs, as JSON lines. A
part of the setting that is wrong is reported in one line and ignored, because a setting for
diagnosis must not stop a run. Progress (see ``progress.py``) is recorded only with
``progress=info``.

The events of a run are defined in ``types/event.py``; lines, files and levels are handled in
``log_handlers.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from logging import DEBUG, ERROR, INFO, WARNING, Handler, LogRecord
from pathlib import Path
from traceback import format_exception
from types import FrameType
from typing import Any, NamedTuple

from ramify.log_handlers import (
    FORMAT_VARIABLE,
    LEVELS,
    OFF,
    VARIABLE,
    ConsoleLogHandler,
    FileLogHandler,
    ForwardedLogRecord,
    component_levels,
    parse_log_levels,
)
from ramify.secret_redaction import (
    MARK,
    SecretRedactor,
    is_secret_field_name,
    redact_likely_secrets,
)
from ramify.terminal_sanitizer import strip_control_characters

MAX_CHARS = 4000
"""Maximum length of a message, field or traceback in characters. The middle of a longer text is
left out."""
_FILE_VARIABLE = "RAMIFY_RUN_LOG"
"""Environment variable that gives child processes the path of the run's log file."""
_RUN_VARIABLE = "RAMIFY_RUN_ID"

_process = ""
"""Name of this process in log records. It is empty for the run's main process."""
_process_runs: tuple[str, ...] = ()
"""Ids of the runs for records from threads that were not started inside ``run_log_context``."""
_runs: ContextVar[tuple[str, ...]] = ContextVar("ramify_runs", default=())
_on_warning: ContextVar[Callable[[str], None] | None] = ContextVar(
    "ramify_on_warning", default=None
)
_collected: ContextVar[list[str] | None] = ContextVar("ramify_collected", default=None)


class CallerSourceLine(NamedTuple):
    """The line of code outside this package that called into it.

    Warnings about the call point there.
    """

    path: str
    number: int
    registry: dict[Any, Any]
    """The ``__warningregistry__`` of the line's module, in which Python records the warnings that
    it has already shown."""


_calling_line: ContextVar[CallerSourceLine | None] = ContextVar("ramify_calling_line", default=None)
"""User's line of code that started the current work. Warnings point to it if no such line is on the
stack, as in another thread."""
_OURS = os.path.dirname(__file__) + os.sep
_PYTHONS = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def calling_line() -> CallerSourceLine | None:
    """Return the innermost line on the stack that belongs neither to this package nor to the
    standard library.

    If there is none, return the line that started the current work, or None.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        is_of_python = path.startswith(_PYTHONS) and _INSTALLED not in path
        if not path.startswith(_OURS) and not is_of_python:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            return CallerSourceLine(path, frame.f_lineno, registry)
        frame = frame.f_back
    return _calling_line.get()


@contextlib.contextmanager
def warnings_at_line(line: CallerSourceLine | None) -> Iterator[None]:
    """Report Python warnings issued in a ``with`` block at the source line ``line``.

    This includes warnings in tasks that are started in the block.
    """
    with _set_context_variable(_calling_line, line):
        yield


def warn_at(line: CallerSourceLine | None, message: str, category: type[Warning]) -> None:
    """Issue a Python warning that is reported at ``line``, or at this function if ``line`` is
    None."""
    if line is None:
        warnings.warn(message, category, stacklevel=2)
    else:
        warnings.warn_explicit(message, category, line.path, line.number, registry=line.registry)


class LogRedactionFilter(logging.Filter):
    """A filter that redacts and shortens each log record, and adds the ids of the current runs.

    It changes the record in place, because the application's own handlers receive the same object.
    """

    def filter(self, record: LogRecord) -> bool:
        secrets = SecretRedactor()

        def plain(value: Any) -> Any:
            """Convert the value of a log record's field to a JSON value that contains no secrets.

            Text is redacted, and cut in the middle if it is too long.
            """
            if value is None or isinstance(value, bool | int):
                return value
            if isinstance(value, float):
                return round(value, 6)
            text = redact_likely_secrets(str(value), secrets)
            left_out = len(text) - MAX_CHARS
            if left_out <= 0:
                return text
            half = MAX_CHARS // 2
            return f"{text[:half]} … {left_out:,} characters … {text[-half:]}"

        try:
            record.msg = plain(record.getMessage())
        except (TypeError, ValueError):  # wrong arguments of a plug-in's call must not end a run
            record.msg = plain(f"{record.msg} {record.args}")
        record.args = ()
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = "".join(format_exception(record.exc_info[1])).rstrip()
        # Only the text is kept: another handler would print the exception unredacted.
        record.exc_info = None
        record.exc_text = plain(record.exc_text)
        record.processName = _process or record.processName
        given, runs = vars(record), _runs.get() or _process_runs
        fields = given.get("fields")
        given.update(
            event=plain(given.get("event", "message")),
            run=runs[-1] if runs else "",
            outer_runs=runs[:-1],
            fields={
                name: MARK if is_secret_field_name(name) else plain(value)
                for name, value in (fields.items() if isinstance(fields, dict) else ())
            },
            shown=bool(given.get("shown")),
            is_filtered=True,
        )
        return True


# Not in Python's tree: the levels of an application, and ``logging.config``, which disables the
# loggers that it does not name, would end a run's log.
_outputs = logging.Logger("ramify outputs", OFF)
_outputs.addFilter(LogRedactionFilter())
_outputs.addHandler(logging.NullHandler(OFF))  # without a handler, Python prints warnings itself


class ComponentLogger:
    """The logger of one subpackage, such as ``train``.

    Commands print a record that is logged with ``shown=True`` even without ``-v``.
    """

    def __init__(self, room: str) -> None:
        self.room = room
        self._logger = logging.getLogger(f"ramify.{room}")

    def is_enabled_for(self, level: int) -> bool:
        """Return True if any handler accepts records of this level.

        Check this before computing expensive fields.
        """
        return level >= _outputs.level or self._logger.isEnabledFor(level)

    def debug(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        if shown or _outputs.level <= DEBUG or self._logger.isEnabledFor(DEBUG):
            self._emit(DEBUG, event, message, fields, shown)

    def info(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        if _outputs.level <= INFO or self._logger.isEnabledFor(INFO):
            self._emit(INFO, event, message, fields, shown)

    def warning(self, event: str, message: str, /, *, shown: bool = False, **fields: Any) -> None:
        text = self._emit(WARNING, event, message, fields, shown)
        if event == "warning":
            _tell_run(text)

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
        """Log an error.

        The traceback of ``error`` is added to the record if one is given.
        """
        self._emit(ERROR, event, message, fields, shown, error)

    def issue_python_warning(
        self, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1
    ) -> None:
        """Issue a Python warning, and log the event ``warning``.

        The journal of the current run records the warning too. The warning points to the line that
        started the current work, or else to the frame at ``stacklevel``.
        """
        fields = {"category": category.__name__}
        _tell_run(self._emit(WARNING, "warning", message, fields, depth=stacklevel))
        if (line := _calling_line.get()) is not None:
            warn_at(line, redact_likely_secrets(message), category)
        else:
            warnings.warn(redact_likely_secrets(message), category, stacklevel=stacklevel + 1)

    def log_forwarded_record(self, sent: ForwardedLogRecord, process: str) -> None:
        """Log a record that another process sent, keeping its run ids."""
        fields = {**sent.fields, "process": process}
        current = _runs.get() or _process_runs
        with _set_context_variable(
            _runs, (*current, *(run for run in sent.runs if run not in current))
        ):
            self._emit(sent.level, sent.event, f"{process}: {sent.message}", fields, sent.shown)

    def _emit(
        self,
        level: int,
        event: str,
        message: str,
        fields: Mapping[str, Any],
        shown: bool = False,
        error: BaseException | None = None,
        depth: int = 1,
    ) -> str:
        """Pass a log record to all handlers, and return its message with secrets removed.

        ``depth`` is the number of stack frames between this class and the code that logs.
        """
        logger = self._logger
        path, line, function, _ = logger.findCaller(stacklevel=depth + 2)
        trace = (type(error), error, error.__traceback__) if error is not None else None
        extra = {"event": event, "fields": fields, "shown": shown}
        record = logger.makeRecord(
            logger.name, level, path, line, message, (), trace, function, extra
        )
        _outputs.handle(record)
        if logger.isEnabledFor(level):
            logger.handle(record)
        return record.getMessage()


class _PlainRecords(logging.NullHandler):
    """A handler that passes records of Python's ``ramify`` loggers to Ramify's attached handlers.

    Plug-ins, for example, use such loggers.
    """

    def handle(self, record: LogRecord) -> bool:
        if not hasattr(record, "is_filtered"):
            _outputs.handle(record)
        return True


logging.getLogger("ramify").addHandler(_PlainRecords())


# --- runs


@contextlib.contextmanager
def _set_context_variable(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def run_log_context(
    id: str,
    on_warning: Callable[[str], None] | None = None,
    *,
    all_threads: bool = False,
) -> Iterator[None]:
    """Tag all log records of a ``with`` block, including its tasks and threads, with a run id.

    ``on_warning`` is called with the text of each warning. With ``all_threads``, the id is also
    added to records of threads that do not inherit the context, so use it only if this process has
    a single run.
    """
    global _process_runs
    runs, before = (*_runs.get(), id), _process_runs
    if all_threads:
        _process_runs = runs
    try:
        with (
            _set_context_variable(_runs, runs),
            _set_context_variable(_on_warning, on_warning or _on_warning.get()),
        ):
            yield
    finally:
        if all_threads:
            _process_runs = before


def tag_logs_with_outermost_run() -> contextlib.AbstractContextManager[None]:
    """Tag the log records of a ``with`` block with the id of the outermost run only.

    Use this if an inner run, such as a rollout, notices something that concerns the whole training
    run.
    """
    return _set_context_variable(_runs, (_runs.get() or _process_runs)[:1])


def hold_warnings_for_next_run() -> None:
    """Collect warnings that are logged outside any run, so that the next run can record them.

    The next run that starts in this context receives them.
    """
    _collected.set([])


def take_held_warnings() -> list[str]:
    """Return the warnings that were collected for the next run, and clear the list."""
    collected = _collected.get() or []
    texts = collected.copy()
    collected.clear()
    return texts


def _tell_run(text: str) -> None:
    """Record a warning in the current run, or keep it for the next run if none is active."""
    if (listener := _on_warning.get()) is not None:
        listener(text)
    elif (collected := _collected.get()) is not None:
        collected.append(text)


# --- handlers


@contextlib.contextmanager
def attached_handler(handler: Handler) -> Iterator[None]:
    """Send all of Ramify's log records to an additional handler while a ``with`` block runs."""
    attach_handler(handler)
    try:
        yield
    finally:
        detach_handler(handler)


def attach_handler(handler: Handler) -> None:
    """Send all of Ramify's log records to a handler until ``detach_handler`` is called.

    The log levels that the application sets do not matter. A handler without a level gets records
    of INFO and above.
    """
    _set_handlers([*_outputs.handlers, handler])


def detach_handler(handler: Handler) -> None:
    """Stop sending log records to a handler.

    Does nothing if the handler is not attached.
    """
    _set_handlers([other for other in _outputs.handlers if other is not handler])


def _set_handlers(handlers: list[Handler]) -> None:
    _outputs.handlers = handlers  # replaced at once: another thread may be using the old list
    _outputs.setLevel(min(handler.level or INFO for handler in handlers))


def configure_console(show: Callable[[str], None], verbosity: int = 0) -> None:
    """Show log records on the console of this process, and replace any earlier setting.

    ``verbosity`` is the number of ``-v`` options: 1 means INFO and 2 means DEBUG. ``show`` prints
    one line, and also reports an invalid ``RAMIFY_LOG``.
    """
    levels, problems = parse_log_levels(os.environ.get(VARIABLE, ""))
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
        levels = component_levels(DEBUG if verbosity > 1 else INFO)
    if (console := current_console()) is not None:
        detach_handler(console)
    attach_handler(ConsoleLogHandler(show, levels))


def current_console() -> ConsoleLogHandler | None:
    """Return the console handler that ``configure_console`` attached, or None."""
    return next((each for each in _outputs.handlers if isinstance(each, ConsoleLogHandler)), None)


def _to_stderr(text: str) -> None:
    """Print ``text`` on stderr without control characters, unless stderr is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(strip_control_characters(text), file=sys.stderr, flush=True)


# --- the log of a run


@contextlib.contextmanager
def run_log(path: Path, id: str) -> Iterator[FileLogHandler]:
    """Log a run, including its threads and child processes, to a file during a ``with`` block.

    The file gets records of INFO and above, or more if ``RAMIFY_LOG`` asks for more. Writing starts
    when ``begin`` is called, so a run with an invalid configuration leaves no file.
    """
    file = FileLogHandler(path, waits=True)
    variables = {_FILE_VARIABLE: str(path.absolute()), _RUN_VARIABLE: id}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with run_log_context(id, all_threads=True), attached_handler(file):
            yield file
    finally:
        file.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def join_parent_run_log(process: str) -> None:
    """Add this child process's log records to the log of the run that started the process.

    The records are labeled ``process``. Does nothing if no run started this process, or if the
    run's folder is not on this machine.
    """
    global _process, _process_runs
    file = Path(os.environ.get(_FILE_VARIABLE, ""))
    if file.name:
        _process, _process_runs = process, (os.environ[_RUN_VARIABLE],)
        if file.parent.is_dir():
            attach_handler(FileLogHandler(file))


if os.environ.get(VARIABLE):
    configure_console(_to_stderr)
