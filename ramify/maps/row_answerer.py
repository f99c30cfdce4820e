"""The two ways in which a map answers a row: one request to the model, or a run with a Python
session.

The cheapest way that can answer the row is used.

    MEANS     plain call ── session
              one request      an ordinary run, stored under its own id

To add a way, write a class here and add it in ``create_row_answerers``, which lists the ways from
cheap to expensive. ``map_run.py`` decides which rows are asked and in which order, and
``batch_run.py`` handles rows that a provider's batch API answers.
"""

from __future__ import annotations

import abc
import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.calls_outside_runs import (
    DirectEvent,
    DirectModelCaller,
    DirectRequestEvent,
    DirectRequestFailedEvent,
    ModelReplyEvent,
)
from ramify.engine.limits import BudgetAmount
from ramify.engine.question import Question
from ramify.engine.rlm import RLM
from ramify.engine.run_result import Result
from ramify.errors import RamifyError, UnknownRun, is_fixable_by_user
from ramify.maps.map_journal import (
    DirectReplyRecord,
    FailedRequestLine,
    MapJournalLine,
    QuestionEndedRecord,
    QuestionStartedLine,
    RetryRequestRecord,
    RowRunStartedLine,
    TableMapJournal,
    compact_usage,
    digest_to_base64,
)
from ramify.types.message import Reply, Usage
from ramify.types.trajectory import Stop

MAX_SESSIONS = min(16, 2 * (os.cpu_count() or 1))
"""Maximum number of rows with an open session. Each session has its own processes."""


class QuestionInProgress(msgspec.Struct):
    """A question of a map that is being answered.

    Rows with identical questions share it.
    """

    row: int
    """Index of the first row that asks the question, from 0."""
    digest: bytes
    question: Question
    number: int = -1
    """Number of the question in the journal, or -1 if it has no line yet."""
    replies: Sequence[Reply] = ()
    """Replies that an interrupted attempt received."""
    run: str = ""
    """Id of the run that began to answer the question before an interruption."""


class RowOutcome(msgspec.Struct, frozen=True):
    """The outcome of a question: its answer or error, and its cost.

    If the map has to stop, it also says why the question is unfinished.
    """

    answer: Any = None
    """Answer as a plain value, or None if there is none."""
    error: str | None = None
    offset: int = -1
    """Byte offset of the outcome in the journal, or -1 if the question is not finished."""
    cause: BaseException | None = None
    """Error that left the question unfinished and stops the map: an exhausted budget, a network
    failure, a missing key, or a full disk."""
    cost: float = 0.0
    """Dollars spent on the question in this invocation of the map."""
    seconds: float = 0.0
    number: int = -1
    """Number of the question in the journal."""

    @property
    def is_finished(self) -> bool:
        return self.offset >= 0


class RowAnswerer(abc.ABC):
    """A way of answering a table row, such as a direct call or a Python session."""

    name: str
    """``plain call`` or ``session``."""

    @abc.abstractmethod
    def can_answer(self, question: Question) -> bool:
        """Return True if this method can answer the given question."""

    @abc.abstractmethod
    async def answer(self, asked: QuestionInProgress) -> RowOutcome:
        """Answer the question, and record every step in the map's journal.

        If the model fails, the error becomes part of the outcome and is not raised.
        """


class DirectCallRowAnswerer(RowAnswerer):
    """Answers a table row with one request to the model, without a Python session."""

    name = "plain call"

    def __init__(self, calls: DirectModelCaller, journal: TableMapJournal, question: str) -> None:
        """Create an answerer that sends requests through ``calls`` and records them in ``journal``.

        ``question`` is the question shared by all rows, so it is not recorded again for each row.
        """
        self._calls = calls
        self._journal = journal
        self._question = question
        self._began = time.perf_counter()

    def can_answer(self, question: Question) -> bool:
        return self._calls.can_answer(question)

    async def answer(self, asked: QuestionInProgress) -> RowOutcome:
        row = _DirectRow(self._journal, asked, self._question, self._began)
        replies, spent = asked.replies, None
        if replies:
            spent = BudgetAmount(
                len(replies),
                sum(reply.usage.total_tokens for reply in replies),
                sum(reply.cost or 0.0 for reply in replies),
            )
        began = time.perf_counter()
        outcome = await self._calls.answer(asked.question, row.record, replies, spent)
        seconds = time.perf_counter() - began
        cause = outcome.failure
        # A cause that a person can fix leaves the question open, so that a later start asks again.
        if outcome.stop is not Stop.FINAL and is_fixable_by_user(cause):
            return RowOutcome(
                error=outcome.error,
                cause=cause,
                cost=row.cost,
                seconds=seconds,
                number=asked.number,
            )
        if outcome.stop is Stop.FINAL:
            answer = outcome.answer
            answer = answer if type(answer) is str else to_jsonable(answer)
            if row.offset >= 0:
                return RowOutcome(
                    answer, None, row.offset, cost=row.cost, seconds=seconds, number=asked.number
                )
        else:
            answer = None
        if not row.is_known:
            _begin_unsent(self._journal, asked)
        end = QuestionEndedRecord(
            asked.number, outcome.stop, answer, outcome.error, (), 0, None, round(seconds, 4)
        )
        offset = self._journal.append(MapJournalLine(e=end))
        return RowOutcome(
            answer, outcome.error, offset, cost=row.cost, seconds=seconds, number=asked.number
        )


class _DirectRow:
    """Records in the map's journal how one row is answered by direct requests.

    It records the requests, replies and failures.
    """

    def __init__(
        self, journal: TableMapJournal, asked: QuestionInProgress, question: str, began: float
    ) -> None:
        self.offset = -1
        """Byte offset of the last reply in the journal."""
        self.cost = 0.0
        """Cost in dollars of this row's requests in this invocation of the map."""
        self.is_known = bool(asked.replies)
        """True if the journal contains the question."""
        self._journal = journal
        self._asked = asked
        self._question = question
        self._began = began
        self._turn = len(asked.replies) - 1
        """The last turn that was sent."""

    def record(self, event: DirectEvent) -> None:
        number = self._asked.number
        if isinstance(event, ModelReplyEvent):
            reply = event.reply
            self.cost += reply.cost or 0.0
            line = MapJournalLine(
                r=DirectReplyRecord(
                    number,
                    event.turn,
                    reply.message.content,
                    reply.finish,
                    compact_usage(reply.usage),
                    _round_cost(reply.cost),
                    round(reply.seconds, 4),
                    reply.message.reasoning,
                )
            )
            self.offset = self._journal.append(line)
        elif isinstance(event, DirectRequestEvent):
            self._journal.append(self._request_line(event))
        else:
            self._record_failure(event)

    def _request_line(self, event: DirectRequestEvent) -> MapJournalLine:
        asked, most, cost = self._asked, event.most, _round_cost(event.cost)
        is_first, self._turn = event.turn > self._turn, event.turn
        if event.turn or not is_first:
            text = event.new[-1].content if is_first else None
            return MapJournalLine(
                t=RetryRequestRecord(
                    asked.number,
                    event.turn,
                    text,
                    most.input_tokens,
                    most.output_tokens,
                    cost,
                )
            )
        question = asked.question
        self.is_known = True
        asked.number = number = self._journal.assign_question_number(asked.number)
        return MapJournalLine(
            q=QuestionStartedLine(
                number,
                asked.row,
                round(time.perf_counter() - self._began, 3),
                digest_to_base64(asked.digest),
                None if question.text == self._question else question.text,
                question.context,
                most.input_tokens,
                most.output_tokens,
                cost,
            )
        )

    def _record_failure(self, event: DirectRequestFailedEvent) -> None:
        self.cost += event.cost or 0.0
        counts = compact_usage(event.usage) if event.usage.calls else ()
        self._journal.append(
            MapJournalLine(
                x=FailedRequestLine(
                    self._asked.number, event.turn, event.error, counts, _round_cost(event.cost)
                )
            )
        )


class SessionRowAnswerer(RowAnswerer):
    """Answers a table row with a complete run of the RLM, which may use a Python session."""

    name = "session"

    def __init__(
        self, rlm: RLM, calls: DirectModelCaller, journal: TableMapJournal, map_id: str
    ) -> None:
        self._rlm = rlm
        self._calls = calls
        self._journal = journal
        self._map_id = map_id
        self._began = time.perf_counter()
        self._slots = asyncio.Semaphore(MAX_SESSIONS)

    def can_answer(self, question: Question) -> bool:
        return True

    async def answer(self, asked: QuestionInProgress) -> RowOutcome:
        async with self._slots:
            began = time.perf_counter()
            try:
                result = await self._run_or_resume(asked)
            except RamifyError as error:
                if is_fixable_by_user(error):
                    return RowOutcome(error=str(error), cause=error)
                return self._to_outcome(asked, Stop.ERROR, None, str(error), None, began)
        if result.stop is Stop.SUSPENDED or is_fixable_by_user(result.failure):
            cause = result.failure or RamifyError(result.error or "the run was suspended")
            return RowOutcome(error=result.error, cause=cause, cost=result.cost or 0.0)
        why = result.error or (None if result.stop is Stop.FINAL else result.reason)
        if result.answer is None and not why:
            why = "the model gave None as its final answer"
        return self._to_outcome(asked, result.stop, to_jsonable(result.answer), why, result, began)

    async def _run_or_resume(self, asked: QuestionInProgress) -> Result:
        question, rlm = asked.question, self._rlm
        budget = self._calls.budget
        if asked.run and rlm.store is not None:
            try:
                found = rlm.recorded(asked.run)
                if found is not None:
                    return found
                return await rlm.restart(asked.run, answer_type=question.kind, budget=budget)
            except UnknownRun:  # it was deleted, so it is asked again
                pass
        running = rlm.start(
            question.text if question.context is None else question.context,
            None if question.context is None else question.text,
            answer_type=question.kind,
            budget=budget,
            metadata={"map": self._map_id, "row": asked.row},
        )
        # Before its first event: the run begins at the next wait of this task.
        asked.number = number = self._journal.assign_question_number(asked.number)
        started = RowRunStartedLine(
            number,
            asked.row,
            round(time.perf_counter() - self._began, 3),
            digest_to_base64(asked.digest),
            running.id,
        )
        self._journal.append(MapJournalLine(s=started))
        return await running

    def _to_outcome(
        self,
        asked: QuestionInProgress,
        stop: Stop,
        answer: Any,
        error: str | None,
        result: Result | None,
        began: float,
    ) -> RowOutcome:
        usage = Usage() if result is None else result.usage
        cost = None if result is None else result.cost
        seconds = time.perf_counter() - began
        counts = compact_usage(usage) if usage.calls else ()
        if result is None:
            _begin_unsent(self._journal, asked)
        end = QuestionEndedRecord(
            asked.number,
            stop,
            answer,
            error,
            counts,
            usage.calls,
            _round_cost(cost),
            round(seconds, 4),
        )
        offset = self._journal.append(MapJournalLine(e=end))
        return RowOutcome(
            answer, error, offset, cost=cost or 0.0, seconds=seconds, number=asked.number
        )


def _begin_unsent(journal: TableMapJournal, asked: QuestionInProgress) -> None:
    """Record the start of a question that failed before any request was sent."""
    asked.number = journal.assign_question_number(asked.number)
    begun = RowRunStartedLine(asked.number, asked.row, 0.0, digest_to_base64(asked.digest), "")
    journal.append(MapJournalLine(s=begun))


def create_row_answerers(
    rlm: RLM, calls: DirectModelCaller, journal: TableMapJournal, map_id: str, question: str
) -> tuple[RowAnswerer, ...]:
    """Return the methods of answering a row, from the cheapest to the most expensive.

    The last one can answer any row.
    """
    return (
        DirectCallRowAnswerer(calls, journal, question),
        SessionRowAnswerer(rlm, calls, journal, map_id),
    )


def _round_cost(cost: float | None) -> float | None:
    """Round a cost in dollars to twelve decimal places, which hides floating-point errors."""
    return None if cost is None else round(cost, 12)
