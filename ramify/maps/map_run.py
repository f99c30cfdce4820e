"""Runs a map, which asks one question about every row of a table.

This module decides in which order rows are answered and written, and when the map stops.

    rows ── RowQuestionMaker ──┬── answered before: its answer is read from the journal
                          ├── asked by an earlier row: it waits for that one
                          └── a worker answers it, by the smallest means that fits
    slots of rows, in order ──> MapOutputWriter      a row is written when all before it are

``max_concurrency`` workers take rows one after the other, so memory holds only the rows in progress
and one number for each answered question. All rows share one budget.

The map stops before its last row if its budget is used up, if someone has to fix a problem first
(such as a missing key, no network or a full disk), if ``stop`` is called, or if the first rows all
fail with the same error. Rows in progress are then finished, and the map can be continued later.
``map_journal_state.py`` reads what earlier invocations have recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.clients.provider_batch_apis import BATCH_SHARE
from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.calls_outside_runs import DirectModelCaller
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.observation_messages import count_context_chars, plain_prompt
from ramify.engine.question import Question
from ramify.engine.rlm import RLM
from ramify.engine.typed_answers import AnswerSchema, TypeMismatch, to_answer_schema
from ramify.errors import (
    ConfigError,
    LimitReached,
    RamifyError,
    StoreError,
    UnknownRun,
    is_fixable_by_user,
)
from ramify.maps.batch_run import MapBatchJobs, batch_client
from ramify.maps.estimate import MeasuredRowCost, TableMapEstimate, estimate
from ramify.maps.map_journal import (
    DuplicateRowLine,
    MapJournalHeader,
    MapJournalLine,
    MapStartRecord,
    TableMapJournal,
    TableMapStore,
    new_map_id,
    temporary_journal,
)
from ramify.maps.map_journal_state import MapJournalState, recorded_reply
from ramify.maps.map_output import AddedAnswerColumns, MapOutputWriter, open_output, output_row
from ramify.maps.row_answerer import (
    MAX_SESSIONS,
    QuestionInProgress,
    RowAnswerer,
    RowOutcome,
    create_row_answerers,
)
from ramify.maps.row_question import InvalidRowError, RowQuestionMaker
from ramify.maps.row_source import Row, RowSource
from ramify.progress import track_progress
from ramify.store.folder_store import Store
from ramify.store.run_summary import summarise
from ramify.types.message import Reply, Usage

_MAX_AHEAD = 10_000
"""Maximum number of rows that are read before the oldest of them is answered."""
_BREATH = 200
"""Number of rows without a request after which the event loop may run other tasks."""
_HOPELESS = 20
"""The map stops if this many rows failed with the same error and none was answered."""
_SETTINGS = (
    *("model", "sub_model", "models", "scaffold", "sampling", "instructions", "examples"),
    "mode",
)
"""Settings of an RLM that change the request or the model that answers."""
_COUNTED = ("rows", "answered", "failed", "missing", "asked", "known", "unaskable")
MapStop = Literal["done", "limit", "suspended", "stopped", "failed"]


class TableMapSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a map: its question about each table row, and its options.

    It also sets the output and the limits.
    """

    question: str
    """Question, or a template that is filled in from the columns of a row."""
    budget: Limits
    """Limits on calls, tokens and dollars for all rows together."""
    answer_type: Any = None
    columns: tuple[str, ...] = ()
    """Columns that the model reads. Empty means all columns."""
    prefix: str = ""
    """Prefix for the names of the new columns."""
    out: Path | None = None
    """Path of the output file, or None for a table in memory."""
    retry_failed: bool = False
    """True to ask again about rows that failed with an error in an earlier invocation."""
    strict: bool = False
    """True to stop the map at the first row with an error."""
    sample: int | None = None
    """Number of rows to draw at random and ask about, in order to estimate the whole map. The
    output is then a table in memory. None means all rows."""
    is_part: bool = False
    """True if this is a part of a larger map. All of its rows are then returned, even if it stops
    early."""
    batch: bool = False
    """True to use the provider's batch API for rows that a single request can answer. It is usually
    cheaper but slower."""
    batch_rows: int | None = None
    """Maximum number of rows in one batch. None means as many as the provider accepts."""


class MapResult(msgspec.Struct, frozen=True):
    """The result of a map, such as its number of answered rows and its cost.

    It also says why the map stopped and where the answers are.
    """

    id: str
    """Id of the map, for ``ramify show`` and ``ramify view`` if it is stored."""
    stop: MapStop
    """``done``, or why the map stopped early: ``limit``, ``suspended``, ``stopped`` or
    ``failed``."""
    reason: str
    """One sentence that explains why the map stopped. Empty if all rows are done."""
    num_rows: int
    """Number of rows that were read."""
    num_answered: int
    """Number of rows with an answer."""
    num_failed: int
    """Number of rows with an error."""
    num_missing: int
    """Number of rows that were read but about which no question was asked."""
    num_questions: int
    """Number of questions asked by this call. Equal rows are asked once."""
    num_known: int
    """Number of rows whose answer was already known, from an earlier invocation of the map or from
    an equal row."""
    usage: Usage
    """Tokens and calls, including those of earlier invocations of the map."""
    cost: float | None
    """Cost in dollars, including earlier invocations of the map. None if no model has a price."""
    seconds: float
    """Duration of this invocation of the map, in seconds."""
    num_waiting: int = 0
    """Number of questions in batches that a provider has not finished. Repeating the call collects
    them."""
    out: str = ""
    """Path of the output file, or empty if there is none."""
    table: Any = None
    """The rows with their answers, as a table of the same kind as the input. None if the output is
    a file."""
    estimate: TableMapEstimate | None = None
    """Estimated cost and duration of the whole map, if questions were asked about only a sample of
    the rows."""
    num_unaskable: int = 0
    """Number of failed rows about which no question can be asked, because they are empty or cannot
    be read. On a Ray cluster they are not counted."""
    num_earlier_requests: int = 0
    """Number of requests in ``usage`` that earlier invocations of the map sent."""
    num_paid_again: int = 0
    """Number of replies paid for twice, because a worker or the whole map was lost before they were
    written. Only on a Ray cluster."""


class _Pending:
    """A question of a running map, and its outcome once it is answered.

    They are kept until every row that asks this question has been written.
    """

    def __init__(self, asked: QuestionInProgress | None, outcome: RowOutcome | None = None) -> None:
        self.asked = asked
        self.outcome = outcome
        self.is_taken = outcome is not None
        self.is_new = asked is not None
        self.has_row = False
        """True once a row with the answer has been written."""


class TableMapRun:
    """A run that asks one question about every row of a table.

    It records each step in a journal and writes the rows with their answers. A new ``TableMapRun``
    with the same request continues an interrupted one.
    """

    def __init__(
        self, rlm: RLM, source: RowSource, request: TableMapSpec, budget: BudgetLedger | None = None
    ) -> None:
        """Prepare to ask the question about the table rows in ``source``.

        ``rlm`` answers the rows, and its limits apply to each row separately. If this map is part
        of a larger one, ``budget`` replaces the budget of the request. Raises ConfigError if the
        request does not fit the table.
        """
        self.rlm = rlm
        self.source = source
        self.request = request
        self._budget = budget or request.budget
        self.kind: AnswerSchema | None = (
            None if request.answer_type is None else to_answer_schema(request.answer_type)
        )
        self.added = AddedAnswerColumns(self.kind, request.prefix, source.kept_columns)
        if request.batch_rows is not None and request.batch_rows < 1:
            raise ConfigError(f"a batch of {request.batch_rows} rows: give 1 or more")
        if request.out is not None and not request.out.parent.is_dir():
            raise ConfigError(f"the folder {request.out.parent} of the output does not exist")
        self.asking: RowQuestionMaker
        self.id = ""
        self._is_new = False
        """True if this invocation of the map created the journal."""
        self._stop: MapStop = "done"
        self._reason = ""
        self._slots: deque[tuple[Row, _Pending]] = deque()
        self._pending: dict[int, _Pending] = {}
        self._room = asyncio.Event()
        self._batches: MapBatchJobs | None = None
        self._given: set[int] = set()
        """Numbers of questions that were answered before the pass that writes rows in order, and
        whose first row has not been written yet."""
        self._sample = None if request.sample is None else _Sample(source, request.sample)
        self._is_warm = False
        """True once the first row of the sample has been asked alone, before the others."""
        self._measured: list[MeasuredRowCost] = []
        """The questions of the sample, in the order in which they ended."""
        self._estimate: TableMapEstimate | None = None
        self._began = self._began_cpu = 0.0
        """Wall-clock and CPU time of this process, in seconds, when the time measurement began."""
        self._open_calls: DirectModelCaller | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._failed_now: dict[int, int] = {}
        """Question digest -> journal offset of the error, for questions that failed in this
        invocation of the map."""
        self._has_answer = False
        self._num_earlier_requests = 0
        self._num_begun = 0
        self._judged = asyncio.Event()
        """Set whenever a question has ended, or the map stops."""
        self._errors: list[str] = []
        """The first errors, kept as long as no row has been answered."""

    def stop_gracefully(self, reason: str = "it was stopped", stop: MapStop = "stopped") -> None:
        """Stop the map before it begins any other row.

        Requests in flight are finished first.
        """
        if self._stop == "done":
            self._stop, self._reason = stop, reason
        self._room.set()
        self._judged.set()
        if self._batches is not None:
            self._batches.stop_waiting()

    @property
    def pause_remaining_s(self) -> float:
        """Return the number of seconds until a rate-limit pause ends, or 0 if requests are not
        paused."""
        return 0.0 if self._open_calls is None else self._open_calls.pause_remaining_s

    async def run(self) -> MapResult:
        """Answer all rows of the table, and write the map's output.

        Raises ConfigError before any row is asked if the settings are invalid, and StoreError if
        the output cannot be written.
        """
        began = time.perf_counter()
        request = self.request
        async with self.rlm, self.rlm.direct_calls(self._budget) as calls:
            self._open_calls = calls
            self._prepare(calls)
            journal, recorded = self._open_journal(calls)
            self._journal, self._recorded = journal, recorded
            self._has_answer = bool(recorded.answered)
            try:
                self._continue(calls)
                self._num_earlier_requests = calls.budget.usage.calls
                self._means = create_row_answerers(
                    self.rlm, calls, journal, self.id, request.question
                )
                out = request.out if request.sample is None else None
                output = open_output(out, self.source, self.added)
                try:
                    if request.batch or recorded.batches:
                        await self._run_batches(calls)
                    if self._stop == "done":
                        await self._work(output, calls)
                except RamifyError:
                    if self._is_unasked(journal):
                        output.discard()
                    raise
                finally:
                    output.close()
            except RamifyError:
                if self._is_unasked(journal):
                    journal.delete()
                raise
            finally:
                journal.close()
            counts, ledger = self._counts, calls.budget
            has_file = self._stop in ("done", "limit")
            return MapResult(
                self.id,
                self._stop,
                self._reason,
                counts["rows"],
                counts["answered"],
                counts["failed"],
                counts["missing"],
                counts["asked"],
                counts["known"],
                ledger.usage,
                ledger.cost,
                time.perf_counter() - began,
                sum(num for _, num in self._batches.pending_batches) if self._batches else 0,
                str(request.out) if out is not None and has_file else "",
                output.table,
                self._estimate,
                counts["unaskable"],
                self._num_earlier_requests,
            )

    def _is_unasked(self, journal: TableMapJournal) -> bool:
        """Return True if the map is new and has not asked a question yet.

        Its files can then be deleted without loss.
        """
        return self._is_new and journal.num_questions == 0

    # --- before the first row ---------------------------------------------------------------------

    def _prepare(self, calls: DirectModelCaller) -> None:
        request, config = self.request, calls.setup.config
        settings = {name: config[name] for name in _SETTINGS if name in config}
        schema = self.kind.schema if self.kind else None
        chosen = request.columns or self.source.shown
        asked = (request.question, schema, settings)
        of_rows = hashlib.sha256(msgspec.json.encode(asked)).digest()
        out = "" if request.out is None else str(request.out.absolute())
        self._key = hashlib.sha256(of_rows + msgspec.json.encode((chosen, out))).hexdigest()
        base = Question(request.question, None, kind=self.kind)
        if not request.question.strip():
            raise ConfigError("the question is empty: say what you want to know of each row")
        self.asking = RowQuestionMaker(request.question, self.source.columns, chosen, base, of_rows)
        if self.asking.fields and request.columns:
            raise ConfigError(
                "the question is a template that already names its columns: omit columns (--column)"
            )
        sample = base if self.asking.fields else msgspec.structs.replace(base, context="row")
        messages = calls.first_request_messages(sample)
        self._header = MapJournalHeader(
            new_map_id(self._key),
            self._key,
            request.question,
            time.time(),
            calls.client.name,
            out,
            self.source.name,
            schema,
            config,
            tuple(message.content for message in messages[:-1]),
            messages[-1].content.removeprefix(plain_prompt(sample.text, sample.context)),
        )

    def _open_journal(self, calls: DirectModelCaller) -> tuple[TableMapJournal, MapJournalState]:
        """Open the journal of an earlier invocation of this map, or create a new one.

        Returns the journal and the state recorded in it.
        """
        store, out = self.rlm.store, self.request.out
        if store is not None and not isinstance(store, Store):
            raise ConfigError(
                f"a map is kept in the folder of a store, and a {type(store).__name__} has none: "
                "give ramify.Store(), or no store"
            )
        maps = None if store is None else TableMapStore(store.root, store.fsync)
        headers = [] if maps is None else list(maps.headers())
        found = next((path for path, header in headers if header.key == self._key), None)
        if out is not None and out.exists():
            self._check_output(out, found is not None, [header for _, header in headers])
        if maps is None or found is None:
            header = self._header
            journal = temporary_journal(header) if maps is None else maps.create(header)
            self.id, self._is_new = header.id, True
            return journal, MapJournalState()
        journal = maps.reopen(found)
        try:
            recorded = MapJournalState.read(found)
        except BaseException:
            journal.close()
            raise
        self.id = found.stem
        journal.num_questions = len(recorded.digests)
        return journal, recorded

    def _check_output(self, out: Path, is_ours: bool, headers: list[MapJournalHeader]) -> None:
        """Raise ConfigError if the output file exists and was not written by this map."""
        if out.is_dir():
            raise ConfigError(f"the output {out} is a folder: give a file")
        if is_ours:
            return
        other = next((each for each in headers if each.out == str(out.absolute())), None)
        if other is None:
            raise ConfigError(f"{out} exists, and no map of this store wrote it: give another out")
        what = (
            f"the question {other.question[:60]!r}"
            if other.question != self.request.question
            else "the same question with other settings"
        )
        raise ConfigError(
            f"{out} has the answers to {what} (map {other.id}): give another out, or remove it"
        )

    def _continue(self, calls: DirectModelCaller) -> None:
        """Record that an interrupted map continues, and charge its earlier spending to the
        budget."""
        recorded, ledger, store = self._recorded, calls.budget, self.rlm.store
        cost = recorded.cost if recorded.is_priced else None
        if recorded.usage.calls:
            ledger.charge(recorded.usage, cost)
        for question in recorded.open.values():
            if not question.run or not isinstance(store, Store):
                continue
            with contextlib.suppress(UnknownRun):  # it was deleted, so what it cost is not known
                summary = summarise(store.stored(question.run))
                ledger.charge(summary.usage, summary.cost)
        limit = ledger.limit
        has_price = calls.client.price is not None
        self._journal.append(
            MapJournalLine(
                c=MapStartRecord(
                    time.time(),
                    self.source.total,
                    limit.calls,
                    limit.tokens,
                    limit.cost if has_price else None,
                    self.request.sample is not None,
                )
            )
        )

    # --- rows in batches --------------------------------------------------------------------------

    async def _run_batches(self, calls: DirectModelCaller) -> None:
        """Answer rows through the provider's batch API if they need only one request.

        Rows that need a Python session are answered meanwhile. Batches of an earlier invocation are
        collected even if this one does not use the batch API.
        """
        request, recorded = self.request, self._recorded
        if request.sample is not None:
            if recorded.batches:
                raise ConfigError(
                    f"rows of this map were sent in {len(recorded.batches)} batches: collect them "
                    "first, with the same command without a sample (--try)"
                )
            batch_client(calls).batches()
            return
        if self.rlm.store is None:
            raise ConfigError(
                "a batch is collected up to a day later, so its map must be kept: give a store"
            )
        batches = self._batches = MapBatchJobs(
            calls,
            self._journal,
            recorded,
            self.asking,
            self.source,
            self.id,
            uploads=request.batch,
            retry_failed=request.retry_failed,
            max_rows=request.batch_rows,
        )
        self._calls = calls
        await batches.run(self.stop_gracefully, self._answer_sessions)
        self._counts["asked"] += len(batches.ended)
        self._given |= batches.ended
        self._failed_now |= batches.failed
        if waiting := batches.pending_batches:
            num = sum(num for _, num in waiting)
            ids = ", ".join(id or "an upload whose id is not known" for id, _ in waiting[:3])
            more = ", …" if len(waiting) > 3 else ""
            self._reason += (
                f"; {num:,} rows remain in batches at {batches.provider_name} ({ids}{more}), which "
                "answers them and charges for them"
            )

    async def _answer_sessions(self) -> None:
        """Answer the rows that need more than one request, each in its own Python session."""
        rows = self.source.iter_rows()
        await asyncio.gather(*(self._session_worker(rows) for _ in range(MAX_SESSIONS)))

    async def _session_worker(self, rows: Iterator[Row]) -> None:
        for num, row in enumerate(rows):
            if self._stop != "done":
                return
            if self._needs_session(row):
                pending = self._pending_of(row)
                if not pending.is_taken and pending.asked is not None:
                    pending.is_taken = True
                    await self._answer(self._means[-1], pending, pending.asked)
                    if pending.outcome is not None and pending.outcome.is_finished:
                        self._given.add(pending.outcome.number)
            elif num % _BREATH == 0:
                await asyncio.sleep(0)

    def _needs_session(self, row: Row) -> bool:
        if row.error:
            return False
        try:
            question, _ = self.asking.question_and_digest(row.values, self._calls.max_context_chars)
        except InvalidRowError:
            return False
        return not self._calls.can_answer(question)

    # --- the rows ---------------------------------------------------------------------------------

    async def _work(self, output: MapOutputWriter, calls: DirectModelCaller) -> None:
        self._output, self._calls = output, calls
        sample = self._sample
        rows = self.source.iter_rows() if sample is None else sample.draw(self.asking, calls)
        self._rows = rows
        num_workers = self.rlm.limits.max_concurrency
        num_asked = [num for num in (self.source.total, self.request.sample) if num is not None]
        total = min(num_asked, default=None)
        with track_progress("map", total=total, unit="rows") as self._progress:
            self._start_clock()
            if sample is not None:
                await self._worker(1)
                self._is_warm = True
                self._start_clock()
            workers = [asyncio.create_task(self._worker()) for _ in range(num_workers)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            if sample is not None and self._measured:
                whole = sample.estimate(self._measured, num_workers, calls)
                self._estimate = msgspec.structs.replace(whole, is_batch=self.request.batch)
            if self._stop in ("done", "limit") or self.request.is_part:
                try:
                    await self._finish(rows)
                    output.finish()
                    self._record_unaskable()
                except StoreError as error:
                    self._stop, self._reason = "suspended", str(error)

    def _record_unaskable(self) -> None:
        num = self._counts["unaskable"]
        if self.request.sample is None and num != self._recorded.num_unaskable:
            self._journal.append(MapJournalLine(n=num))

    def _start_clock(self) -> None:
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    async def _worker(self, num: int | None = None) -> None:
        """Answer rows of the table one after another, as one of the map's concurrent workers.

        The worker ends when none is left, or after ``num`` rows.
        """
        try:
            while num != 0 and (pending := await self._next_question()) is not None:
                num = None if num is None else num - 1
                asked = pending.asked
                assert asked is not None
                means = next(each for each in self._means if each.can_answer(asked.question))
                await self._answer(means, pending, asked)
        except StoreError as error:  # the output or the journal cannot be written
            self.stop_gracefully(str(error), "suspended")

    async def _answer(
        self, means: RowAnswerer, pending: _Pending, asked: QuestionInProgress
    ) -> None:
        try:
            outcome = await means.answer(asked)
        except StoreError as error:
            outcome = RowOutcome(error=str(error), cause=error)
        pending.outcome = outcome
        if not outcome.is_finished:
            self._handle_interruption(outcome)
            return
        digest = int.from_bytes(asked.digest, "big")
        known = self._failed_now if outcome.error else self._recorded.answered
        known[digest] = outcome.offset
        del self._pending[digest]
        self._counts["asked"] += 1
        pending.asked = None
        if self._sample is not None:
            self._measure(asked.question, outcome)
        self._check_for_stop(outcome, asked.row)
        self._flush()

    def _measure(self, question: Question, outcome: RowOutcome, *, is_known: bool = False) -> None:
        is_first = not is_known and not self._is_warm
        ended_s = -1.0 if is_known or is_first else time.perf_counter() - self._began
        cpu_s = time.process_time() - self._began_cpu
        chars, cost = len(question.text) + count_context_chars(question.context), outcome.cost
        if self.request.batch and self._calls.can_answer(question):
            cost *= BATCH_SHARE
        row = MeasuredRowCost(chars, cost, outcome.seconds, ended_s, cpu_s, is_first)
        self._measured.append(row)

    def _handle_interruption(self, outcome: RowOutcome) -> None:
        """Stop the map because one of its questions could not be finished.

        Possible causes are a reached limit, a refused request or a full disk.
        """
        cause = outcome.cause
        if isinstance(cause, LimitReached):
            self.stop_gracefully(str(cause), "limit")
        elif cause is None or is_fixable_by_user(cause):
            self.stop_gracefully(outcome.error or str(cause), "suspended")
        else:
            self.stop_gracefully(outcome.error or str(cause), "failed")

    def _check_for_stop(self, outcome: RowOutcome, row: int) -> None:
        """Check after each answered row whether the map must stop.

        It stops if the disk is full, a strict row failed, or the first 20 rows failed alike.
        """
        trouble = self._journal.disk_error
        if trouble is not None:
            self.stop_gracefully(str(trouble), "suspended")
        self._judged.set()
        if outcome.error is None:
            self._has_answer = True
            return
        if self.request.strict:
            self.stop_gracefully(f"row {row} failed: {outcome.error}", "failed")
        if not self._has_answer:
            self._errors.append(outcome.error)
            if len(self._errors) >= _HOPELESS and self._is_hopeless_so_far:
                self.stop_gracefully(
                    f"the first {_HOPELESS} rows failed alike: {outcome.error}", "failed"
                )

    @property
    def _is_hopeless_so_far(self) -> bool:
        """Return True if every row so far has failed with the same error.

        It is also True if no row has ended yet.
        """
        return not self._has_answer and len(set(self._errors)) <= 1

    async def _next_question(self) -> _Pending | None:
        """Return the next question that a model must answer.

        Rows are read until one has such a question. Returns None if no row is left or the map is
        stopping.
        """
        num_passed = 0
        while self._stop == "done":
            # Further rows wait until it is known whether the first ones all fail alike.
            if self._is_hopeless_so_far and self._num_begun >= _HOPELESS:
                self._judged.clear()
                await self._judged.wait()
                continue
            # Rows are written in order: finished rows must not fill the memory behind a slow one.
            if len(self._slots) >= _MAX_AHEAD:
                self._room.clear()
                await self._room.wait()
                continue
            row = next(self._rows, None)
            if row is None:
                return None
            self._counts["rows"] += 1
            pending = self._pending_of(row)
            self._slots.append((row, pending))
            if not pending.is_taken:
                pending.is_taken = True
                self._num_begun += 1
                return pending
            self._flush()
            num_passed += 1
            # Known rows need no await, so this loop would otherwise block the event loop.
            if num_passed % _BREATH == 0:
                await asyncio.sleep(0)
        return None

    def _pending_of(self, row: Row, *, asks: bool = True) -> _Pending:
        """Return the question that a row asks, with its outcome if it was answered before.

        Equal rows share one question, so that it is asked only once. If ``asks`` is false, a new
        question is not registered as in progress.
        """
        if row.error:
            return self._record_unreadable(row, row.error)
        try:
            question, digest = self.asking.question_and_digest(
                row.values, self._calls.max_context_chars
            )
        except InvalidRowError as problem:
            return self._record_unreadable(row, str(problem))
        recorded, number = self._recorded, int.from_bytes(digest, "big")
        pending = self._pending.get(number)
        if pending is not None:
            return pending
        asked = QuestionInProgress(row.number, digest, question)
        offset = recorded.answered.get(number)
        if offset is not None:
            outcome = self._recorded_outcome(offset, asked)
            if outcome is not None and self._sample is not None and asks:
                self._measure(question, outcome, is_known=True)
            if outcome is not None:
                return _Pending(None, outcome)
        failed_now = self._failed_now.get(number)
        offset = recorded.failed.get(number) if failed_now is None else failed_now
        if offset is not None:
            outcome = self._recorded_outcome(offset, asked)
            assert outcome is not None
            if failed_now is not None or not self.request.retry_failed:
                return _Pending(None, outcome)
            asked.number = outcome.number
        found = recorded.open.get(number)
        if found is not None:
            asked.number, asked.run = found.number, found.run
            asked.replies = [self._reply_at(each) for each in found.replies]
        pending = _Pending(asked)
        if asks:
            self._pending[number] = pending
        return pending

    def _record_unreadable(self, row: Row, error: str) -> _Pending:
        outcome = RowOutcome(error=error)
        self._counts["unaskable"] += 1
        if self.request.strict:
            self.stop_gracefully(f"row {row.number} failed: {error}", "failed")
        return _Pending(None, outcome)

    def _recorded_outcome(self, offset: int, asked: QuestionInProgress) -> RowOutcome | None:
        """Return the outcome that the journal line at ``offset`` records.

        If the line is only a reply that does not fit the answer type, add the reply to ``asked``
        and return None, so that the model can correct it.
        """
        line = self._journal.line_at(offset)
        if line.e is not None:
            end = line.e
            cost = end.cost or 0.0
            return RowOutcome(end.answer, end.error, offset, None, cost, end.seconds, end.number)
        reply = recorded_reply(line)
        assert line.r is not None
        text, number, cost = reply.message.content, line.r.number, reply.cost or 0.0
        if text.strip() and reply.finish not in ("length", "content_filter", "tool_calls"):
            if self.kind is None:
                return RowOutcome(text, None, offset, None, cost, reply.seconds, number)
            try:
                value = self.kind.parse_answer(text)
                answer = to_jsonable(value)
                return RowOutcome(answer, None, offset, None, cost, reply.seconds, number)
            except TypeMismatch:
                pass
        asked.number, asked.replies = number, [reply]
        return None

    def _reply_at(self, offset: int) -> Reply:
        return recorded_reply(self._journal.line_at(offset))

    def _flush(self) -> None:
        """Write the answered rows in table order, up to the first row without an answer."""
        slots = self._slots
        while slots and (outcome := slots[0][1].outcome) is not None:
            if outcome.cause is not None:
                return
            row, pending = slots.popleft()
            self._write(row, pending, outcome)
        if len(slots) < _MAX_AHEAD:
            self._room.set()

    def _write(self, row: Row, pending: _Pending, outcome: RowOutcome) -> None:
        counts = self._counts
        values = output_row(row, self.source, self.added, outcome.answer, outcome.error)
        self._output.write_row(values, row.number)
        counts["failed" if outcome.error else "answered"] += 1
        is_answered_now = not pending.has_row and pending.is_new
        if outcome.number in self._given:
            self._given.discard(outcome.number)
            is_answered_now = True
        pending.has_row = True
        if not is_answered_now and outcome.number >= 0:
            if row.number > self._recorded.last_row and self.request.sample is None:
                self._journal.append(MapJournalLine(d=DuplicateRowLine(outcome.number, row.number)))
            counts["known"] += 1
        done = counts["answered"] + counts["failed"]
        self._progress.set_progress(done, self._note() if done % 16 == 0 else None)

    def _note(self) -> str:
        cost, failed = self._calls.budget.cost, self._counts["failed"]
        parts = ["" if cost is None else f"${cost:.4g}", f"{failed} failed" if failed else ""]
        return " · ".join(filter(None, parts))

    async def _finish(self, rows: Iterator[Row]) -> None:
        """Write all remaining rows of the table when the map ends.

        If the map stopped early, each row that was not asked gets an error with the reason.
        """
        why = f"not asked: {self._reason}"
        left, self._slots = self._slots, deque()
        for row, pending in left:
            self._write_last(row, pending, why)
        if self._stop == "done":
            return
        for num, row in enumerate(rows):
            self._counts["rows"] += 1
            self._write_last(row, self._pending_of(row, asks=False), why)
            if num % _BREATH == 0:
                await asyncio.sleep(0)

    def _write_last(self, row: Row, pending: _Pending, why: str) -> None:
        outcome = pending.outcome
        if outcome is not None and outcome.cause is None:
            self._write(row, pending, outcome)
            return
        self._counts["missing"] += 1
        self._output.write_row(output_row(row, self.source, self.added, None, why), row.number)


class _Sample:
    """A random sample of the rows in the table of a map.

    The size of the whole table is recorded, too. Both are needed to estimate the cost of asking all
    rows.
    """

    def __init__(self, source: RowSource, num: int) -> None:
        if num < 1:
            raise ConfigError(f"a sample of {num} rows says nothing: give 1 or more")
        self._source = source
        self._num = num
        self.num_rows = 0
        self._read_s = 0.0
        """Time it took to read the whole table, in seconds."""
        self._num_chars = 0
        """Number of characters in all distinct questions."""
        self._digests: set[int] = set()

    def draw(self, asking: RowQuestionMaker, calls: DirectModelCaller) -> Iterator[Row]:
        """Return a random sample of the rows, in table order.

        The whole table is read once. The sample is always the same for the same table.
        """
        rng, drawn, max_chars = random.Random(0), list[Row](), calls.max_context_chars
        began = time.perf_counter()
        for row in self._source.iter_rows():
            self.num_rows += 1
            if len(drawn) < self._num:
                drawn.append(row)
            elif (place := rng.randrange(self.num_rows)) < self._num:
                drawn[place] = row
            with contextlib.suppress(InvalidRowError):
                question, digest = asking.question_and_digest(row.values, max_chars)
                number = int.from_bytes(digest, "big")
                if not row.error and number not in self._digests:
                    self._digests.add(number)
                    self._num_chars += len(question.text) + count_context_chars(question.context)
        self._read_s = time.perf_counter() - began
        return iter(sorted(drawn, key=lambda row: row.number))

    def estimate(
        self, rows: list[MeasuredRowCost], concurrency: int, calls: DirectModelCaller
    ) -> TableMapEstimate:
        """Estimate the cost and duration of the whole map from the sampled questions."""
        return estimate(
            rows,
            self.num_rows,
            len(self._digests),
            self._num_chars,
            concurrency,
            self._read_s,
            is_priced=calls.client.price is not None,
        )
