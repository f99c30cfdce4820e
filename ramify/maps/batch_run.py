"""Answers the rows of a table through a provider's batch API, at half the price and within a day.

    rows that one request answers ── reserve all ── split ──┐
                                                            ▼
    {"b"} each request ── {"w"} key ── upload ── {"u"} id ── wait ── {"r"} {"x"} {"e"} ── {"v"}
                             └── killed here: the provider's list is searched for the key

Each line of the journal is written before what it describes is done, so the same command finds
every batch again after a kill at any moment, and uploads nothing twice. A row without a result,
because its batch expired or the provider failed, is put into a further batch, at most three times.
When the results of all batches have been downloaded, the replies are in the journal, and the map
continues as after any interruption: it reads the answers, repairs those that do not fit a schema by
direct calls, and writes its output. The providers' interfaces are in
``ramify/clients/provider_batch_apis.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from ramify.clients.base import Request
from ramify.clients.provider_batch_apis import (
    BatchApi,
    BatchCapableClient,
    BatchRequestResult,
    BatchState,
    batch_price,
    split,
)
from ramify.engine.calls_outside_runs import DirectModelCaller, max_request_usage
from ramify.engine.limits import BudgetAmount
from ramify.errors import (
    ConfigError,
    ModelError,
    RateLimited,
    RequestRefusedError,
    ServerStatusError,
    Unreachable,
    is_fixable_by_user,
)
from ramify.format_quantities import pluralize
from ramify.logging import ComponentLogger
from ramify.maps.map_journal import (
    BatchAcceptedLine,
    BatchEndedLine,
    BatchUploadIntentLine,
    DirectReplyRecord,
    FailedRequestLine,
    MapJournalLine,
    QuestionEndedRecord,
    QuestionStartedLine,
    TableMapJournal,
    compact_usage,
    digest_to_base64,
    digest_to_int,
)
from ramify.maps.map_journal_state import (
    MapJournalState,
    UnfinishedBatch,
    UnfinishedQuestion,
    budget_to_reserve,
)
from ramify.maps.row_question import InvalidRowError, RowQuestionMaker
from ramify.maps.row_source import Row, RowSource
from ramify.progress import track_progress
from ramify.types.trajectory import Stop

_MAX_TRIES = 3
"""Maximum number of batches that may return no result for a row before the row counts as failed."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
"""Maximum number of seconds between two requests for a batch's state."""
_MAX_ATTEMPTS = 5
"""Maximum number of attempts at an upload or a download."""
_BREATH = 200
"""Number of results to process before the event loop may run other tasks."""
_log = ComponentLogger("maps")
_Value = TypeVar("_Value")
OnStop = Callable[[str, Any], None]
"""Callback for a map that must stop early, called with the reason as text and a ``MapStop`` value
such as ``limit``."""


class BatchQuestion(msgspec.Struct, frozen=True):
    """A question about a table row, to be uploaded as one request of a batch."""

    row: int
    """Index of the first row that asks this question."""
    number: int
    """Number of the question in the journal; -1 if it has none."""
    digest: bytes
    question: str | None
    """The question about the row, or None if every row is asked the same question."""
    context: Any
    """The part of the row that the model reads."""
    most: BudgetAmount
    """Upper bound on the calls, tokens and dollars of the request."""
    max_output_tokens: int


class MapBatchJobs:
    """The batch jobs with which one map asks its questions at the provider's batch API.

    It uploads new batches, and collects those that an earlier invocation of the map uploaded.
    """

    def __init__(
        self,
        calls: DirectModelCaller,
        journal: TableMapJournal,
        recorded: MapJournalState,
        asking: RowQuestionMaker,
        source: RowSource,
        map_id: str,
        *,
        uploads: bool,
        retry_failed: bool,
        max_rows: int | None,
    ) -> None:
        """Prepare to upload batches of a map's questions and to download their results.

        If ``uploads`` is False, only the results of earlier batches are downloaded. Raises
        ConfigError if the model has no batch API.
        """
        self._calls = calls
        self._journal = journal
        self._recorded = recorded
        self._asking = asking
        self._source = source
        self._map_id = map_id
        self._uploads = uploads
        self._retry_failed = retry_failed
        self._client = batch_client(calls)
        self._api: BatchApi = self._client.batches()
        self._max_rows = min(self._api.max_rows, max_rows or self._api.max_rows)
        self._price = batch_price(calls.client.price)
        self._batches = dict(recorded.batches)
        self._num_batches = recorded.num_batches
        self._tries = recorded.tries
        self._began = time.perf_counter()
        self._halted = asyncio.Event()
        self._on_stop: OnStop = lambda reason, stop: None
        self.ended: set[int] = set()
        """Numbers of the questions that got a reply or an error in this invocation of the map."""
        self.failed: dict[int, int] = {}
        """Digest of each question that failed in this invocation -> offset of the journal line with
        its error."""

    @property
    def pending_batches(self) -> list[tuple[str, int]]:
        """Return the id and the number of unanswered requests of each batch not yet downloaded."""
        return [(each.id, len(each.waiting)) for each in self._batches.values()]

    @property
    def provider_name(self) -> str:
        return self._api.provider

    def stop_waiting(self) -> None:
        """Stop waiting for the results of uploaded batches.

        The provider continues to process them.
        """
        self._halted.set()

    async def run(
        self, on_stop: OnStop, meanwhile: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Upload the rows that are not in a batch yet, and wait for the results of all batches.

        ``meanwhile`` is run at the same time. ``on_stop`` is called with the reason if the map must
        stop early. Raises ConfigError before any upload if the budget does not cover all rows.
        """
        self._on_stop = on_stop
        for batch in self._batches.values():
            for _, amount in batch.waiting.values():
                self._calls.budget.reserve_sent(amount)
        with track_progress("batch", unit="rows") as self._progress:
            await self._upload_within_budget()
            await _gather_or_cancel(meanwhile(), self._collect_all())

    async def _collect_all(self) -> None:
        while self._batches and not self._halted.is_set():
            await _gather_or_cancel(*map(self._collect, list(self._batches)))
            if not self._halted.is_set():
                await self._upload_within_budget()

    async def _upload_within_budget(self) -> None:
        """Upload the remaining questions as batches, if the budget is large enough."""
        if not self._uploads:
            return
        num, most = await self._required_amount()
        budget = self._calls.budget
        if num and budget.limit_exceeded_by(budget.outstanding.plus(most)) is None:
            await budget.reserve(most)
            await self._upload()
        elif num and not self._batches:
            raise self._too_dear(num, most)

    # --- what is uploaded -------------------------------------------------------------------------

    async def _required_amount(self) -> tuple[int, BudgetAmount]:
        """Return the number of requests still to be uploaded, and an upper limit on their cost.

        The limit includes their tokens.
        """
        num, most = 0, BudgetAmount()
        for each in self._open_questions():
            num, most = num + 1, most.plus(each.most)
            if num % _BREATH == 0:
                await asyncio.sleep(0)
        return num, most

    def _open_questions(self) -> Iterator[BatchQuestion]:
        """Yield the questions to upload: those without an answer that need only one request.

        Questions that are answered or already in a batch are skipped.
        """
        taken = {
            digest_to_int(self._read_started_line(offset).digest)
            for batch in self._batches.values()
            for offset, _ in batch.waiting.values()
        }
        for row in self._source.iter_rows():
            found = self._to_batch_question(row, taken)
            if found is not None:
                taken.add(int.from_bytes(found.digest, "big"))
                yield found

    def _to_batch_question(self, row: Row, taken: set[int]) -> BatchQuestion | None:
        recorded, calls, number = self._recorded, self._calls, -1
        if row.error:
            return None
        try:
            question, digest = self._asking.question_and_digest(row.values, calls.max_context_chars)
        except InvalidRowError:
            return None
        key = int.from_bytes(digest, "big")
        known = key in taken or key in recorded.answered or key in self.failed
        if known or not calls.can_answer(question):
            return None
        if (offset := recorded.failed.get(key)) is not None:
            if not self._retry_failed:
                return None
            end = self._journal.line_at(offset).e
            number = -1 if end is None else end.number
        if (begun := recorded.open.get(key)) is not None:
            if begun.replies or begun.run:  # it continues as it began
                return None
            number = begun.number
        request = calls.first_request(question)
        if not calls.can_afford(request, self._price):
            return None  # the map says why it cannot be asked
        most, text = max_request_usage(request, self._price), question.text
        return BatchQuestion(
            row.number,
            number,
            digest,
            None if text == self._asking.text else text,
            question.context,
            most,
            request.sampling.max_tokens,
        )

    def _too_dear(self, num: int, most: BudgetAmount) -> ConfigError:
        limit, spent = self._calls.budget.limit, self._calls.budget.spent
        tokens = self._calls.max_reply_tokens
        amounts = [f"{most.calls:,} calls of {limit.calls - spent.calls:,}"]
        amounts = amounts if most.calls > limit.calls - spent.calls else []
        shorter = "" if amounts else f", or lower max_reply_tokens ({tokens:,})"
        if most.tokens > limit.tokens - spent.tokens:
            amounts.append(f"{most.tokens:,} tokens of {limit.tokens - spent.tokens:,}")
        if most.cost > limit.cost - spent.cost:
            amounts.append(f"${most.cost:.3g} of ${limit.cost - spent.cost:.3g}")
        return ConfigError(
            f"a batch reserves the most that all its rows can use before it is uploaded: "
            f"{pluralize(num, 'row')} may take {' and '.join(amounts)} that are left: raise the "
            f"limit{shorter}; nothing was uploaded"
        )

    async def _upload(self) -> None:
        api = self._api
        rows = (
            (api.request_body(self._request(each.question, each.context)), each)
            for each in self._open_questions()
        )
        for part in split(rows, self._max_rows):
            if self._halted.is_set():
                return
            batch = self._record_upload([row for _, row in part])
            key, numbers = batch.sent.key, batch.waiting
            lines = [
                api.format_upload_line(f"{key}-{number}", body)
                for number, (body, _) in zip(numbers, part, strict=True)
            ]
            part.clear()  # a batch is large, and it is sent as one text
            await self._create(batch, lines)

    def _record_upload(self, rows: list[BatchQuestion]) -> UnfinishedBatch:
        """Record in the map's journal that a new batch will be uploaded, and return that batch."""
        waiting, part = dict[int, tuple[int, BudgetAmount]](), self._num_batches
        for row in rows:
            first = self._first_request(row)
            waiting[first.number] = (
                self._journal.append(MapJournalLine(b=first)),
                budget_to_reserve(first),
            )
            self._recorded.failed.pop(int.from_bytes(row.digest, "big"), None)
        sent = BatchUploadIntentLine(
            part, f"{self._map_id}-{part}", len(rows), time.time(), self._api.provider
        )
        self._journal.append(MapJournalLine(w=sent))
        self._num_batches += 1
        batch = self._batches[part] = UnfinishedBatch(sent, waiting)
        return batch

    def _first_request(self, row: BatchQuestion) -> QuestionStartedLine:
        return QuestionStartedLine(
            self._journal.assign_question_number(row.number),
            row.row,
            round(time.perf_counter() - self._began, 3),
            digest_to_base64(row.digest),
            row.question,
            row.context,
            row.most.tokens - row.max_output_tokens,
            row.max_output_tokens,
            None if self._price is None else round(row.most.cost, 12),
        )

    async def _create(self, batch: UnfinishedBatch, lines: list[bytes]) -> None:
        """Upload a batch to the provider, and record the id that the provider gives it.

        If the provider's reply is lost, search for the batch, because the upload may have
        succeeded.
        """
        sent, failed = batch.sent, 0
        while not batch.id and not self._halted.is_set():
            try:
                batch.id = await self._api.create(sent.key, lines)
            except ModelError as error:
                if (
                    isinstance(error, RequestRefusedError)
                    and not error.needs_key
                    and not error.transient
                ):
                    self._give_up(batch, str(error))
                    return
                failed += 1
                if not error.transient or failed >= _MAX_ATTEMPTS:
                    self._stop(f"a batch could not be uploaded: {error}", error)
                    return
                await self._pause(2.0**failed)
                if not isinstance(error, Unreachable | RateLimited):
                    await self._find(batch)
        self._record_acceptance(batch)

    async def _find(self, batch: UnfinishedBatch) -> None:
        """Search the provider for a batch whose upload was interrupted.

        If it is found, its id is set.
        """
        sent = batch.sent
        found = await self._call_with_retries(
            lambda: self._api.possible_batch_ids(sent.key, sent.num, sent.at), "the list of batches"
        )
        for id in found or ():
            if id in self._recorded.batch_ids:
                continue
            if await self._is_ours(id, sent.key):
                batch.id = id
                return

    async def _is_ours(self, id: str, key: str) -> bool:
        """Return True if a batch at the provider was uploaded by this map.

        An upload is recognized by its ``key``. If the provider does not know yet, it is asked again
        until it does. Returns False if the map is stopped first.
        """
        waited = 0
        while not self._halted.is_set():
            is_ours = await self._call_with_retries(
                lambda: self._api.is_from_upload_key(id, key), f"batch {id}"
            )
            if is_ours is not None:
                return is_ours
            await self._pause(_wait_s(waited))
            waited += 1
        return False

    def _record_acceptance(self, batch: UnfinishedBatch) -> None:
        if batch.id:
            self._recorded.batch_ids.add(batch.id)
            self._journal.append(MapJournalLine(u=BatchAcceptedLine(batch.sent.part, batch.id)))

    def _give_up(self, batch: UnfinishedBatch, why: str) -> None:
        """Record that the provider refused a whole batch, and stop the map.

        The rows of the batch count as not asked.
        """
        self._end(batch, why, why)
        self._on_stop(why, "failed")
        self.stop_waiting()

    # --- what is collected ------------------------------------------------------------------------

    async def _collect(self, part: int) -> None:
        batch = self._batches[part]
        if not batch.id:
            await self._find_or_create(batch)
        waited = 0
        while batch.id and not self._halted.is_set():
            state = await self._call_with_retries(
                lambda: self._api.state(batch.id), f"batch {batch.id}", is_patient=True
            )
            if state is None:
                return
            self._show(batch, state)
            if state.is_ended:
                await self._take_all(batch, state)
                return
            await self._pause(_wait_s(waited))
            waited += 1

    async def _find_or_create(self, batch: UnfinishedBatch) -> None:
        """Use a batch at the provider if an earlier process has already uploaded it.

        Otherwise upload it now.
        """
        await self._find(batch)
        if batch.id:
            self._record_acceptance(batch)
            return
        if self._halted.is_set():
            return
        lines = list[bytes]()
        for number, (offset, _) in batch.waiting.items():
            first = self._read_started_line(offset)
            body = self._api.request_body(self._request(first.question, first.context))
            lines.append(self._api.format_upload_line(f"{batch.sent.key}-{number}", body))
        await self._create(batch, lines)

    async def _take_all(self, batch: UnfinishedBatch, state: BatchState) -> None:
        if state.problem:
            why = f"{self.provider_name} refused batch {batch.id}: {state.problem}"
            self._give_up(batch, why)
            return
        found = _Collected()
        what = f"the results of batch {batch.id}"
        if await self._call_with_retries(lambda: self._download(batch, state, found), what) is None:
            return
        num = len(batch.waiting) + found.num_cancelled
        self._end(batch, state.status, f"batch {batch.id} has no result for it")
        if found.cause is not None:
            self._stop(str(found.cause), found.cause)
        elif found.num_cancelled or (num and state.status == "cancelled"):
            self._on_stop(
                f"batch {batch.id} was cancelled at {self.provider_name} before {num:,} "
                "of its rows "
                "were answered, which are now in no batch",
                "suspended",
            )
            self.stop_waiting()

    async def _download(self, batch: UnfinishedBatch, state: BatchState, found: _Collected) -> bool:
        num = 0
        async with contextlib.aclosing(self._api.results(state)) as results:
            async for result in results:
                await self._record_result(batch, result, found)
                num += 1
                if num % _BREATH == 0:
                    await asyncio.sleep(0)
        return True

    async def _record_result(
        self, batch: UnfinishedBatch, result: BatchRequestResult, found: _Collected
    ) -> None:
        """Record one result of a downloaded batch: the reply or the error for a question.

        A result that is already recorded is ignored, because a repeated download contains it again.
        """
        # The custom id is KEY-NUMBER. An unknown one must not stop the other results.
        key, _, digits = result.custom_id.rpartition("-")
        number = int(digits) if digits.isascii() and digits.isdigit() else -1
        if key != batch.sent.key or number not in batch.waiting:
            return
        first = self._read_started_line(batch.waiting[number][0])
        request = self._request(first.question, first.context)
        try:
            reply = await self._api.decode_result(result, request)
        except ModelError as error:
            self._record_row_error(batch, first, result, error, found)
            return
        reply = self._calls.complete_usage_and_cost(reply, request, self._price)
        offset = self._journal.append(
            MapJournalLine(
                r=DirectReplyRecord(
                    number,
                    0,
                    reply.message.content,
                    reply.finish,
                    compact_usage(reply.usage),
                    None if reply.cost is None else round(reply.cost, 12),
                    0.0,
                    reply.message.reasoning,
                )
            )
        )
        self._calls.budget.settle(batch.waiting.pop(number)[1], reply.usage, reply.cost)
        digest = digest_to_int(first.digest)
        self._recorded.open.pop(digest, None)
        self._recorded.answered[digest] = offset
        self.ended.add(number)

    def _record_row_error(
        self,
        batch: UnfinishedBatch,
        first: QuestionStartedLine,
        result: BatchRequestResult,
        error: ModelError,
        found: _Collected,
    ) -> None:
        """Record that the provider returned an error for a question of a batch.

        The row is asked again in a later batch, unless it has failed for good.
        """
        if isinstance(error, RequestRefusedError):
            self._client.adapt_to_refusal(error)
            if error.needs_key:
                found.cause = error
        if result.kind == "cancelled":
            found.num_cancelled += 1
        may_return = error.transient or error is found.cause
        self._record_missing_result(batch, first, error, may_return=may_return)

    def _record_missing_result(
        self,
        batch: UnfinishedBatch,
        first: QuestionStartedLine,
        error: ModelError,
        *,
        may_return: bool,
    ) -> None:
        number, digest = first.number, digest_to_int(first.digest)
        amount = batch.waiting.pop(number)[1]
        cost, counts = None, tuple[int, ...]()
        if error.may_be_paid:
            usage = self._request(first.question, first.context).max_usage()
            cost, counts = first.cost, compact_usage(usage)
            self._calls.budget.settle(amount, usage, cost)
        else:
            self._calls.budget.release(amount)
        self._journal.append(
            MapJournalLine(x=FailedRequestLine(number, 0, str(error), counts, cost))
        )
        self._tries[number] = self._tries.get(number, 0) + 1
        if may_return and self._tries[number] < _MAX_TRIES:
            self._recorded.open[digest] = UnfinishedQuestion(number)
            return
        del self._tries[number]
        end = QuestionEndedRecord(number, Stop.ERROR, None, str(error), (), 0, None, 0.0)
        self.failed[digest] = self._journal.append(MapJournalLine(e=end))
        self._recorded.open.pop(digest, None)
        self.ended.add(number)

    def _end(self, batch: UnfinishedBatch, status: str, why: str) -> None:
        """Record in the map's journal that a batch has ended.

        Each row without a result counts as a failed attempt and may be asked again.
        """
        error = ServerStatusError(why)
        for offset, _ in list(batch.waiting.values()):
            self._record_missing_result(
                batch, self._read_started_line(offset), error, may_return=True
            )
        self._journal.append(MapJournalLine(v=BatchEndedLine(batch.sent.part, status)))
        del self._batches[batch.sent.part]

    # --- requests to the provider -----------------------------------------------------------------

    async def _call_with_retries(
        self, ask: Callable[[], Awaitable[_Value]], what: str, *, is_patient: bool = False
    ) -> _Value | None:
        """Call the provider's API, and try again after errors that may be temporary.

        The call is ``ask()``, and its result is returned. Returns None if the map is stopped first.
        If ``is_patient``, network failures are retried without limit.
        """
        failed = 0
        while not self._halted.is_set():
            try:
                return await ask()
            except ModelError as error:
                failed += 1
                if not error.transient or (failed >= _MAX_ATTEMPTS and not is_patient):
                    self._stop(f"{what} cannot be read: {error}", error)
                    return None
                _log.info("batch_retry", f"{what}: {error}; trying again")
                await self._pause(min(2.0**failed, _LONGEST_WAIT_S))
        return None

    def _stop(self, reason: str, error: ModelError) -> None:
        self._on_stop(reason, "suspended" if is_fixable_by_user(error) else "failed")
        self.stop_waiting()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._halted.wait()

    def _show(self, batch: UnfinishedBatch, state: BatchState) -> None:
        num_left = sum(len(each.waiting) for each in self._batches.values())
        num = len(self.ended) + state.num_done
        self._progress.set_progress(
            num, f"{batch.id} {state.status}, {num_left:,} rows at {self.provider_name}"
        )

    # --- what the journal has ---------------------------------------------------------------------

    def _read_started_line(self, offset: int) -> QuestionStartedLine:
        first = self._journal.line_at(offset).b
        assert first is not None
        return first

    def _request(self, question: str | None, context: Any) -> Request:
        text = self._asking.text if question is None else question
        return self._calls.first_request(self._asking.make_question(text, context))


class _Collected(msgspec.Struct):
    """Problems found among the results of one downloaded batch of questions."""

    num_cancelled: int = 0
    cause: RequestRefusedError | None = None
    """The error that explains refused rows if a person can fix its cause, such as a used-up quota;
    otherwise None."""


def batch_client(calls: DirectModelCaller) -> BatchCapableClient:
    """Return the client of a map's model, which must support a batch API.

    Raises ConfigError if the client does not support a batch API.
    """
    client = calls.client
    if not isinstance(client, BatchCapableClient):
        raise ConfigError(
            f"{client.name}: batches are not supported for this model: use a model of openai or "
            "anthropic, or ask without a batch"
        )
    return client


async def _gather_or_cancel(*works: Coroutine[Any, Any, None]) -> None:
    """Run several coroutines concurrently until all of them are done.

    If one of them fails, cancel the others.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _wait_s(waited: int) -> float:
    """Return how many seconds to wait before asking for the state of a batch again.

    ``waited`` is the number of earlier waits.
    """
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 1.5 ** min(waited, 20))
