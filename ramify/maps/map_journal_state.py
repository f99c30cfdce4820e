"""Reconstructs the state of a map from its journal: which questions are answered, where the answers
are stored, and what has been spent.

    MapJournalState(path)   answered: digest ──> offset of the reply      a million rows: 200 MB
                            open:     questions with a request or run that has no end
                            usage, cost: with the upper bound of each request that was in flight

The journal is written by ``map_journal.py``, and ``map_run.py`` continues a map from its state.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.engine.limits import BudgetAmount
from ramify.maps.map_journal import (
    BatchUploadIntentLine,
    MapJournalHeader,
    MapJournalLine,
    MapStartRecord,
    QuestionStartedLine,
    RetryRequestRecord,
    digest_to_int,
    read_lines,
    usage_from_counts,
)
from ramify.types.message import Message, Reply, Usage


class UnfinishedQuestion(msgspec.Struct):
    """A question of a map that was asked but whose outcome is not recorded yet."""

    number: int
    replies: list[int] = []
    """Byte offsets of the replies so far."""
    run: str = ""
    """Id of the run that answers the question; empty for a direct call."""


class UnfinishedBatch(msgspec.Struct):
    """A batch that may have been uploaded and whose results are still incomplete."""

    sent: BatchUploadIntentLine
    waiting: dict[int, tuple[int, BudgetAmount]]
    """Number of a question without a result -> (offset of its request, upper bound on its
    usage)."""
    id: str = ""
    """Id of the batch at the provider. Empty if the journal does not say that the upload
    succeeded."""


def budget_to_reserve(first: QuestionStartedLine) -> BudgetAmount:
    """Return the budget to reserve for one request: a single call, its maximum tokens and its
    cost."""
    tokens = first.max_input_tokens + first.max_output_tokens
    return BudgetAmount(1, tokens, first.cost or 0.0)


class MapJournalState:
    """The state of a map, such as its answers, open questions and costs.

    Its batches are included. It is built by reading the journal's lines in order.
    """

    def __init__(self) -> None:
        self.header: MapJournalHeader | None = None
        self.last_start: MapStartRecord | None = None
        self.answered: dict[int, int] = {}
        """Question digest -> journal offset of the line with its answer, which is a reply or the
        end of a run. A last reply that is damaged or does not fit the answer type is detected only
        when it is read."""
        self.failed: dict[int, int] = {}
        """Question digest -> journal offset of the line with the error."""
        self.open: dict[int, UnfinishedQuestion] = {}
        """Question digest -> state of a question that has not ended."""
        self.digests: list[int] = []
        """Digests of the questions, indexed by question number."""
        self.last_row = -1
        """Index of the last row with a journal line. Rows of samples do not count."""
        self.num_unaskable = 0
        """Number of rows about which no question can be asked."""
        self.usage = Usage()
        self.cost = 0.0
        """Total cost in dollars."""
        self.is_priced = False
        self.batches: dict[int, UnfinishedBatch] = {}
        """Number of a batch -> batch whose results are incomplete."""
        self.batch_ids: set[str] = set()
        """Ids of all batches that a provider has accepted."""
        self.num_batches = 0
        self.tries: dict[int, int] = {}
        """Number of a question -> number of batches that gave it neither an answer nor an error."""
        self._prepared: dict[int, tuple[int, BudgetAmount]] = {}
        """Requests for the next batch, in the same form as ``UnfinishedBatch.waiting``."""
        self._batch_of: dict[int, int] = {}
        """Number of a question -> number of its batch."""
        self._in_flight: dict[int, tuple[Usage, float | None]] = {}
        """Question number -> (maximum usage, maximum cost in dollars) of the question's request in
        flight."""

    @classmethod
    def read(cls, path: Path) -> MapJournalState:
        """Read a whole map journal, and return the state of its map.

        Each request without a reply is charged with the most that it may have cost.
        """
        recorded = cls()
        for offset, line in read_lines(path):
            recorded.add(offset, line)
        for number in list(recorded._in_flight):
            recorded._charge_in_flight(number)
        return recorded

    def add(self, offset: int, line: MapJournalLine) -> None:
        """Update the state of the map with one line of its journal.

        The line begins at ``offset``.
        """
        if line.r is not None:
            self._in_flight.pop(line.r.number, None)
            self._mark_collected(line.r.number)
            self._spend(usage_from_counts(line.r.counts), line.r.cost)
            question = self._reopen_question(line.r.number)
            question.replies.append(offset)
            if line.r.turn == 0:  # nearly always, it is the answer
                digest = self.digests[line.r.number]
                del self.open[digest]
                self.answered[digest] = offset
        elif line.q is not None:
            self._begin(line.q.number, line.q.row, line.q.digest)
            self._record_sent_request(line.q.number, line.q)
        elif line.t is not None:
            self._reopen_question(line.t.number)
            self._record_sent_request(line.t.number, line.t)
        elif line.x is not None:
            self._in_flight.pop(line.x.number, None)
            # A failure outside a batch does not count towards the limit of batches for a row.
            if self._mark_collected(line.x.number):
                self.tries[line.x.number] = self.tries.get(line.x.number, 0) + 1
            self._spend(usage_from_counts(line.x.counts), line.x.cost)
        elif line.d is not None:
            self._record_last_row(line.d.row)
        elif line.s is not None:
            self._begin(line.s.number, line.s.row, line.s.digest).run = line.s.run
        elif line.e is not None:
            self._reopen_question(line.e.number)
            self._mark_collected(line.e.number)
            self.tries.pop(line.e.number, None)
            self._spend(usage_from_counts(line.e.counts, line.e.calls), line.e.cost)
            digest = self.digests[line.e.number]
            del self.open[digest]
            (self.answered if line.e.error is None else self.failed)[digest] = offset
        elif line.map is not None:
            self.header = line.map
        elif line.c is not None:
            self.last_start = line.c
            self._prepared = {}  # they were never uploaded
        elif line.n is not None:
            self.num_unaskable = line.n
        elif line.b is not None:
            self._begin(line.b.number, line.b.row, line.b.digest)
            self._prepared[line.b.number] = offset, budget_to_reserve(line.b)
        elif line.w is not None:
            self._record_sent_batch(line.w)
        elif line.u is not None:
            self.batches[line.u.part].id = line.u.id
            self.batch_ids.add(line.u.id)
        elif line.v is not None:
            del self.batches[line.v.part]

    def _record_sent_batch(self, sent: BatchUploadIntentLine) -> None:
        """Record that the prepared requests are now uploaded as one batch."""
        batch = self.batches[sent.part] = UnfinishedBatch(sent, self._prepared)
        self._batch_of.update(dict.fromkeys(batch.waiting, sent.part))
        self.num_batches = sent.part + 1
        self._prepared = {}

    def _mark_collected(self, number: int) -> bool:
        """Record that a question has its result, and return True if it was part of a batch."""
        part = self._batch_of.pop(number, None)
        if part is not None:
            del self.batches[part].waiting[number]
        return part is not None

    def _begin(self, number: int, row: int, digest_text: str) -> UnfinishedQuestion:
        digest = digest_to_int(digest_text)
        if number == len(self.digests):
            self.digests.append(digest)
        self._charge_in_flight(number)
        self.failed.pop(digest, None)
        self.answered.pop(digest, None)
        self._record_last_row(row)
        question = self.open[digest] = UnfinishedQuestion(number)
        return question

    def _record_last_row(self, row: int) -> None:
        """Record that the map has read its table up to row ``row``.

        Nothing is recorded if this invocation of the map asked only a sample.
        """
        if self.last_start is None or not self.last_start.is_sample:
            self.last_row = max(self.last_row, row)

    def _reopen_question(self, number: int) -> UnfinishedQuestion:
        """Return a question's entry among the unanswered ones, reopening the question if needed.

        A question that was answered is reopened. If it had an answer, that reply is kept as one of
        its earlier replies.
        """
        digest = self.digests[number]
        found = self.open.get(digest)
        if found is None:
            before = self.answered.pop(digest, None)
            replies = [] if before is None else [before]
            found = self.open[digest] = UnfinishedQuestion(number, replies)
        return found

    def _record_sent_request(
        self, number: int, line: QuestionStartedLine | RetryRequestRecord
    ) -> None:
        self._charge_in_flight(number)
        most = Usage(line.max_input_tokens, line.max_output_tokens, calls=1, unknown_calls=1)
        self._in_flight[number] = most, line.cost

    def _charge_in_flight(self, number: int) -> None:
        found = self._in_flight.pop(number, None)
        if found is not None:
            self._spend(*found)

    def _spend(self, usage: Usage, cost: float | None) -> None:
        if usage.calls:
            self.usage += usage
        if cost is not None:
            self.is_priced = True
            self.cost += cost


def recorded_reply(line: MapJournalLine) -> Reply:
    """Return the model's reply that a journal line records."""
    assert line.r is not None
    message = Message("assistant", line.r.text, line.r.reasoning)
    usage = usage_from_counts(line.r.counts)
    return Reply(message, usage, line.r.finish, cost=line.r.cost, seconds=line.r.seconds)
