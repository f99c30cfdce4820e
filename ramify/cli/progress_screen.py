"""What a command shows while it works: one place for every command, fed by ``ramify.progress`` and
by what it shows itself.

    live     a view on the terminal, ten times a second: the command's own picture, and a bar for each piece of work
    lines    what each command says in lines, for pipes and logs; no control character
    json     a JSON object a line, for programs: {"event": "progress", "at_s": 1.2, "what": "reading", "done": 12000, …}
    none     nothing

Decides when something is drawn and how the terminal is left: by a thread of its own, so that it
goes on while the main one loads or computes, and only once there is something to wait for, so that
what is over at once costs nothing. Leaves out the pictures (``terminal_tree.py``, ``live.py``,
``curves.py``). Everything goes to stderr; stdout is the command's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import OptionSpec, UsageError
from ramify.cli.stderr_notes import StderrNotes, write
from ramify.cli.stop_signals import SignalWatch
from ramify.cli.terminal_text import clean, count, one_line, seconds, size
from ramify.errors import nearest
from ramify.progress import ProgressState, subscribe
from ramify.types.message import encodable

if TYPE_CHECKING:
    from rich.text import Text

Form = Literal["live", "lines", "json", "none"]
FORMS: tuple[Form, ...] = ("live", "lines", "json", "none")
OPTION = OptionSpec(
    "progress",
    str,
    "how it is shown: live, lines, json or none (default: live on a terminal)",
    "FORM",
)
INTERVAL_S = 0.1
"""Between two pictures, and between two JSON lines on one piece of work."""
PATIENCE_S = 0.3
"""Before the first picture: what is over by then needs none."""
_BAR_CHARS = 24

Picture = Callable[[int, int], "Sequence[Text]"]
"""Columns and lines -> rows, at most that many."""


def form_of(given: str | None, notes: StderrNotes) -> Form:
    """``given``, or what suits stderr. Raises UsageError for a form that there is not."""
    if given is not None and given not in FORMS:
        raise UsageError(f"--progress {given}: {nearest(given, FORMS)}")
    if notes.quiet:
        return "none"
    if given is not None:
        return given
    return "live" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


class ProgressScreen:
    """What is shown on stderr as long as ``with`` lasts, or until ``close``."""

    def __init__(self, notes: StderrNotes, form: Form) -> None:
        self.notes, self.form = notes, form
        self.lock = threading.Lock()
        """Held while a picture is drawn: hold it to change what a picture is drawn from."""
        self.keeps = False
        """Whether the last picture stays on the terminal."""
        self._picture: Picture | None = None
        self._works: dict[int, ProgressState] = {}
        self._since: dict[int, float] = {}
        self._told: dict[int, float] = {}
        """Work -> when its last JSON line was written."""
        self._began = time.monotonic()
        self._drawer: _Drawer | None = None
        self._stack = contextlib.ExitStack()

    # --- beginning and end
    # -------------------------------------------------------------------------------------

    def __enter__(self) -> ProgressScreen:
        if self.form == "json":
            self._stack.enter_context(subscribe(self._told_as_json))
            self.notes.above = lambda text: self.event("note", text=text)
            self._stack.callback(setattr, self.notes, "above", None)
        elif self.form == "live":
            self._stack.enter_context(_ending_in_order())
            self._drawer = _Drawer(self)
            self._stack.callback(self._drawer.stop)
            self._stack.enter_context(subscribe(self._told_as_picture))
            self.notes.above = self._drawer.above
            self._stack.callback(setattr, self.notes, "above", None)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        self._stack.close()

    def clear(self) -> None:
        """Take a live view away, so that what is printed now stands alone; the other forms go
        on."""
        if self.form == "live":
            self.close()

    def draw(self, picture: Picture) -> None:
        """From now on ``picture`` stands above the bars; at once, where there is a live view."""
        self._picture = picture
        if self._drawer is not None:
            self._drawer.start(patience_s=0.0)

    def event(self, event: str, /, **fields: Any) -> None:
        """One JSON line, where that is the form."""
        if self.form == "json":
            line = {"event": event, "at_s": round(time.monotonic() - self._began, 3), **fields}
            try:
                data = msgspec.json.encode(line)
            except UnicodeEncodeError:  # halves of characters in what a model said
                data = msgspec.json.encode({key: _whole(value) for key, value in line.items()})
            sys.stderr.write(f"{data.decode()}\n")  # in one piece: several threads say things
            sys.stderr.flush()

    # --- work
    # --------------------------------------------------------------------------------------------------

    def _told_as_json(self, doing: ProgressState) -> None:
        now = time.monotonic()
        with self.lock:
            is_first = doing.id not in self._told
            if not is_first and not doing.is_over and now - self._told[doing.id] < INTERVAL_S:
                return
            self._told[doing.id] = now
            if doing.is_over:
                del self._told[doing.id]
            self.event(
                "progress",
                what=doing.what,
                done=doing.done,
                total=doing.total,
                unit=doing.unit,
                note=clean(doing.note),
                over=doing.is_over,
            )

    def _told_as_picture(self, doing: ProgressState) -> None:
        with self.lock:
            if doing.is_over:
                self._works.pop(doing.id, None)
                self._since.pop(doing.id, None)
                return
            self._works[doing.id] = doing
            self._since.setdefault(doing.id, time.monotonic())
        if self._drawer is not None:
            self._drawer.start(PATIENCE_S)

    def rows(self, width: int, height: int) -> list[Text]:
        """All that is to be seen now."""
        from rich.text import Text

        with self.lock:
            now = time.monotonic()
            bars = [bar(work, now - self._since[work.id], width) for work in self._works.values()][
                : max(height // 3, 1)
            ]
            own = (
                list(self._picture(width, height - len(bars))) if self._picture is not None else []
            )
        rows = [*own, *(Text(row, "dim" if own else "") for row in bars)]
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return rows


class _Drawer:
    """The thread that draws; rich is imported there, once there is something to draw."""

    def __init__(self, screen: ProgressScreen) -> None:
        self._screen = screen
        self._stopped, self._wanted = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._print: Callable[[str], None] | None = None
        """Prints a line above the view, while there is one."""

    def start(self, patience_s: float) -> None:
        if self._thread is not None:  # as nearly always
            if not patience_s:
                self._wanted.set()
            return
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(patience_s,), daemon=True, name="ramify view"
                )
                self._thread.start()

    def stop(self) -> None:
        """Draw no more, and wait until the terminal is as it was, whatever interrupts the wait."""
        with self._lock:
            self._stopped.set()
            self._wanted.set()
        interrupted: BaseException | None = None
        while self._thread is not None and self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def above(self, text: str) -> None:
        with self._lock:
            shown = self._print
        (shown or write)(text)

    def _run(self, patience_s: float) -> None:
        if patience_s:
            self._wanted.wait(patience_s)
        if self._stopped.is_set() and not self._screen.keeps:
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        console = Console(stderr=True, highlight=False)
        screen = self._screen

        def drawn() -> Group:
            return Group(*screen.rows(console.width, max(console.height - 3, 4)))

        view = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with view:
            with self._lock:
                self._print = lambda text: console.print(Text(clean(text)))
            while not self._stopped.is_set():
                view.update(drawn(), refresh=True)
                self._stopped.wait(INTERVAL_S)
            with self._lock:
                self._print = None
            if screen.keeps:
                view.transient = False
                view.update(drawn(), refresh=True)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM ends the command by an exception, so that the cursor comes back. A command with a
    handler of its own has it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    watch = SignalWatch(signal.SIGTERM)

    def leave() -> None:
        watch.acted()
        raise SystemExit(ExitCode.TERMINATED)

    def end(number: int, frame: FrameType | None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            leave()
        watch.arrived(number, frame)
        loop.call_soon_threadsafe(
            leave
        )  # raised in the middle of a task, it would be told as that task's error as well

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def bar(work: ProgressState, since_s: float, width: int) -> str:
    """``evaluating   ━━━━━━━━──────── 312 of 1,000 attempts · average 0.81 · 1 min 5 s left``"""
    amount = _amount(work)
    parts = [
        part
        for part in (amount, one_line(work.note, max(width // 2, 20)), _time(work, since_s))
        if part
    ]
    text = f"{clean(work.what):<12} {_drawn(work, since_s)} {' · '.join(parts)}"
    return text[:width]


def _drawn(work: ProgressState, since_s: float) -> str:
    if work.total:
        full = min(round(_BAR_CHARS * work.done / work.total), _BAR_CHARS)
        return "━" * full + "─" * (_BAR_CHARS - full)
    at = int(since_s / INTERVAL_S) % (
        2 * _BAR_CHARS - 6
    )  # no end is known: a piece that goes to and fro
    at = min(at, 2 * _BAR_CHARS - 6 - at)
    return "─" * at + "━━━" + "─" * (_BAR_CHARS - 3 - at)


def _amount(work: ProgressState) -> str:
    if not work.unit:
        return ""
    shown = (lambda value: size(int(value))) if work.unit == "bytes" else count
    unit = "" if work.unit == "bytes" else f" {work.unit}"
    return f"{shown(work.done)}{f' of {shown(work.total)}' if work.total else ''}{unit}"


def _time(work: ProgressState, since_s: float) -> str:
    """What is left where that can be told, else what went by."""
    if work.total and work.first < work.done <= work.total and since_s > 1:
        left_s = since_s * (work.total - work.done) / (work.done - work.first)
        return f"{seconds(round(left_s))} left" if left_s >= 1 else ""
    return seconds(round(since_s)) if since_s >= 1 else ""


def _whole(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value
