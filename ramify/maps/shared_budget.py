"""A budget and a rate limit shared by all workers of a map, even across machines.

    worker: RemoteBudget ── submit(reservations, settlements) ──> MapBudgetActor: one small actor
                         <── granted, refused ─────────────────── one ledger, one limiter, a record

A reservation is granted by the same ``BudgetLedger`` and the same ``AdaptiveConcurrencyLimiter``
that a single process uses, so the limits are not exceeded by even one call, and requests in flight
are counted over all workers. A worker sends everything that accumulated while its last message was
in transit, so the number of messages does not grow with the number of requests.

A worker answers a part of the rows in an *attempt*. An attempt is given up if nothing was heard
from it for ``SILENT_S`` seconds, or if another attempt at its part begins: what it had reserved
then counts as spent, and its replies count as paid again. What is spent or reserved is recorded on
disk before a reservation is granted, so a map that is killed continues with the rest of its budget.
``ray_row_partition.py`` divides the rows into parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from ramify.clients.rate_limited_requests import AdaptiveConcurrencyLimiter
from ramify.engine.limits import BudgetAmount, BudgetLedger, Limits
from ramify.errors import LimitReached, RamifyError, RunInUse
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

SILENT_S = 30.0
"""Seconds without a message after which an attempt counts as lost."""
_BEAT_S = 5.0
_POLL_S = 1.0
_RECORD_BYTES = 1024
_TAKE_OVER_S = 60.0
"""Seconds to wait for an earlier invocation of the map to end."""
UNLIMITED = 10**15
"""Number of calls, tokens or dollars that is practically infinite. It is the limit of a ledger if
another ledger enforces the real limits."""

Operation = tuple[Any, ...]
"""One of ("reserve", ticket, amount), ("settle", amount, usage, cost), ("free", amount) and
("charge", usage, cost)."""
Granted = tuple[int, tuple[str, str] | None]
"""Decision on a reservation: (ticket, None) if it is granted, or (ticket, (reason, reached limit))
if it is refused."""


class MapRowCounts(msgspec.Struct, frozen=True):
    """The number of a map's rows with each outcome: answered, failed or not asked.

    They are the rows of one or more parts of the map.
    """

    answered: int = 0
    failed: int = 0
    missing: int = 0
    """Number of rows about which no question was asked."""
    asked: int = 0
    """Number of questions that this invocation of the map asked."""
    known: int = 0
    """Number of rows whose answer was already known."""

    def __add__(self, other: MapRowCounts) -> MapRowCounts:
        return MapRowCounts(
            self.answered + other.answered,
            self.failed + other.failed,
            self.missing + other.missing,
            self.asked + other.asked,
            self.known + other.known,
        )


class TableMapSpending(msgspec.Struct, frozen=True):
    """What a map on a Ray cluster has spent, as stored on disk.

    A restarted map continues with the rest of its budget.
    """

    usage: Usage = Usage()
    """Usage so far, in which each reserved request counts with its upper bound."""
    cost: float | None = None
    """Cost in dollars, or None if no model has a price."""
    unwritten: int = 0
    """Number of replies in parts that are not written yet."""
    answered: int = 0
    """Number of rows with an answer in the finished parts."""
    failed: int = 0
    """Number of rows with an error in the finished parts."""


class RayMapStatus(msgspec.Struct, frozen=True):
    """The status of a map on a Ray cluster, such as its spending and finished rows.

    It contains the reason to stop, if there is one.
    """

    usage: Usage
    cost: float | None
    counts: MapRowCounts
    num_paid_again: int
    stop: str
    """``done``, or the reason why no more rows are started."""
    reason: str


class _Attempt:
    """The attempt of one worker to answer one part of the rows."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.reserved = BudgetAmount()
        self.num_replies = 0
        """Number of replies that were paid for but are not written yet."""
        self.outbox: list[Granted] = []
        self.ready = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.heard_s = time.monotonic()
        self.round = 0
        """Round of the rate limiter in which the attempt's last request was granted."""


class MapBudgetActor:
    """The budget and the rate limit that all workers of a map share.

    It also counts finished rows. It is a Ray actor with a single event loop.
    """

    def __init__(
        self,
        limits: Limits,
        max_in_flight: int,
        *,
        is_priced: bool,
        record: str = "",
        counts_again: bool = False,
        silent_s: float = SILENT_S,
    ) -> None:
        """Create the budget that all workers of a map share.

        ``record`` is the file that stores the spending of all invocations of the map; it is empty
        if nothing is stored. With ``counts_again``, the row counts start at 0, because all parts
        will be written again. Raises RunInUse if another process has the file open.
        """
        self._fd = _open_record(record) if record else -1
        before = (read_spending(record) if record else None) or TableMapSpending()
        if counts_again:
            before = msgspec.structs.replace(before, answered=0, failed=0)
        self._ledger = BudgetLedger(limits, priced=is_priced, owner="map")
        if before.usage.calls:
            self._ledger.charge(before.usage, before.cost)
        self._gate = AdaptiveConcurrencyLimiter(max_in_flight)
        self._attempts: dict[str, _Attempt] = {}
        self._parts: dict[str, str] = {}
        """Name of a part of the rows -> id of the latest attempt to answer the part."""
        self._unwritten: dict[str, tuple[int, MapRowCounts, bool]] = {}
        """Name of a part that is answered but not yet written -> (number of replies, row counts,
        True if questions were asked about all of its rows)."""
        self._counts = MapRowCounts(before.answered, before.failed)
        self._finished = TableMapSpending(answered=before.answered, failed=before.failed)
        self._num_paid_again = before.unwritten
        self._stop, self._reason = "done", ""
        self._silent_s = silent_s
        self._paused_until_s = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def begin_part_attempt(self, attempt: str, part: str) -> str:
        """Register a worker's attempt to answer a part of the rows.

        Returns an empty string, or the reason if the map is stopping.
        """
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_attempts())
        earlier = self._parts.get(part)
        if earlier in self._attempts:
            self._give_up_attempt(earlier)
        if part in self._unwritten:
            num_replies, counts, _ = self._unwritten.pop(part)
            self._num_paid_again += num_replies
            self._counts = _subtract_counts(self._counts, counts)
        if self._stop == "done":
            self._parts[part] = attempt
            self._attempts[attempt] = _Attempt(part)
        return self._reason

    async def apply_operations(
        self, attempt: str, operations: list[Operation], pause_remaining_s: float = 0.0
    ) -> tuple[list[Granted], str]:
        """Apply a worker's reservations, settlements and charges to the map's budget, in order.

        ``pause_remaining_s`` is the number of seconds for which a rate limit still makes this
        worker wait. Returns the decisions on reservations so far, and the reason if the map is
        stopping.
        """
        found = self._attempts.get(attempt)
        if found is None:
            raise RamifyError(f"attempt {attempt} timed out: its worker stopped reporting")
        found.heard_s = time.monotonic()
        self._pause_workers(found, pause_remaining_s)
        reserves = False
        for kind, *given in operations:
            if kind == "reserve":
                reserves = True
                # A reservation may have to wait, and must not delay the operations after it.
                task = asyncio.create_task(self._grant(found, *given))
                found.tasks.add(task)
                task.add_done_callback(found.tasks.discard)
            elif kind == "settle":
                self._settle(found, *given)
            elif kind == "free":
                (amount,) = given
                found.reserved = found.reserved.minus(amount)
                self._ledger.release(amount)
                self._gate.release()
            else:
                self._ledger.charge(*given)
        if reserves:
            await asyncio.sleep(0)  # Reservations that fit are granted before the answer is sent.
        return self._take_grants(found), self._reason

    async def wait_for_decisions(self, attempt: str) -> tuple[list[Granted], str]:
        """Wait up to a second for decisions on a worker's budget reservations.

        Returns the decided reservations, and the reason if the map is stopping.
        """
        found = self._attempts.get(attempt)
        if found is None:
            raise RamifyError(f"attempt {attempt} timed out: its worker stopped reporting")
        found.heard_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(found.ready.wait(), _POLL_S)
        found.heard_s = time.monotonic()
        return self._take_grants(found), self._reason

    async def end_part_attempt(self, attempt: str, counts: MapRowCounts) -> None:
        """End a worker's attempt to answer a part of the rows.

        ``counts`` gives the part's rows by outcome, including rows that were not asked because the
        map stopped.
        """
        found = self._attempts.pop(attempt, None)
        if found is None:
            return
        for task in found.tasks:
            task.cancel()
        self._counts += counts
        # The sink writes the file later. Until then, a lost worker's replies would be paid again.
        self._unwritten[found.part] = (found.num_replies, counts, not counts.missing)
        self._write_spending()

    async def mark_written(self, part: str) -> None:
        """Record that the output file of a part is completely written."""
        found = self._unwritten.pop(part, None)
        if found is not None and found[2]:
            done, counts = self._finished, found[1]
            self._finished = TableMapSpending(
                answered=done.answered + counts.answered, failed=done.failed + counts.failed
            )
        self._write_spending()

    async def stop(self, stop: str, reason: str) -> None:
        """Stop the map, so that no worker starts another row."""
        if self._stop == "done":
            self._stop, self._reason = stop, reason

    async def state(self) -> RayMapStatus:
        ledger = self._ledger
        return RayMapStatus(
            ledger.usage, ledger.cost, self._counts, self._num_paid_again, self._stop, self._reason
        )

    # --- one attempt

    async def _grant(self, attempt: _Attempt, ticket: int, amount: BudgetAmount) -> None:
        refused: tuple[str, str] | None = None
        try:
            await self._ledger.reserve(amount)
        except LimitReached as error:
            refused = (str(error), str(error.stop))
        else:
            try:
                attempt.round = await self._gate.acquire()
            except BaseException:
                self._ledger.release(amount)
                raise
            attempt.reserved = attempt.reserved.plus(amount)
        attempt.outbox.append((ticket, refused))
        attempt.ready.set()

    def _settle(
        self, attempt: _Attempt, amount: BudgetAmount, usage: Usage, cost: float | None
    ) -> None:
        attempt.reserved = attempt.reserved.minus(amount)
        self._ledger.settle(amount, usage, cost)
        self._gate.release()
        if not usage.unknown_calls:
            attempt.num_replies += 1
            self._gate.speed_up()

    def _take_grants(self, attempt: _Attempt) -> list[Granted]:
        taken, attempt.outbox = attempt.outbox, []
        attempt.ready.clear()
        if taken:
            self._write_spending()
        return taken

    def _pause_workers(self, attempt: _Attempt, pause_remaining_s: float) -> None:
        """Pause all workers of the map if one worker's rate limit lasts longer than the current
        pause."""
        until_s = time.monotonic() + pause_remaining_s
        if pause_remaining_s > 0.05 and until_s > self._paused_until_s + 0.05:
            self._paused_until_s = until_s
            self._gate.slow_down(attempt.round, pause_remaining_s)

    def _give_up_attempt(self, name: str) -> None:
        """Abandon a worker's attempt that is considered lost.

        It is lost if the worker stopped reporting or another worker has begun the same part. Its
        reservations count as spent.
        """
        attempt = self._attempts.pop(name)
        for task in attempt.tasks:
            task.cancel()
        self._num_paid_again += attempt.num_replies
        reserved = attempt.reserved
        if reserved.calls:
            usage = Usage(0, reserved.tokens, calls=reserved.calls, unknown_calls=reserved.calls)
            cost = None if self._ledger.cost is None else reserved.cost
            self._ledger.settle(reserved, usage, cost)
            for _ in range(reserved.calls):
                self._gate.release()
        self._write_spending()

    async def _watch_attempts(self) -> None:
        while True:
            await asyncio.sleep(min(_BEAT_S, self._silent_s / 4))
            now_s = time.monotonic()
            for name, attempt in list(self._attempts.items()):
                if now_s - attempt.heard_s > self._silent_s:
                    self._give_up_attempt(name)

    def _write_spending(self) -> None:
        """Write the map's spending to its file on disk.

        This takes a single system call, so a killed process leaves either the old record or the new
        one.
        """
        if self._fd < 0:
            return
        ledger, more = self._ledger, self._ledger.outstanding
        usage = ledger.usage + Usage(0, more.tokens, calls=more.calls, unknown_calls=more.calls)
        record = TableMapSpending(
            usage,
            None if ledger.cost is None else ledger.cost + more.cost,
            sum(attempt.num_replies for attempt in self._attempts.values())
            + sum(num for num, _, _ in self._unwritten.values()),
            self._finished.answered,
            self._finished.failed,
        )
        os.pwrite(self._fd, msgspec.json.encode(record).ljust(_RECORD_BYTES - 1) + b"\n", 0)


def _subtract_counts(counts: MapRowCounts, other: MapRowCounts) -> MapRowCounts:
    return MapRowCounts(
        counts.answered - other.answered,
        counts.failed - other.failed,
        counts.missing - other.missing,
        counts.asked - other.asked,
        counts.known - other.known,
    )


def _open_record(path: str) -> int:
    """Open and lock the file that records a map's spending, and return its file descriptor.

    A locked file is retried for up to a minute, because a killed process may hold the lock for a
    few more seconds. Raises RunInUse if it stays locked.
    """
    import fcntl

    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    until_s = time.monotonic() + _TAKE_OVER_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(fd)
                raise RunInUse(
                    f"{path} is in use: the map is already running in another process"
                ) from None
            time.sleep(_POLL_S / 10)


def read_spending(path: str) -> TableMapSpending | None:
    """Read the spending of a map on a Ray cluster from a file.

    Returns None if the file is missing or not a valid record.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=TableMapSpending)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


Method = Literal["begin_part_attempt", "apply_operations", "wait_for_decisions", "end_part_attempt"]


class RemoteBudget(BudgetLedger):
    """A budget ledger that gives a worker access to the shared budget of its map.

    The worker uses it while it answers one part. Call ``begin_part_attempt`` first and
    ``end_part_attempt`` last.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        attempt: str,
        pause_remaining_s: Callable[[], float],
        on_stop: Callable[[str], None],
    ) -> None:
        """Connect one attempt of a worker to the shared budget of its map.

        ``call(method, …)`` calls a method of the ``MapBudgetActor`` actor. ``on_stop`` is called
        with the reason if the map stops.
        """
        limits = Limits(max_calls=UNLIMITED, max_tokens=UNLIMITED, max_cost=float(UNLIMITED))
        super().__init__(limits, priced=False, owner="map")
        self._call = call
        self._attempt = attempt
        self._paused_s = pause_remaining_s
        self._on_stop = on_stop
        self._tickets = itertools.count()
        self._asked: dict[int, tuple[BudgetAmount, asyncio.Future[tuple[str, str] | None]]] = {}
        self._operations: list[Operation] = []
        self._lost: RamifyError | None = None
        """Error to raise because the shared budget can no longer be reached, or None."""
        self._sender: asyncio.Task[None] | None = None
        self._waiter: asyncio.Task[None] | None = None
        self._beat: asyncio.Task[None] | None = None

    async def begin_part_attempt(self, part: str) -> str:
        """Register an attempt to answer ``part`` with the shared budget.

        Returns an empty string, or the reason if the map is stopping.
        """
        reason: str = await self._call("begin_part_attempt", self._attempt, part)
        if not reason:
            self._beat = asyncio.create_task(self._send_heartbeats())
        return reason

    async def end_part_attempt(self, counts: MapRowCounts) -> None:
        """Send the worker's remaining budget operations, and end its attempt."""
        await self.close()
        if self._operations:
            operations, self._operations = self._operations, []
            await self._call("apply_operations", self._attempt, operations, 0.0)
        await self._call("end_part_attempt", self._attempt, counts)

    async def close(self) -> None:
        """Stop the background tasks of the worker's attempt.

        Messages in transit arrive first.
        """
        if self._sender is not None:
            await asyncio.gather(self._sender, return_exceptions=True)
        for task in (self._beat, self._waiter):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def reserve(self, amount: BudgetAmount) -> None:
        if self._lost is not None:
            raise self._lost
        ticket = next(self._tickets)
        answer: asyncio.Future[tuple[str, str] | None]
        answer = asyncio.get_running_loop().create_future()
        self._asked[ticket] = (amount, answer)
        self._send(("reserve", ticket, amount))
        try:
            refused = await answer
        except asyncio.CancelledError:
            # If it is granted later, it is returned then (see ``_deliver``).
            if answer.done() and not answer.cancelled() and answer.result() is None:
                self.release(amount)
            raise
        if refused is not None:
            text, stop = refused
            raise LimitReached(text, Stop(stop))

    def settle(self, reserved: BudgetAmount, usage: Usage, cost: float | None) -> None:
        self._send(("settle", reserved, usage, cost))

    def release(self, reserved: BudgetAmount) -> None:
        self._send(("free", reserved))

    def charge(self, usage: Usage, cost: float | None, *, is_recorded: bool = False) -> None:
        self._send(("charge", usage, cost))

    def calls_left(self) -> int:
        return UNLIMITED

    def _send(self, operation: Operation) -> None:
        self._operations.append(operation)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # What the same pass of the event loop adds is sent together.
        while self._operations and self._lost is None:
            operations, self._operations = self._operations, []
            await self._exchange("apply_operations", self._attempt, operations, self._paused_s())
        if self._asked and (self._waiter is None or self._waiter.done()):
            self._waiter = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while self._asked and self._lost is None:
            await self._exchange("wait_for_decisions", self._attempt)

    async def _send_heartbeats(self) -> None:
        while self._lost is None:
            await asyncio.sleep(_BEAT_S)
            await self._exchange("apply_operations", self._attempt, [], self._paused_s())

    async def _exchange(self, method: Method, *given: Any) -> None:
        try:
            granted, reason = await self._call(method, *given)
        except Exception as error:  # noqa: BLE001 (Ray raises this class itself)
            why = str(error).strip().rpartition("\n")[2][:300]
            self._lost = RamifyError(f"the budget of the map cannot be reached: {why}")
            for _, answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(self._lost)
            self._asked.clear()
            return
        for ticket, refused in granted:
            self._deliver(ticket, refused)
        if reason:
            self._on_stop(reason)

    def _deliver(self, ticket: int, refused: tuple[str, str] | None) -> None:
        amount, answer = self._asked.pop(ticket)
        if not answer.done():
            answer.set_result(refused)
        elif refused is None:
            self.release(amount)
