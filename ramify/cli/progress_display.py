"""Show the progress of a command on stderr.

All commands share this display. Stdout is reserved for the command's answer.

    live     a view on the terminal, redrawn ten times a second:
             the command's own picture, and a bar for each task
    lines    lines for pipes and logs, without control characters; a log also gets one whenever
             a long command has been silent for a while
    json     one JSON object per line, for programs:
             {"event": "progress", "at_s": 1.2, "what": "reading", "done": 12000, …}
    none     nothing

This file decides when the screen is drawn and restores the terminal at the end. A separate thread
draws, so that the view stays alive while the main thread loads or computes. It starts only when
there is something to wait for, so that a quick command pays nothing. The pictures themselves are
made by ``live_run_view.py`` and ``train.py``.
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

from ramify.cli.parser import CliOptionSpec, ExitCode, UsageError
from ramify.cli.stop_signals import EventLoopSignalWatchdog
from ramify.cli.terminal_text import (
    StderrMessageWriter,
    format_count,
    format_size,
    json_line,
    rich_console,
    sanitized_renderable,
    shorten_to_line,
    write_stderr,
)
from ramify.errors import did_you_mean
from ramify.format_quantities import format_rounded_duration
from ramify.progress import ProgressState, subscribe

if TYPE_CHECKING:
    from rich.text import Text


FIRST_S = 3.0
"""Seconds without output before the first progress line."""
LINE_INTERVAL_S = 10.0
"""Seconds without output before each later progress line."""


class PeriodicProgressLine:
    """Prints a status line about the running tasks after a few seconds without output.

    starting: 3 s
    sft: 120 of 500 steps · 12 s left
    rl: 3 of 20 steps · rollouts: 12 of 64 attempts · 8 s
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[ProgressState, float]] = {}
        """Task id -> (its state, when it began)."""
        self._ended = threading.Event()
        self._said_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ramify progress")
        self._thread.start()

    def __call__(self, state: ProgressState) -> None:
        """Update the status line with a task's new progress.

        The package ``ramify.progress`` calls this for every change.
        """
        with self._lock:
            _, since = self._tasks.pop(state.id, (state, time.monotonic()))
            if not state.is_over:
                self._tasks[state.id] = state, since

    def print_message(self, text: str) -> None:
        """Print a line of text on stderr at once, without waiting for the next progress line.

        The next progress line then waits for a full interval again.
        """
        self._said_at = time.monotonic()
        write_stderr(text)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        silence_s = FIRST_S
        while not self._ended.wait(max(self._said_at + silence_s - time.monotonic(), 0.1)):
            if time.monotonic() - self._said_at >= silence_s and (line := self._line()):
                self.print_message(line)
                silence_s = LINE_INTERVAL_S

    def _line(self) -> str:
        with self._lock:
            now = time.monotonic()
            running = sorted(self._tasks.values(), key=lambda task: task[0].id)
            return " · ".join(describe_task(state, now - since) for state, since in running)


Form = Literal["live", "lines", "json", "none"]
FORMS: tuple[Form, ...] = ("live", "lines", "json", "none")
OPTION = CliOptionSpec(
    "progress",
    str,
    "progress display: live, lines, json or none (default: live on a terminal, else lines)",
    "FORM",
)
INTERVAL_S = 0.1
"""Seconds between two redraws, and between two JSON lines about the same task."""
PATIENCE_S = 0.3
"""Seconds before the display appears. A task that ends sooner is never shown."""
_BAR_CHARS = 24

Picture = Callable[[int, int], "Sequence[Text]"]
"""Function that takes the terminal's width and height and returns at most that many lines to
draw."""


def choose_display_form(given: str | None, notes: StderrMessageWriter) -> Form:
    """Return the form in which to show progress: ``live``, ``lines``, ``json`` or ``none``.

    It is taken from ``--progress``, or else depends on whether stderr is a terminal. With
    ``--quiet`` it is ``none``. Raises UsageError if the form is unknown.
    """
    if given is not None and given not in FORMS:
        raise UsageError(f"--progress {given}: {did_you_mean(given, FORMS)}")
    if notes.quiet:
        return "none"
    if given is not None:
        return given
    return "live" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


class ProgressDisplay:
    """A context manager that shows the progress of a command on stderr.

    It subscribes to ``ramify.progress`` and shows each task in the chosen form until the ``with``
    block or ``close`` ends it.
    """

    def __init__(self, notes: StderrMessageWriter, form: Form, *, has_lines: bool = False) -> None:
        """Create a progress display of the given form.

        If ``has_lines`` is True, the form ``lines`` also describes the running tasks whenever the
        command has been silent for some seconds.
        """
        self.notes = notes
        self.form = form
        self._has_lines = has_lines
        self.lock = threading.Lock()
        """Held while a picture is drawn; hold it to change the data behind a picture."""
        self.keeps = False
        """Whether the last picture stays on the terminal."""
        self._picture: Picture | None = None
        self._tasks: dict[int, ProgressState] = {}
        self._since: dict[int, float] = {}
        self._reported_at: dict[int, float] = {}
        """Task id -> time of its last JSON line."""
        self._began = time.monotonic()
        self._drawer: _Drawer | None = None
        self._stack = contextlib.ExitStack()

    # --- start and end

    def __enter__(self) -> ProgressDisplay:
        if self.form == "json":
            self._stack.enter_context(subscribe(self._report_as_json))
            self.notes.above = lambda text: self.write_json_event("note", text=text)
        elif self.form == "lines" and self._has_lines:
            lines = PeriodicProgressLine()
            self._stack.callback(lines.close)
            self._stack.enter_context(subscribe(lines))
            self.notes.above = lines.print_message
        elif self.form == "live":
            self._stack.enter_context(_clean_exit_on_sigterm())
            self._drawer = _Drawer(self)
            self._stack.callback(self._drawer.stop)
            self._stack.enter_context(subscribe(self._report_as_picture))
            self.notes.above = self._drawer.above
        self._stack.callback(setattr, self.notes, "above", None)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the display and restore the terminal.

        Calling this again has no effect.
        """
        self._stack.close()

    def close_live_view(self) -> None:
        """Close the live view, if one is shown, so that the answer can be printed.

        Displays in another form continue.
        """
        if self.form == "live":
            self.close()

    def draw(self, picture: Picture) -> None:
        """Set what the live view shows above its progress bars, and draw it at once."""
        self._picture = picture
        if self._drawer is not None:
            self._drawer.start(patience_s=0.0)

    def write_json_event(self, event: str, /, **fields: Any) -> None:
        """Write an event as one JSON line.

        Does nothing unless the display's form is ``json``.
        """
        if self.form == "json":
            line = {"event": event, "at_s": round(time.monotonic() - self._began, 3), **fields}
            # One write, because several threads write here.
            sys.stderr.write(f"{json_line(line)}\n")
            sys.stderr.flush()

    # --- tasks

    def _report_as_json(self, state: ProgressState) -> None:
        now = time.monotonic()
        with self.lock:
            reported_at = self._reported_at.get(state.id)
            if reported_at is not None and not state.is_over and now - reported_at < INTERVAL_S:
                return
            self._reported_at[state.id] = now
            if state.is_over:
                del self._reported_at[state.id]
            self.write_json_event(
                "progress",
                what=state.what,
                done=state.done,
                total=state.total,
                unit=state.unit,
                note=state.note,
                over=state.is_over,
            )

    def _report_as_picture(self, state: ProgressState) -> None:
        with self.lock:
            if state.is_over:
                self._tasks.pop(state.id, None)
                self._since.pop(state.id, None)
                return
            self._tasks[state.id] = state
            self._since.setdefault(state.id, time.monotonic())
        if self._drawer is not None:
            self._drawer.start(PATIENCE_S)

    def rows(self, width: int, height: int) -> list[Text]:
        """Return the lines of the live view: the command's own view, then a bar for each task."""
        from rich.text import Text

        with self.lock:
            now = time.monotonic()
            bars = [
                progress_bar_line(task, now - self._since[task.id], width)
                for task in self._tasks.values()
            ][: max(height // 3, 1)]
            own = (
                list(self._picture(width, height - len(bars))) if self._picture is not None else []
            )
        rows = [*own, *(Text(row, "dim" if own else "") for row in bars)]
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return rows


class _Drawer:
    """A thread that draws the live view.

    It imports the library rich only when there is something to draw.
    """

    def __init__(self, screen: ProgressDisplay) -> None:
        self._screen = screen
        self._stopped = threading.Event()
        self._draw_now = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._print: Callable[[str], None] | None = None
        """Function that prints a line above the live view; None while no view is drawn."""

    def start(self, patience_s: float) -> None:
        if self._thread is not None:  # the usual case, checked without the lock
            if not patience_s:
                self._draw_now.set()
            return
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(patience_s,), daemon=True, name="ramify view"
                )
                self._thread.start()

    def stop(self) -> None:
        """Stop drawing, and wait until the terminal is restored.

        Pressing Ctrl-C does not interrupt the wait.
        """
        with self._lock:
            self._stopped.set()
            self._draw_now.set()
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
            print_above = self._print
        (print_above or write_stderr)(text)

    def _run(self, patience_s: float) -> None:
        if patience_s:
            self._draw_now.wait(patience_s)
        # A quick command ends here, before rich is imported.
        if self._stopped.is_set() and not self._screen.keeps:
            return
        from rich.console import Group, RenderableType
        from rich.live import Live
        from rich.text import Text

        terminal, screen = rich_console(stderr=True), self._screen

        def drawn() -> RenderableType:
            return sanitized_renderable(
                Group(*screen.rows(terminal.width, max(terminal.height - 3, 4)))
            )

        view = Live(
            console=terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with view:
            # While the view is drawn, messages are printed above it.
            with self._lock:
                self._print = lambda text: terminal.print(
                    sanitized_renderable(Text(text)), soft_wrap=True
                )
            while not self._stopped.is_set():
                view.update(drawn(), refresh=True)
                self._stopped.wait(INTERVAL_S)
            with self._lock:
                self._print = None
            if screen.keeps:
                view.transient = False
                view.update(drawn(), refresh=True)


@contextlib.contextmanager
def _clean_exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the command with an exception, so that the cursor is restored.

    A SIGTERM handler that the command has already installed is kept.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    watch = EventLoopSignalWatchdog(signal.SIGTERM)

    def leave() -> None:
        watch.record_response()
        raise SystemExit(ExitCode.TERMINATED)

    def end(number: int, frame: FrameType | None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            leave()
        watch.handle_signal(number, frame)
        # Raised inside a task, the exception would also be reported as that task's error.
        loop.call_soon_threadsafe(leave)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def progress_bar_line(task: ProgressState, since_s: float, width: int) -> str:
    """Format a task's progress bar as one line.

    ``evaluating   ━━━━━━━━──────── 312 of 1,000 attempts · average 0.81 · 1 min 5 s left``
    """
    what = f"{shorten_to_line(task.what):<12} {_bar_chars(task, since_s)}"
    text = f"{what} {_details(task, since_s, width)}"
    return text[:width]


def describe_task(task: ProgressState, since_s: float) -> str:
    """Describe a running task in one line, such as ``sft: 120 of 500 steps · 12 s left``."""
    return f"{shorten_to_line(task.what)}: {_details(task, since_s, 120)}".removesuffix(": ")


def _details(task: ProgressState, since_s: float, width: int) -> str:
    note = shorten_to_line(task.note, max(width // 2, 20))
    return " · ".join(filter(None, (_amount(task), note, _time(task, since_s))))


def _bar_chars(task: ProgressState, since_s: float) -> str:
    if task.total:
        full = min(round(_BAR_CHARS * task.done / task.total), _BAR_CHARS)
        return "━" * full + "─" * (_BAR_CHARS - full)
    # The total is unknown: a short block moves back and forth.
    at = int(since_s / INTERVAL_S) % (2 * _BAR_CHARS - 6)
    at = min(at, 2 * _BAR_CHARS - 6 - at)
    return "─" * at + "━━━" + "─" * (_BAR_CHARS - 3 - at)


def _amount(task: ProgressState) -> str:
    if not task.unit:
        return ""
    shown = (lambda value: format_size(int(value))) if task.unit == "bytes" else format_count
    unit = "" if task.unit == "bytes" else f" {task.unit}"
    return f"{shown(task.done)}{f' of {shown(task.total)}' if task.total else ''}{unit}"


def _time(task: ProgressState, since_s: float) -> str:
    """Format the estimated time left for a task, or its elapsed time if no estimate is possible."""
    if task.total and task.first < task.done <= task.total and since_s > 1:
        left_s = since_s * (task.total - task.done) / (task.done - task.first)
        return f"{format_rounded_duration(left_s)} left" if left_s >= 1 else ""
    return format_rounded_duration(since_s) if since_s >= 1 else ""
