"""How judges ask: through the pool of the rollouts, within a budget of their own, and on the tree.

    judge ── Ask(model, messages, sampling, place) ── cache? ── Pool.ask (gates, rate limits, retries) ──> Reply
                                                        └─ a call of kind ``judge`` under the call that it is about

The pool is the one that rollouts use, so that judges and rollouts give way to each other; the
ledger is the engine's, for all judges of a run. A call goes into the reading, and from there onto
the tree once the streams are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ramify.clients.base import Client, Request, Sampling
from ramify.clients.pool import ClientPool
from ramify.engine.limits import Ledger, Limits, ResourceAmount, bound
from ramify.engine.run_state import ReplyCache, prompt_hash
from ramify.errors import ConfigError, RamifyError
from ramify.train.signals.base import ModelCaller, Place, SignalScore
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Annotation, Call, Parent, Stop, Trajectory, Turn

POLICY = "policy"
"""As a judge's model: the policy that is learning."""
BUDGET = Limits(max_calls=10_000_000, max_tokens=1_000_000_000_000)
"""Of a run's judges, besides their dollars, which are bounded as any run's are."""
DECIMALS = 4
"""Of numbers on single tokens, as they are kept: there are many."""


class JudgeCallers:
    """Implements ``ModelCallerFactory``. Belongs to one event loop."""

    def __init__(
        self,
        pool: ClientPool,
        limits: Limits = BUDGET,
        *,
        own: Mapping[str, Client] | None = None,
        cache: ReplyCache | None = None,
    ) -> None:
        """``own`` maps names to clients that need not be connected: ``policy``."""
        self.pool, self._own, self._cache = pool, dict(own or {}), cache
        self.ledger = Ledger(limits, priced=True)

    def of(self, trajectory: Trajectory, signal: str, reading: SignalScore) -> ModelCaller:
        return _Asker(self, trajectory, signal, reading)

    async def ask(self, model: str, request: Request) -> tuple[str, Reply]:
        """(the client's name, its reply)."""
        client = self._own.get(model) or self.pool.client(model)
        digest = prompt_hash(client.name, request)
        kept = self._cache.get(digest) if self._cache is not None else None
        if kept is not None:
            return client.name, msgspec.structs.replace(
                kept, usage=Usage(), cost=None if kept.cost is None else 0.0
            )
        reply = await self.pool.ask(client, request, _JudgeBudget(self.ledger, client, request))
        if self._cache is not None:
            self._cache.put(digest, reply)
        return client.name, reply


class _Asker:
    """Implements ``ModelCaller`` for one trajectory and one signal."""

    def __init__(
        self, judges: JudgeCallers, trajectory: Trajectory, signal: str, reading: SignalScore
    ) -> None:
        self._judges, self._trajectory, self._signal, self._reading = (
            judges,
            trajectory,
            signal,
            reading,
        )

    async def __call__(
        self, model: str, messages: Sequence[Message], sampling: Sampling, about: Place
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
            parent=Parent(about[0], about[1], 0),
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


class _JudgeBudget:
    """Reserves for one request of a judge."""

    def __init__(self, ledger: Ledger, client: Client, request: Request) -> None:
        self._ledger, self._client = ledger, client
        self._most = request.max_usage()
        self._amount: ResourceAmount = bound(
            request.max_input_tokens(), request.sampling.max_tokens, client.price
        )

    async def reserve(self) -> None:
        await self._ledger.reserve(self._amount)

    def settle(self, usage: Usage, cost: float | None) -> None:
        self._ledger.settle(self._amount, usage, cost)

    def forfeit(self, error: str) -> None:
        self._ledger.settle(
            self._amount, self._most, self._amount.cost if self._client.price is not None else None
        )

    def release(self, error: str) -> None:
        self._ledger.free(self._amount)


def put_on_tree(trajectory: Trajectory, readings: Mapping[str, SignalScore]) -> None:
    """Add the judges' calls to ``trajectory``, each under the call that it is about, numbered after
    that one's children; and what each signal found as marks, by the signal's name: on turns, and a
    reward of its own on the root."""
    for signal, reading in readings.items():
        for call in reading.calls:
            assert call.parent is not None
            above = call.parent.call
            taken = [
                int(each.id.rpartition(".")[2])
                for each in trajectory.calls
                if _above(each.id) == above
            ]
            trajectory.calls.append(
                msgspec.structs.replace(call, id=f"{above}.{max(taken, default=-1) + 1}")
            )
            trajectory.usage += call.usage
            if call.cost is not None:
                trajectory.cost = (trajectory.cost or 0.0) + call.cost
        trajectory.marks += _marks(trajectory, signal, reading)


def _marks(trajectory: Trajectory, signal: str, reading: SignalScore) -> Iterator[Annotation]:
    """A number that is none stands in no file; the trajectory's errors tell of it."""
    if reading.outcome is not None and trajectory.calls and math.isfinite(reading.outcome):
        yield Annotation(signal, trajectory.root.id, values={signal: reading.outcome})
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
        mark = Annotation(
            signal,
            call,
            turn,
            values,
            {signal: shown} if shown else {},
            reading.notes.get(place, ""),
        )
        if mark.values or mark.text:
            yield mark


def _above(id: str) -> str:
    return id.rpartition(".")[0]
