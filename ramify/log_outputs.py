"""Where log records go, apart from Python's ``logging``: a terminal, a file, another process.

    ``-v``, RAMIFY_LOG=engine=debug,info ── levels_of ──▶ Console (stderr)
    OUT/run.log ◀── LogFile ◀── run_log (this process)  join_run (its child processes)
    trainer ◀── Sender ◀── rollout worker

Decides levels per room, and that a full disk or a closed terminal never ends a run. Not here: the
records (``logging.py``) and their text (``logging.py``).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from logging import DEBUG, ERROR, INFO, WARNING, LogRecord
from pathlib import Path

from ramify.logging import (
    FORMAT_VARIABLE,
    OFF,
    VARIABLE,
    SentRecord,
    attach,
    attached,
    detach,
    event_of,
    in_run,
    json_line,
    name_process,
    outputs,
    room_of,
    short_line,
    text_line,
    text_of,
    wants_json,
)
from ramify.printable import clean
from ramify.secrets import without_secrets

_FILE_VARIABLE = "RAMIFY_RUN_LOG"
"""Set for child processes: their records go to this file too, if they find its folder."""
_RUN_VARIABLE = "RAMIFY_RUN_ID"
RUN_LOG = "run.log"
"""Name of a training run's log in its folder."""
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}


class _FromInfo:
    """Takes records from INFO, and lower ones where ``RAMIFY_LOG`` asks for them."""

    def __init__(self) -> None:
        self._levels = _with_floor(INFO)

    @property
    def lowest(self) -> int:
        return min(self._levels.values())

    def takes(self, record: LogRecord) -> bool:
        return record.levelno >= _level_in(self._levels, room_of(record))


class LogFile(_FromInfo):
    """A log file: one line of bounded length per record, appended by any number of processes."""

    def __init__(self, path: Path, *, waits: bool = False) -> None:
        """The file is created at the first record, readable by its owner only. With ``waits``,
        records are held back until ``begin``."""
        super().__init__()
        self.path = path
        self._fd: int | None = None
        self._held: list[LogRecord] | None = [] if waits else None

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
        if event_of(record) in self.hidden and not wants_json():
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


class Sender(_FromInfo):
    """Passes records to another process."""

    def __init__(self, send: Callable[[SentRecord], None]) -> None:
        super().__init__()
        self._send = send

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
    return next((output for output in outputs() if isinstance(output, Console)), None)


def to_stderr(text: str) -> None:
    """Print ``text`` on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(clean(text), file=sys.stderr, flush=True)


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
    file = Path(os.environ.get(_FILE_VARIABLE, ""))
    if not file.name:
        return
    name_process(process, os.environ[_RUN_VARIABLE])
    if file.parent.is_dir():
        attach(LogFile(file))


if os.environ.get(VARIABLE):
    configure(to_stderr)
