"""Show a run on the terminal while it is in progress.

The view has the tree of calls, the latest code, and the budget used so far. Text from models and
documents is put into ``Text`` objects, which do not interpret markup: ``[bold]`` appears as
written. Escape sequences in it are never drawn (see terminal_text.py). Each call with a session is
a row. Plain sub-calls are only counted on the row that made them, so that five hundred of them cost
one line:

    0 openai:gpt-5 · turn 3 · running code
        hits = [line for line in context.splitlines() if "ERROR" in line]
        llm_query × 500: 309 done, 3 failed
      0.7 openai:gpt-5-mini · turn 1 · asking

``progress_display.py`` draws the rows on the terminal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import msgspec
from rich.text import Text

from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.run_event_printer import RunEventPrinter
from ramify.cli.terminal_text import (
    format_count,
    format_dollars,
    format_duration,
    format_growing_duration,
    shorten_to_line,
)
from ramify.clients.rate_limited_requests import RETRYING
from ramify.engine.reply_action_parsing import parse_action
from ramify.engine.run_handle import RunHandle
from ramify.progress import ReplyTextDelta, watch_reply_text
from ramify.terminal_sanitizer import strip_control_characters
from ramify.types.call_tree import CallTree
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunStarted,
)
from ramify.types.run_call_node import RunCallNode

State = Literal["starting", "asking", "running code", "last word", "done"]


class SubcallTally(msgspec.Struct):
    """Counts of a call's started, answered and failed sub-calls of one kind.

    A row of the live view shows them.
    """

    started: int = 0
    done: int = 0
    """Number of calls that ended with an answer."""
    failed: int = 0

    def text(self, name: str) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{name} × {self.started:,}: {self.done:,} done{failed}"


class CallTreeRow(msgspec.Struct):
    """A row of the live view: one call with a Python session, and counts of its sub-calls."""

    call: RunCallNode
    turn: int = 0
    """Current turn, counted from 1; 0 before the first request."""
    code: str = ""
    """Latest code that the model wrote."""
    arriving: str = ""
    """The end of the reply that is being streamed; empty once the reply is complete."""
    has_code: bool = False
    """Whether the last reply contains code."""
    is_last_word: bool = False
    """Whether the last request asks the model for a final answer from what it already knows."""
    plain: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """Counts of plain model calls, made with ``llm_query``."""
    children: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """Counts of child calls made with ``rlm_query``. Each of them also has its own row."""
    leaves: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """Counts of the model calls that a plan makes to read the parts of a text."""

    @property
    def state(self) -> State:
        if self.call.stop is not None:
            return "done"
        if not self.turn:
            return "asking" if self.leaves.started else "starting"
        if self.call.asking >= 0:
            return "last word" if self.is_last_word else "asking"
        return "running code" if self.has_code else "asking"


class CallTreeRowBuilder:
    """Builds the rows of the live view from the events of a run.

    The rows form the tree of calls.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, CallTreeRow] = {}
        """Call id -> row, in order of creation."""
        self.notice = ""
        """Latest note or error."""
        self._tree = CallTree()
        self._replies_are_code = False

    def apply(self, event: AnyEvent) -> None:
        call = self._tree.apply(event)
        row = self.nodes.get(call.id) if call is not None else None
        match event:
            case CallStarted() if call is not None:
                self._begin(call)
            case RequestStarted() if row:
                row.turn, row.is_last_word = event.turn + 1, event.last_word is not None
                row.arriving = ""
            case ReplyReceived() if row:
                message = event.reply.message
                raw = self._replies_are_code
                codes = (message.content,) if raw else parse_action(message).codes
                row.code = codes[-1] if codes else row.code
                row.has_code = bool(codes)
                row.arriving = ""
                self.notice = "" if RETRYING in self.notice else self.notice
            case CellRan() if row:
                row.code = event.result.code
            case CallEnded() if call is not None and (tally := self._tally(call)):
                tally.failed += call.has_failed
                tally.done += not call.has_failed
            case NoteAdded():
                self.notice = event.text
            case RequestAttemptFailed():
                self.notice = event.error
            case RunStarted():
                self._replies_are_code = bool(event.config.get("scaffold", {}).get("raw_code"))
            case _:
                pass

    def append_streamed_text(self, text: ReplyTextDelta) -> None:
        """Append newly streamed reply text to the row of its call in the live view.

        Plain sub-calls have no row, so their text is not shown.
        """
        row = self.nodes.get(text.call)
        if row is not None and row.call.asking == text.turn:
            before = "" if text.is_first else row.arriving
            row.arriving = f"{before}{text.reasoning}{text.text}"[-_ARRIVING_CHARS:]

    def _begin(self, call: RunCallNode) -> None:
        tally = self._tally(call)
        if tally is not None:
            tally.started += 1
        if call.kind in ("rlm", "strategy") or tally is None:
            self.nodes[call.id] = CallTreeRow(call)

    def _tally(self, call: RunCallNode) -> SubcallTally | None:
        """Return the tally that counts a call on the row of its parent call.

        Returns None if no row counts the call.
        """
        parent = self.nodes.get(call.parent.call) if call.parent else None
        if parent is None or call.kind == "strategy":
            return None
        if call.kind == "leaf":
            return parent.leaves
        return parent.children if call.kind == "rlm" else parent.plain

    def visible_rows(self, max_rows: int) -> tuple[list[CallTreeRow], int]:
        """Return the rows to show, at most ``max_rows`` of them, and the number of hidden rows.

        Running calls take precedence over ended ones. The rows are in the order in which their
        calls began.
        """
        rows = list(self.nodes.values())
        if len(rows) <= max_rows:
            return rows, 0
        working = [row for row in rows[1:] if row.call.stop is None]
        ended = [row for row in rows[1:] if row.call.stop is not None]
        visible = {row.call.id for row in [rows[0], *working, *reversed(ended)][:max_rows]}
        return [row for row in rows if row.call.id in visible], len(rows) - len(visible)


_CODE_LINES = 6
_ARRIVING_CHARS = 2000
_ARRIVING_LINES = 4
_MARKS = {"starting": "○", "asking": "◐", "running code": "▶", "last word": "◐", "done": "●"}


class LiveRunView:
    """Draws the live view of a run on the terminal from the run's events."""

    def __init__(self, screen: ProgressDisplay, lines: RunEventPrinter, max_seconds: float) -> None:
        self._screen = screen
        self._lines = lines
        self._max_seconds = max_seconds
        self._tree = CallTreeRowBuilder()
        self._began = time.monotonic()
        self._running: RunHandle | None = None

    def apply(self, event: AnyEvent) -> None:
        self._lines.apply(event)
        with self._screen.lock:
            self._tree.apply(event)

    @contextlib.contextmanager
    def watch_run(self, running: RunHandle) -> Iterator[None]:
        self._running = running
        self._screen.draw(self.rows)
        with watch_reply_text(running.id, self._arrive):
            yield

    def _arrive(self, text: ReplyTextDelta) -> None:
        with self._screen.lock:
            self._tree.append_streamed_text(text)

    def rows(self, width: int, height: int) -> list[Text]:
        """Return the lines to draw on a terminal of ``width`` columns and ``height`` lines."""
        elapsed_s = time.monotonic() - self._began
        room = max(height - 1, 4)
        calls, hidden = self._tree.visible_rows(max(room // 3, 1))
        rows = [
            row for call in calls for row in self._call_rows(call, elapsed_s, with_code=room >= 12)
        ]
        rows = (
            [*rows[: room - 1], Text(f"  … and {hidden:,} more sessions", "dim")]
            if hidden
            else rows[:room]
        )
        if self._tree.notice:
            rows.append(Text(f"  {shorten_to_line(self._tree.notice, width - 4)}", "yellow"))
        budgets = self._running.usage_by_limit() if self._running is not None else []
        rows.append(budget_row([*budgets, ("seconds", elapsed_s, self._max_seconds)]))
        return rows

    def _call_rows(self, row: CallTreeRow, elapsed_s: float, with_code: bool) -> list[Text]:
        call, state = row.call, row.state
        indent = "  " * call.depth
        is_done = state == "done"
        style = "dim" if is_done else "bold"
        since = (elapsed_s if call.ended_s is None else call.ended_s) - call.started_s
        name = f"{call.id} " if call.depth or ":" in call.id else ""
        turn = f" · turn {row.turn}" if row.turn else ""
        head = f"{indent}{_MARKS[state]} {name}{shorten_to_line(call.model)}{turn}"
        shown = str(call.stop) if is_done else state
        rows = [Text(f"{head} · {shown} · {format_growing_duration(max(since, 0))}", style)]
        if call.depth and not is_done:
            rows.append(Text(f"{indent}  {shorten_to_line(call.question)}", "italic dim"))
        if with_code and row.arriving and not is_done:
            lines = strip_control_characters(row.arriving).strip("\n").expandtabs(4).split("\n")
            rows += [Text(f"{indent}  ┊ {line}", "dim") for line in lines[-_ARRIVING_LINES:]]
        elif with_code and row.code and not is_done:
            lines = strip_control_characters(row.code).strip("\n").expandtabs(4).split("\n")
            lines = lines if len(lines) <= _CODE_LINES else [*lines[: _CODE_LINES - 1], "…"]
            rows += [Text(f"{indent}  │ {line}", "cyan") for line in lines]
        tallies = (
            ("llm_query", row.plain),
            ("rlm_query", row.children),
            ("leaf", row.leaves),
        )
        return rows + [
            Text(f"{indent}  {tally.text(name)}") for name, tally in tallies if tally.started
        ]


_NAMES = {"calls": "requests"}
"""Name of a budget -> the word for the things it counts, if the two differ."""


def budget_row(budgets: list[tuple[str, float, float]]) -> Text:
    """Format in one line how much of each budget is used.

    A budget is yellow from 70 % of its limit, and red from 90 %.

    ``requests 312/1,000 · tokens 45.2k/20M · $0.12/$5.00 · 12.0 s/30 min``
    """
    row = Text()
    for name, spent, limit in budgets:
        style = "red" if spent >= 0.9 * limit else "yellow" if spent >= 0.7 * limit else "dim"
        row.append(" · " if row.plain else "", "dim").append(_amount(name, spent, limit), style)
    return row


def _amount(name: str, spent: float, limit: float) -> str:
    if name == "dollars":
        return f"{format_dollars(spent)}/{format_dollars(limit)}"
    if name == "seconds":
        return f"{format_growing_duration(spent)}/{format_duration(limit)}"
    return f"{_NAMES.get(name, name)} {format_count(spent)}/{format_count(limit)}"
