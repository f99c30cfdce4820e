"""The live view on a terminal: the tree, the last code, what is spent of the budget. Drawn ten times a second on stderr.

Everything that a model or a document said is cleaned of escape sequences and put into ``Text`` objects, which know no
markup: ``[bold]`` is shown as it was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ramify.cli.notes import Notes
from ramify.cli.text import clean, count, dollars, one_line, seconds, ticking
from ramify.cli.tree import Node, Tree
from ramify.cli.watch import Lines
from ramify.engine.running import Running
from ramify.types.event import AnyEvent

_INTERVAL_S = 0.1
_CODE_LINES = 6
_MARKS = {"starting": "○", "asking": "◐", "running code": "▶", "last word": "◐", "done": "●"}


class LiveView:
    """Watches one run."""

    def __init__(self, notes: Notes, lines: Lines, max_seconds: float) -> None:
        self._notes, self._lines, self._max_seconds = notes, lines, max_seconds
        self._tree = Tree()
        self._console = Console(stderr=True, highlight=False)
        self._began = time.monotonic()

    def apply(self, event: AnyEvent) -> None:
        self._lines.apply(event)
        self._tree.apply(event)

    @contextlib.asynccontextmanager
    async def watching(self, running: Running) -> AsyncIterator[None]:
        live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        with live:
            self._notes.above = lambda line: self._console.print(Text(clean(line)))
            redraw = asyncio.create_task(self._redraw(live, running))
            try:
                yield
            finally:
                self._notes.above = None
                redraw.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await redraw

    async def _redraw(self, live: Live, running: Running) -> None:
        while True:
            live.update(self.drawn(running.standing()), refresh=True)
            await asyncio.sleep(_INTERVAL_S)

    def drawn(self, standing: list[tuple[str, float, float]]) -> Group:
        """All rows, within the terminal's height."""
        elapsed_s = time.monotonic() - self._began
        room = max(self._console.height - 4, 4)
        nodes, hidden = self._tree.shown(max(room // 3, 1))
        rows = [row for node in nodes for row in self._node_rows(node, elapsed_s, with_code=room >= 12)]
        rows = [*rows[: room - 1], Text(f"  … and {hidden:,} more sessions", "dim")] if hidden else rows[:room]
        if self._tree.notice:
            rows.append(Text(f"  {one_line(self._tree.notice, self._console.width - 4)}", "yellow"))
        rows.append(budget_row([*standing, ("seconds", elapsed_s, self._max_seconds)]))
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return Group(*rows)

    def _node_rows(self, node: Node, elapsed_s: float, with_code: bool) -> list[Text]:
        indent = "  " * node.depth
        is_done = node.state == "done"
        style = "dim" if is_done else "bold"
        since = (node.ended_s if is_done else elapsed_s) - node.started_s
        state = str(node.stop) if is_done else node.state
        name = f"{node.id} " if node.depth or ":" in node.id else ""
        turn = f" · turn {node.turn}" if node.turn else ""
        head = f"{indent}{_MARKS[node.state]} {name}{clean(node.model)}{turn} · {state} · {ticking(max(since, 0))}"
        rows = [Text(head, style)]
        if node.depth and not is_done:
            rows.append(Text(f"{indent}  {one_line(node.question)}", "italic dim"))
        if with_code and node.code and not is_done:
            lines = clean(node.code).strip("\n").expandtabs(4).split("\n")
            shown = lines if len(lines) <= _CODE_LINES else [*lines[: _CODE_LINES - 1], "…"]
            rows += [Text(f"{indent}  │ {line}", "cyan") for line in shown]
        tallies = (("llm_query", node.plain), ("rlm_query", node.children))
        return rows + [Text(f"{indent}  {tally.text(name)}") for name, tally in tallies if tally.started]


def budget_row(standing: list[tuple[str, float, float]]) -> Text:
    """``calls 312/1,000 · tokens 45.2k/20M · $0.12/$5.00 · 12.0 s/30 min``; red from nine tenths on."""
    row = Text()
    for name, spent, limit in standing:
        style = "red" if spent >= 0.9 * limit else "yellow" if spent >= 0.7 * limit else "dim"
        row.append(" · " if row.plain else "", "dim").append(_amount(name, spent, limit), style)
    return row


def _amount(name: str, spent: float, limit: float) -> str:
    if name == "dollars":
        return f"{dollars(spent)}/{dollars(limit)}"
    if name == "seconds":
        return f"{ticking(spent)}/{seconds(limit)}"
    return f"{name} {count(spent)}/{count(limit)}"
