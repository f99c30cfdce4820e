"""State of the call tree in the live view: takes events, returns the rows to show.

Each call with a session is a node. Plain sub-calls are only counted on the node that made them, so
that five hundred of them cost one line:

    0 openai:gpt-5 · turn 3 · running code
        hits = [line for line in context.splitlines() if "ERROR" in line]
        llm_query × 500: 312 done, 3 failed
      0.7 openai:gpt-5-mini · turn 1 · asking

Not here: the text of the rows (see live.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.engine.action import read_action
from ramify.types.event import (
    AnyEvent,
    AttemptFailed,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunStarted,
)
from ramify.types.trajectory import Stop

State = Literal["starting", "asking", "running code", "last word", "done"]


class SubcallTally(msgspec.Struct):
    """Counts of one node's sub-calls of one kind."""

    started: int = 0
    done: int = 0
    failed: int = 0

    def text(self, name: str) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{name} × {self.started:,}: {self.done:,} done{failed}"


class TreeRow(msgspec.Struct):
    """Node of the tree: one call with a session, and its current state."""

    id: str
    model: str
    depth: int
    question: str
    started_s: float
    turn: int = 0
    """Current turn, from 1; 0 before the first request."""
    state: State = "starting"
    stop: Stop | None = None
    ended_s: float = 0.0
    code: str = ""
    """Latest code that the model wrote."""
    plain: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """``llm_query`` calls."""
    children: SubcallTally = msgspec.field(default_factory=SubcallTally)
    """``rlm_query`` calls; each also has its own node."""


class TerminalTree:
    """Call tree of a run, built from its events."""

    def __init__(self) -> None:
        self.nodes: dict[str, TreeRow] = {}
        """Call id -> node, in order of creation."""
        self.notice = ""
        """Latest note or error."""
        self.replies = 0
        self.is_over = False
        self._parents: dict[str, tuple[TreeRow, SubcallTally]] = {}
        self._replies_are_code = False

    def apply(self, event: AnyEvent) -> None:
        match event:
            case CallStarted():
                self._begin(event)
            case RequestStarted() if node := self.nodes.get(event.call):
                node.turn, node.state = event.turn + 1, "last word" if event.last_word else "asking"
            case ReplyReceived():
                self.replies += 1
                if node := self.nodes.get(event.call):
                    message = event.reply.message
                    codes = (
                        (message.content,) if self._replies_are_code else read_action(message).codes
                    )
                    node.code = codes[-1] if codes else node.code
                    node.state = "running code" if codes else "asking"
            case CellRan() if node := self.nodes.get(event.call):
                node.code = event.result.code
            case CallEnded():
                self._end(event)
            case NoteAdded():
                self.notice = event.text
            case AttemptFailed():
                self.notice = event.error
            case RunStarted():
                self._replies_are_code = bool(event.config.get("scaffold", {}).get("raw_code"))
            case RunEnded():
                self.is_over = True
            case _:
                pass

    def _begin(self, event: CallStarted) -> None:
        parent = self.nodes.get(event.parent.call) if event.parent else None
        if parent is not None:
            tally = parent.children if event.kind == "rlm" else parent.plain
            tally.started += 1
            self._parents[event.id] = (parent, tally)
        if event.kind == "rlm" or parent is None:
            self.nodes[event.id] = TreeRow(
                event.id, event.model, event.depth, event.question, event.at_s
            )

    def _end(self, event: CallEnded) -> None:
        if entry := self._parents.pop(event.id, None):
            tally = entry[1]
            tally.done += 1
            tally.failed += event.stop is Stop.ERROR
        if node := self.nodes.get(event.id):
            node.state = "done"
            node.stop = event.stop
            node.ended_s = event.at_s

    def shown(self, max_rows: int) -> tuple[list[TreeRow], int]:
        """Return at most ``max_rows`` nodes, and the number of nodes that are hidden.

        Running nodes are preferred to ended ones. The result is in order of creation.
        """
        nodes = list(self.nodes.values())
        if len(nodes) <= max_rows:
            return nodes, 0
        working = [node for node in nodes[1:] if node.state != "done"]
        ended = [node for node in nodes[1:] if node.state == "done"]
        visible = {node.id for node in [nodes[0], *working, *reversed(ended)][:max_rows]}
        return [node for node in nodes if node.id in visible], len(nodes) - len(visible)
