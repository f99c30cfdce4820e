"""Live view of a run: the tree of calls, the latest code, and the budget used so far.

Text from models and documents is stripped of escape sequences and put into ``Text`` objects, which
do not interpret markup: ``[bold]`` appears as written. Not here: drawing on the terminal (see
progress_screen.py) and the state of the tree (see terminal_tree.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.text import Text

from ramify.cli.event_watcher import StepLines
from ramify.cli.progress_screen import ProgressScreen
from ramify.cli.terminal_text import clean, count, dollars, one_line, seconds, ticking
from ramify.cli.terminal_tree import TerminalTree, TreeRow
from ramify.engine.run_handle import RunHandle
from ramify.types.event import AnyEvent

_CODE_LINES = 6
_MARKS = {"starting": "○", "asking": "◐", "running code": "▶", "last word": "◐", "done": "●"}


class LiveView:
    """Event watcher that draws one run as a live view."""

    def __init__(self, screen: ProgressScreen, lines: StepLines, max_seconds: float) -> None:
        self._screen = screen
        self._lines = lines
        self._max_seconds = max_seconds
        self._tree = TerminalTree()
        self._began = time.monotonic()
        self._running: RunHandle | None = None

    def apply(self, event: AnyEvent) -> None:
        self._lines.apply(event)
        with self._screen.lock:
            self._tree.apply(event)

    @contextlib.contextmanager
    def watching(self, running: RunHandle) -> Iterator[None]:
        self._running = running
        self._screen.draw(self.rows)
        yield

    def rows(self, width: int, height: int) -> list[Text]:
        """Rows for a terminal of ``width`` columns and ``height`` lines."""
        elapsed_s = time.monotonic() - self._began
        room = max(height - 1, 4)
        calls, hidden = self._tree.shown(max(room // 3, 1))
        rows = [
            row for call in calls for row in self._call_rows(call, elapsed_s, with_code=room >= 12)
        ]
        rows = (
            [*rows[: room - 1], Text(f"  … and {hidden:,} more sessions", "dim")]
            if hidden
            else rows[:room]
        )
        if self._tree.notice:
            rows.append(Text(f"  {one_line(self._tree.notice, width - 4)}", "yellow"))
        budgets = self._running.state() if self._running is not None else []
        rows.append(budget_row([*budgets, ("seconds", elapsed_s, self._max_seconds)]))
        return rows

    def _call_rows(self, row: TreeRow, elapsed_s: float, with_code: bool) -> list[Text]:
        call, state = row.call, row.state
        indent = "  " * call.depth
        is_done = state == "done"
        style = "dim" if is_done else "bold"
        since = (elapsed_s if call.ended_s is None else call.ended_s) - call.started_s
        name = f"{call.id} " if call.depth or ":" in call.id else ""
        turn = f" · turn {row.turn}" if row.turn else ""
        head = f"{indent}{_MARKS[state]} {name}{clean(call.model)}{turn}"
        shown = str(call.stop) if is_done else state
        rows = [Text(f"{head} · {shown} · {ticking(max(since, 0))}", style)]
        if call.depth and not is_done:
            rows.append(Text(f"{indent}  {one_line(call.question)}", "italic dim"))
        if with_code and row.code and not is_done:
            lines = clean(row.code).strip("\n").expandtabs(4).split("\n")
            lines = lines if len(lines) <= _CODE_LINES else [*lines[: _CODE_LINES - 1], "…"]
            rows += [Text(f"{indent}  │ {line}", "cyan") for line in lines]
        tallies = (("llm_query", row.plain), ("rlm_query", row.children))
        return rows + [
            Text(f"{indent}  {tally.text(name)}") for name, tally in tallies if tally.started
        ]


def budget_row(budgets: list[tuple[str, float, float]]) -> Text:
    """One row with each budget's use; yellow from 70 % and red from 90 % of its limit.

    ``calls 312/1,000 · tokens 45.2k/20M · $0.12/$5.00 · 12.0 s/30 min``
    """
    row = Text()
    for name, spent, limit in budgets:
        style = "red" if spent >= 0.9 * limit else "yellow" if spent >= 0.7 * limit else "dim"
        row.append(" · " if row.plain else "", "dim").append(_amount(name, spent, limit), style)
    return row


def _amount(name: str, spent: float, limit: float) -> str:
    if name == "dollars":
        return f"{dollars(spent)}/{dollars(limit)}"
    if name == "seconds":
        return f"{ticking(spent)}/{seconds(limit)}"
    return f"{name} {count(spent)}/{count(limit)}"
