"""Presents a stored map as a table, for web pages and the command line.

A map asks one question about every row of a table. Each row that a direct call answered can also be
opened as a run.

    StoredTableMap(path).refresh()  reads what the journal has gained
    table.rows                      one for each question: text, answer, error, cost, run
    table.figures()                 what a list of maps shows of this one
    DirectRowAsRun(table, 5)        question 5 as the events of a run: RunStarted … RunEnded

The events of a row that a direct call answered are not stored; they are reconstructed from the
map's header and the journal lines of the row. A row that needed a session is an ordinary run. Maps
on a Ray cluster are read by ``stored_ray_map_table.py``, and pages are drawn by ``ramify/viewer``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine.observation_messages import plain_prompt
from ramify.errors import StoreError
from ramify.maps.map_journal import (
    MapJournalHeader,
    MapJournalLine,
    MapStartRecord,
    QuestionStartedLine,
    read_lines,
    read_map_line_at,
    usage_from_counts,
)
from ramify.maps.map_journal_state import recorded_reply
from ramify.store.journal import find_writer_process
from ramify.store.reviews import HumanRunReview
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunEnded,
    RunStarted,
)
from ramify.types.message import Message, Usage
from ramify.types.trajectory import Stop, answer_text, cut

_STATES = ("answered", "failed", "open")
MAX_CHARS = 120
"""Maximum number of characters of a text, an answer or an error in the table."""


class MapQuestionResult(msgspec.Struct, omit_defaults=True):
    """A table row for one question of a map.

    It contains the answer or error, the cost, and the number of rows that asked the question.
    """

    number: int
    row: int
    """Index of the first row that asks the question, from 0."""
    text: str = ""
    """Beginning of the question and of the text that the model reads."""
    answer: str | None = None
    """Beginning of the answer, or None if there is none yet."""
    error: str = ""
    cost: float | None = None
    """Cost in dollars, or None if the model has no price."""
    seconds: float = 0.0
    calls: int = 0
    """Number of requests that were, or may have been, billed."""
    equal: int = 0
    """Number of further rows that ask the same question."""
    run: str = ""
    """Id of the run that answered the question. Empty for a direct call."""

    @property
    def state(self) -> str:
        """Return whether the question is ``answered``, ``failed`` or ``open``.

        An open question is in progress or was interrupted.
        """
        if self.error:
            return "failed"
        return "open" if self.answer is None else "answered"


class TableMapSummary(msgspec.Struct, frozen=True):
    """The figures that a list of maps shows for one map, such as its progress and cost.

    They include the question and the model.
    """

    id: str
    question: str
    model: str
    started_at: float
    """Start time as a Unix timestamp."""
    out: str
    total: int | None
    """Number of rows in the table, or None if it is unknown."""
    rows: int
    """Number of rows with an answer or an error."""
    failed: int
    """Number of rows with an error."""
    questions: int
    calls: int
    cost: float | None
    """Cost in dollars, or None if the model has no price."""
    alive: bool
    """True if a process is running the map now."""


class StoredTableMap:
    """A stored map as a table with one row for each question.

    The table is read from the map's journal.
    """

    has_runs = True
    """True if each row can be opened as a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.stem
        self.header: MapJournalHeader | None = None
        self.last_start: MapStartRecord | None = None
        self.num_unaskable = 0
        """Number of rows about which no question could be asked. They have no entry in ``rows``."""
        self._rows: list[MapQuestionResult] = []
        self._offset = 0
        self._lines: list[array[int]] = []
        """Number of a question -> offsets of the lines of its last attempt."""

    @property
    def question_rows(self) -> list[MapQuestionResult]:
        """Return all questions of the map in the order in which they were first asked."""
        return self._rows

    @property
    def is_alive(self) -> bool:
        """Return True if a process is running the map now."""
        return find_writer_process(self.path) is not None

    def refresh(self) -> StoredTableMap:
        """Read the journal lines that were added since the last call.

        Raises StoreError if the file was replaced by another one.
        """
        if self.path.stat().st_size < self._offset:
            raise StoreError(f"{self.path} was replaced: open the map again")
        last = -1
        for offset, line in read_lines(self.path, self._offset):
            self._add(offset, line)
            last = offset
        if last >= 0:
            self._offset = _next_line_offset(self.path, last)
        return self

    def stored_files(self) -> list[Path]:
        """Return the files in the run store that belong to this map."""
        return [self.path]

    def summary(self) -> TableMapSummary:
        """Return this map's entry for a list of maps."""
        header, rows = self.header, self.question_rows
        costs = [row.cost for row in rows if row.cost is not None]
        num = {state: sum(1 + r.equal for r in rows if r.state == state) for state in _STATES}
        return TableMapSummary(
            self.id,
            header.question if header else "",
            header.model if header else "",
            header.started_at if header else 0.0,
            header.out if header else "",
            self.last_start.total if self.last_start else None,
            num["answered"] + num["failed"] + self.num_unaskable,
            num["failed"] + self.num_unaskable,
            len(rows),
            sum(row.calls for row in rows),
            math.fsum(costs) if costs else None,
            self.is_alive,
        )

    def row_at(self, number: int) -> MapQuestionResult:
        """Return the table row for the map question with this number.

        Raises StoreError if the map has no such question.
        """
        if not 0 <= number < len(self.question_rows):
            raise StoreError(f"map {self.id} has no question {number}")
        return self.question_rows[number]

    def last_attempt_lines(self, number: int) -> list[MapJournalLine]:
        """Return the journal lines of the last attempt at a question, in their original order."""
        self.row_at(number)
        return [read_map_line_at(self.path, offset) for offset in self._lines[number]]

    def _add(self, offset: int, line: MapJournalLine) -> None:
        if (first_request_line := line.first_request) is not None:
            row = self._begin(offset, first_request_line.number, first_request_line.row)
            parts = [
                first_request_line.question or "",
                context_as_line(first_request_line.context),
            ]
            row.text = cut(" ".join(" ".join(filter(None, parts)).split()), MAX_CHARS)
        elif line.s is not None:
            self._begin(offset, line.s.number, line.s.row).run = line.s.run
        elif line.r is not None:
            row = self._append_line_offset(offset, line.r.number)
            row.answer = cut(line.r.text, MAX_CHARS)
            row.seconds += line.r.seconds
            self._spend(row, 1, line.r.cost)
        elif line.t is not None:
            self._append_line_offset(offset, line.t.number).answer = None
        elif line.x is not None:
            row = self._append_line_offset(offset, line.x.number)
            self._spend(row, 1 if line.x.counts else 0, line.x.cost)
        elif line.e is not None:
            row, end = self._append_line_offset(offset, line.e.number), line.e
            row.answer = None if end.answer is None else cut(answer_text(end.answer), MAX_CHARS)
            row.error = cut(end.error or "", 2 * MAX_CHARS)
            if row.run:
                row.seconds = end.seconds
                self._spend(row, end.calls, end.cost)
        elif line.d is not None:
            # The whole map also records the row for which a sample asked the question.
            question = self._rows[line.d.number]
            question.equal += line.d.row != question.row
        elif line.n is not None:
            self.num_unaskable = line.n
        elif line.map is not None:
            self.header = line.map
        elif line.c is not None:
            self.last_start = line.c

    def _begin(self, offset: int, number: int, place: int) -> MapQuestionResult:
        if number == len(self._rows):
            self._rows.append(MapQuestionResult(number, place))
            self._lines.append(array("q"))
        row = self._rows[number]
        row.row, row.answer, row.error, row.run = place, None, "", ""
        self._lines[number] = array("q", [offset])
        return row

    def _append_line_offset(self, offset: int, number: int) -> MapQuestionResult:
        self._lines[number].append(offset)
        return self._rows[number]

    @staticmethod
    def _spend(row: MapQuestionResult, calls: int, cost: float | None) -> None:
        row.calls += calls
        if cost is not None:
            row.cost = (row.cost or 0.0) + cost


def context_as_line(context: str | Mapping[str, str] | None) -> str:
    """Return what a model reads of a row as one line, such as ``id: 7 · text: It burns.``"""
    if isinstance(context, Mapping):
        return " · ".join(f"{name}: {text}" for name, text in context.items())
    return context or ""


def _next_line_offset(path: Path, offset: int) -> int:
    with open(path, "rb") as file:
        file.seek(offset)
        return offset + len(file.readline())


class DirectRowAsRun:
    """A table row answered without a Python session, which the viewer shows like a stored run."""

    path = None

    def __init__(self, table: StoredTableMap, number: int) -> None:
        """Open the map question with this number as a run.

        Raises StoreError if the map has no such question.
        """
        table.refresh().row_at(number)
        self.id = f"{table.id}:{number}"
        self._table = table
        self._number = number
        self._read: tuple[int, list[bytes]] = (-1, [])
        """(size of the journal, lines) as of the last read."""

    def __str__(self) -> str:
        return f"row {self._table.question_rows[self._number].row} of map {self._table.id}"

    def journal_version(self) -> tuple[int, int]:
        return self._table.path.stat().st_ino, sum(len(line) + 1 for line in self._events())

    def has_active_writer(self) -> bool:
        is_open = self._table.question_rows[self._number].state == "open"
        return is_open and self._table.is_alive

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        at = 0
        for line in self._events():
            if at >= offset:
                yield line
            at += len(line) + 1

    def line_blocks(self, offset: int = 0) -> Iterator[bytes]:
        for line in self.lines(offset):
            yield line + b"\n"

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        for offset in offsets:
            yield next(self.lines(offset))

    def blob(self, digest: str) -> bytes:
        raise StoreError(f"{self} has no stored context: its whole input is in the prompt")

    def is_run_in_store(self, id: str) -> bool:
        return False

    def reviews_by_run(self) -> Mapping[str, HumanRunReview]:
        return {}

    def write_review(self, id: str, review: HumanRunReview) -> HumanRunReview:
        raise StoreError(
            "rows of a map cannot be reviewed: write your reviews into a column of its output"
        )

    def damaged_line_advice(self, number: int) -> str:
        return "the file of the map is damaged"

    def _events(self) -> list[bytes]:
        size = self._table.path.stat().st_size
        if size != self._read[0]:
            self._table.refresh()
            events = row_to_run_events(self._table, self._number)
            self._read = size, [msgspec.json.encode(event) for event in events]
        return self._read[1]


def row_to_run_events(table: StoredTableMap, number: int) -> list[AnyEvent]:
    """Return the events that a run would have recorded for a row answered by a direct call."""
    header, row = table.header, table.row_at(number)
    if header is None:
        raise StoreError(f"map {table.id} has no header")
    lines = table.last_attempt_lines(number)
    first_request_line = next(
        (line.first_request for line in lines if line.first_request is not None), None
    )
    question = (first_request_line.question if first_request_line else None) or header.question
    began = first_request_line.at_s if first_request_line else 0.0
    started_at = header.started_at + began
    config = {**header.config, "answer_schema": header.answer_schema, "map": header.id}
    id = f"{table.id}:{number}"
    events: list[AnyEvent] = [
        RunStarted(
            at_s=0.0, id=id, question=question, started_at=started_at, task="", context=None,
            config=config,
        ),
        CallStarted(
            at_s=0.0, id="0", kind="lm", model=header.model, depth=0, question=question,
            parent=None, fork=None, context=None,
        ),
    ]  # fmt: skip
    now, prompt, usage = 0.0, tuple[Message, ...](), Usage()
    has_kind = header.answer_schema is not None
    num_messages = 0
    for line in lines:
        if line.first_request is not None:
            prompt = _first_prompt(header, line.first_request, question)
            events.append(_request(now, 0, 0, prompt))
        elif line.t is not None:
            if line.t.text is not None and has_kind:
                prompt = (Message("user", line.t.text),)
            reused = num_messages if line.t.turn and has_kind else 0
            events.append(_request(now, line.t.turn, reused, prompt))
        elif line.r is not None:
            reply = recorded_reply(line)
            now, usage = round(now + reply.seconds, 6), usage + reply.usage
            events.append(ReplyReceived(at_s=now, call="0", turn=line.r.turn, reply=reply))
            num_messages = (num_messages if has_kind else 0) + len(prompt) + 1
        elif line.x is not None:
            spent = usage_from_counts(line.x.counts)
            usage += spent
            failed = RequestAttemptFailed(
                at_s=now, call="0", turn=line.x.turn, error=line.x.error, usage=spent,
                cost=line.x.cost,
            )  # fmt: skip
            events.append(failed)
    if row.state != "open":
        end = next((line.e for line in reversed(lines) if line.e is not None), None)
        reply_text = next((line.r.text for line in reversed(lines) if line.r is not None), "")
        answer: Any = reply_text if end is None else end.answer
        stop = Stop.FINAL if end is None else Stop(end.stop)
        error = None if end is None else end.error
        reason = "" if end is None else end.error or ""
        events.append(
            CallEnded(at_s=now, id="0", stop=stop, answer=answer, error=error, reason=reason)
        )
        events.append(
            RunEnded(
                at_s=now,
                stop=stop,
                answer=answer,
                error=error,
                usage=usage,
                cost=row.cost,
                reason=reason,
            )
        )
    return events


def _first_prompt(
    header: MapJournalHeader, first_request_line: QuestionStartedLine, question: str
) -> tuple[Message, ...]:
    before = tuple(Message("system", text) for text in header.before)
    text = plain_prompt(question, first_request_line.context) + header.asked
    return (*before, Message("user", text))


def _request(at_s: float, turn: int, reused: int, prompt: tuple[Message, ...]) -> RequestStarted:
    return RequestStarted(
        at_s=at_s, call="0", turn=turn, reused=reused, prompt=prompt, prompt_hash=""
    )
