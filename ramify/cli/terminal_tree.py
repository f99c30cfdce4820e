"""Rows of the live view: the sessions of a run's call tree.

Each call with a session is a row. Plain sub-calls are only counted on the row that made them, so
that five hundred of them cost one line:

    0 openai:gpt-5 · turn 3 · running code
        hits = [line for line in context.splitlines() if "ERROR" in line]
        llm_query × 500: 312 done, 3 failed
      0.7 openai:gpt-5-mini · turn 1 · asking

Not here: the state of the calls (see types/call_tree.py) and the text of the rows (see live.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.engine.action import read_action
from ramify.types.call_tree import CallNode, CallTree
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    RunStarted,
)
from ramify.types.trajectory import Stop

State = Literal["starting", "asking", "running code", "last word", "done"]


class SubcallTally(msgspec.Struct):
    """Counts of one row's sub-calls of one kind."""

    started: int = 0
    done: int = 0
    failed: int = 0

    def text(self, name: str) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{name} × {self.started:,}: {self.done:,} done{failed}"


class TreeRow(msgspec.Struct):
    """One call with a session."""

    call: CallNode
    turn: int = 0
    """Current turn, from 1; 0 before the first request."""
    code: str = ""
    """Latest code that the model wrote."""
    has_code: bool = False
    """Whether the last reply contains code."""
    is_last_word: bool = False
    """Whether the last request asks the model to answer with what it has."""
    plain: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """``llm_query`` calls."""
    children: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """``rlm_query`` calls; each also has its own row."""

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def state(self) -> State:
        if self.call.stop is not None:
            return "done"
        if not self.turn:
            return "starting"
        if self.call.asking >= 0:
            return "last word" if self.is_last_word else "asking"
        return "running code" if self.has_code else "asking"


class TerminalTree:
    """Rows of a run, from its events."""

    def __init__(self) -> None:
        self.nodes: dict[str, TreeRow] = {}
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
            case ReplyReceived() if row:
                message = event.reply.message
                raw = self._replies_are_code
                codes = (message.content,) if raw else read_action(message).codes
                row.code = codes[-1] if codes else row.code
                row.has_code = bool(codes)
            case CellRan() if row:
                row.code = event.result.code
            case CallEnded() if call is not None and (tally := self._tally(call)):
                tally.done += 1
                tally.failed += event.stop is Stop.ERROR
            case NoteAdded():
                self.notice = event.text
            case AttemptFailed():
                self.notice = event.error
            case RunStarted():
                self._replies_are_code = bool(event.config.get("scaffold", {}).get("raw_code"))
            case _:
                pass

    def _begin(self, call: CallNode) -> None:
        tally = self._tally(call)
        if tally is not None:
            tally.started += 1
        if call.kind == "rlm" or tally is None:
            self.nodes[call.id] = TreeRow(call)

    def _tally(self, call: CallNode) -> SubcallTally | None:
        """Return where the parent's row counts ``call``."""
        parent = self.nodes.get(call.parent.call) if call.parent else None
        if parent is None:
            return None
        return parent.children if call.kind == "rlm" else parent.plain

    def shown(self, max_rows: int) -> tuple[list[TreeRow], int]:
        """Return at most ``max_rows`` rows, and the number of rows that are hidden.

        Running calls are preferred to ended ones. The result is in order of creation.
        """
        rows = list(self.nodes.values())
        if len(rows) <= max_rows:
            return rows, 0
        working = [row for row in rows[1:] if row.call.stop is None]
        ended = [row for row in rows[1:] if row.call.stop is not None]
        visible = {row.call.id for row in [rows[0], *working, *reversed(ended)][:max_rows]}
        return [row for row in rows if row.call.id in visible], len(rows) - len(visible)
