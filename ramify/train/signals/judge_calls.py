"""Let judges call models through the same client pool as rollouts, but within a separate budget.

Each call is recorded in the rollout's tree.

    judge ── JudgeModelCaller(model, messages, sampling, turn) ── cached reply?
          ── RateLimitedClientPool.ask (gates, rate limits, retries) ──> Reply
          └─ a call of kind ``judge``, below the call that it is about

Judges and rollouts share one pool, so they also share its rate limits. One ledger counts the calls
of all judges of a run. A call is first stored in the signal's score. It is added to the tree only
after the rollout's training data was extracted, so it is never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ramify.clients.base import Client, Request, Sampling
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import BudgetLedger, BudgetReservation, Limits
from ramify.engine.model_requests import request_hash
from ramify.errors import ConfigError, RamifyError
from ramify.store.reply_cache import ModelReplyCache
from ramify.train.signals.base import JudgeModelCaller, SignalScore, TurnId
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Call, CallSite, RunAnnotation, Stop, Trajectory, Turn

POLICY = "policy"
"""Model name by which a judge selects the policy being trained."""
BUDGET = Limits(max_calls=10_000_000, max_tokens=1_000_000_000_000)
"""Default limits on the calls and tokens of all judges of a run together. Their cost is limited to
``DEFAULT_MAX_COST`` dollars.
"""
DECIMALS = 4
"""Number of decimals of stored per-token numbers. Rounding saves space, because there are many of
them.
"""


class JudgeModelAccess:
    """Gives a run's judges access to models, within a shared budget and with a shared cache.

    Use it from one event loop only.
    """

    def __init__(
        self,
        pool: RateLimitedClientPool,
        limits: Limits = BUDGET,
        *,
        own: Mapping[str, Client] | None = None,
        cache: ModelReplyCache | None = None,
    ) -> None:
        """Set up the judges' access to models through ``pool``.

        ``own`` maps names of models that run in this process, such as ``policy``, to their clients.
        """
        self.pool = pool
        self._own = dict(own or {})
        self._cache = cache
        self.ledger = BudgetLedger(limits, priced=True)
        self.ledger.cost = None  # until a judge with a known price has replied

    def trajectory_caller(
        self, trajectory: Trajectory, signal: str, reading: SignalScore
    ) -> JudgeModelCaller:
        """Return a function through which one signal's judges ask models about ``trajectory``.

        It records its calls in ``reading``, the signal's score.
        """
        return _TrajectoryCaller(self, trajectory, signal, reading)

    async def ask(self, model: str, request: Request) -> tuple[str, Reply]:
        """Ask a model on behalf of a judge, and return the client's name and the model's reply.

        A cached reply costs nothing.
        """
        client = self._own.get(model) or self.pool.client(model)
        digest = request_hash(client.name, request)
        cached = self._cache.get(digest) if self._cache is not None else None
        if cached is not None:
            return client.name, msgspec.structs.replace(
                cached, usage=Usage(), cost=None if cached.cost is None else 0.0
            )
        reply = await self.pool.ask(
            client, request, JudgeRequestReservation(client, request, self.ledger)
        )
        if self._cache is not None:
            self._cache.put(digest, reply)
        return client.name, reply


class _TrajectoryCaller:
    """Asks models about one trajectory on behalf of one signal's judges, and records these calls.

    Implements ``JudgeModelCaller``.
    """

    def __init__(
        self, judges: JudgeModelAccess, trajectory: Trajectory, signal: str, reading: SignalScore
    ) -> None:
        self._judges = judges
        self._trajectory = trajectory
        self._signal = signal
        self._reading = reading

    async def __call__(
        self, model: str, messages: Sequence[Message], sampling: Sampling, about: TurnId
    ) -> Reply:
        request = Request(
            tuple(messages), sampling, affinity=f"{self._trajectory.id}/{self._signal}"
        )
        call = Call(
            "",
            "judge",
            model,
            self._trajectory.call(about[0]).depth + 1,
            f"{self._signal} of turn {about[1]}",
            parent=CallSite(about[0], about[1], 0),
        )
        self._reading.calls.append(call)
        try:
            call.model, reply = await self._judges.ask(model, request)
        except ConfigError:
            raise
        except RamifyError as error:
            call.stop, call.error = Stop.ERROR, str(error)
            self._reading.counts["unanswered"] = self._reading.counts.get("unanswered", 0.0) + 1
            raise
        call.turns.append(Turn(0, request.messages, reply))
        call.answer, call.stop = reply.message.content, Stop.FINAL
        call.usage, call.cost = reply.usage, reply.cost
        return reply


class JudgeRequestReservation:
    """A budget reservation for one judge's request to a model, in one or more ledgers.

    The worst case is reserved before the request is sent. The actual use is charged when the reply
    has arrived.
    """

    def __init__(self, client: Client, request: Request, *ledgers: BudgetLedger) -> None:
        most = Usage(
            request.max_input_tokens(), request.sampling.max_tokens, calls=1, unknown_calls=1
        )
        self._name = f"a request to {client.name}"
        self._reservations = [
            BudgetReservation(ledger, client.name, most, client.price) for ledger in ledgers
        ]

    async def reserve(self) -> None:
        for index, reservation in enumerate(self._reservations):
            try:
                await reservation.reserve()
            # All or nothing: a refused or cancelled request must not hold part of a budget.
            except BaseException:
                for earlier in self._reservations[:index]:
                    earlier.release()
                raise

    def is_still_valid(self) -> bool:
        enough = [each.confirm_or_release() for each in self._reservations]
        if all(enough):
            return True
        # One ledger is exhausted, so the other ledgers get their reservations back.
        for reservation, is_reserved in zip(self._reservations, enough, strict=True):
            if is_reserved:
                reservation.release()
        return False

    def settle(self, usage: Usage, cost: float | None) -> None:
        for reservation in self._reservations:
            reservation.settle(usage, cost, self._name)

    def charge_full_reservation(self, error: str) -> None:
        for reservation in self._reservations:
            reservation.settle(reservation.usage, reservation.cost, self._name)

    def release(self, error: str) -> None:
        for reservation in self._reservations:
            reservation.release()


def attach_signals_to_tree(trajectory: Trajectory, readings: Mapping[str, SignalScore]) -> None:
    """Add the judges' model calls and the signals' scores to a trajectory.

    Each judge call becomes the last child of the call that it judged. The numbers become
    annotations under the signal's name, on turns, and on the root as a separate reward.
    """
    for signal, reading in readings.items():
        for call in reading.calls:
            assert call.parent is not None
            parent = call.parent.call
            numbers = [
                int(other.id.rpartition(".")[2])
                for other in trajectory.calls
                if other.id.rpartition(".")[0] == parent
            ]
            trajectory.calls.append(
                msgspec.structs.replace(call, id=f"{parent}.{max(numbers, default=-1) + 1}")
            )
            trajectory.usage += call.usage
            if call.cost is not None:
                trajectory.cost = (trajectory.cost or 0.0) + call.cost
        trajectory.marks += _marks(trajectory, signal, reading)


def _marks(trajectory: Trajectory, signal: str, reading: SignalScore) -> Iterator[RunAnnotation]:
    """Yield the annotations that show one signal's scores in a trajectory.

    Numbers that are not finite are left out.
    """
    if reading.outcome is not None and trajectory.calls and math.isfinite(reading.outcome):
        yield RunAnnotation(signal, trajectory.root.id, values={signal: reading.outcome})
    for call, turn in dict.fromkeys([*reading.turns, *reading.tokens, *reading.notes]):
        place = (call, turn)
        values = {} if place not in reading.turns else {signal: reading.turns[place]}
        tokens = reading.tokens.get(place, [])
        if tokens and all(map(math.isfinite, tokens)):
            values["mean of its tokens"] = sum(tokens) / len(tokens)
        else:
            tokens = []
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        shown = [round(value, DECIMALS) for value in tokens]
        mark = RunAnnotation(
            signal,
            call,
            turn,
            values,
            {signal: shown} if shown else {},
            reading.notes.get(place, ""),
        )
        if mark.values or mark.text:
            yield mark
