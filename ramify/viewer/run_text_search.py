"""Search the questions, replies, code and other text of one run for a query.

A journal is read line by line, and only lines that contain the bytes of the query are decoded. This
way, a run of many megabytes is searched without holding it in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ramify.errors import StoreError
from ramify.store.journal import decode_line
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    ScoreAdded,
    ToolAnswered,
)
from ramify.types.message import Message
from ramify.types.trajectory import Cell, Trajectory, answer_text
from ramify.viewer.watched_run import WatchedRun

MAX_HITS = 200
_MARGIN = 60
"""Characters of context on each side of a match."""
TextPlace = tuple[str, int, str, str]
"""A text with its place: (call, turn, part, text). The turn is -1 for the call itself."""


def search(run: WatchedRun, query: str) -> dict[str, Any]:
    """Return the matches for ``query`` in the text of a run, ignoring case.

    Returns at most ``MAX_HITS`` matches, in the order of the calls. The field ``more`` is true if
    there are others.
    """
    hits: list[dict[str, Any]] = []
    needle = query.lower()
    more = False
    for call, turn, where, text in _searchable_texts(run, needle) if needle else ():
        at = text.lower().find(needle)
        if at < 0 or call not in run.tree.nodes:
            continue
        if more := len(hits) == MAX_HITS:
            break
        start = max(0, at - _MARGIN)
        snippet = text[start : at + len(query) + _MARGIN]
        hits.append({"call": call, "turn": turn, "where": where, "text": snippet, "at": at - start})
    hits.sort(key=lambda hit: run.tree.nodes[hit["call"]].index)
    return {"found": hits, "more": more}


def _searchable_texts(run: WatchedRun, needle: str) -> Iterator[TextPlace]:
    if run.line is not None:
        yield from _of_trajectory(run.tree.run_data)
        return
    # JSON may escape other queries, so they cannot be searched for in the raw line.
    raw = (
        needle.encode()
        if needle.isascii() and needle.isprintable() and not set(needle) & set('"\\')
        else b""
    )
    read = 0
    try:
        for number, line in enumerate(run.source.lines(), start=1):
            read += len(line) + 1
            if read > run.offset:
                return
            if not raw or raw in line.lower():
                with suppress(StoreError):  # damaged: the page already shows it
                    yield from _of_event(decode_line(line, run.source, number))
    except StoreError:
        return  # unreadable: the page already shows it


def _of_event(event: AnyEvent) -> Iterator[TextPlace]:
    match event:
        case CallStarted():
            yield event.id, -1, "question", event.question
        case RequestStarted():
            for message in event.prompt:
                yield event.call, event.turn, message.role, message.content
        case ReplyReceived():
            yield from _of_reply(event.call, event.turn, event.reply.message)
        case CellRan():
            yield from _of_cell(event.call, event.turn, event.result)
        case ToolAnswered():
            yield (
                event.call,
                event.turn,
                f"tool {event.name}",
                event.error or answer_text(event.result),
            )
        case RequestAttemptFailed():
            yield event.call, event.turn, "attempt", event.error
        case NoteAdded():
            yield event.call, -1, "note", event.text
        case ScoreAdded():
            yield event.call, event.turn, f"score by {event.by}", event.text
        case CallEnded():
            yield event.id, -1, "answer", answer_text(event.answer)
            yield event.id, -1, "error", event.error or ""
        case _:
            pass


def _of_trajectory(trajectory: Trajectory) -> Iterator[TextPlace]:
    for call in trajectory.calls:
        yield call.id, -1, "question", call.question
        for index, turn in enumerate(call.turns):
            for message in turn.prompt:
                yield call.id, index, message.role, message.content
            yield from _of_reply(call.id, index, turn.reply.message)
            for cell in turn.cells:
                yield from _of_cell(call.id, index, cell)
        yield call.id, -1, "answer", answer_text(call.answer)
        yield call.id, -1, "error", call.error or ""
    for mark in trajectory.marks:
        yield mark.call, mark.turn, f"score by {mark.by}", mark.text


def _of_reply(call: str, turn: int, message: Message) -> Iterable[TextPlace]:
    yield call, turn, "reply", message.content
    yield call, turn, "reasoning", message.reasoning or ""
    for tool in message.tool_calls:
        yield call, turn, "tool call", tool.arguments


def _of_cell(call: str, turn: int, cell: Cell) -> Iterable[TextPlace]:
    for where, text in (("output", cell.stdout), ("value", cell.value), ("error", cell.error)):
        yield call, turn, where, text or ""
