"""The text of log records: one line for a file, a short one for a terminal, or a JSON object.

    2026-11-22T09:15:00.123Z WARNING train my-run restart: worker 2 is lost  worker=2
    09:15:00 warning train restart: worker 2 is lost  worker=2

Every function removes secrets and bounds the length. Not here: which records there are
(``logging.py``), and where they go (``log_outputs.py``).
"""

from __future__ import annotations

import os
import time
import traceback
from logging import LogRecord
from typing import Any

import msgspec

from ramify.secrets import SecretRedactor, without_secrets

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
    return msgspec.json.encode(row, enc_hook=str).decode()


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
