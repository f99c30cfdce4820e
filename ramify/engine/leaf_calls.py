"""Let a strategy (code that answers a question itself) ask a model many small questions.

Each question becomes one recorded plain model call, a "leaf call".

    strategy ── ask_all(leaves) ──> call 0.0, 0.1, 0.2, … of kind "leaf" ──> outcomes, in order
                                    at most two for each slot of the limiter begin at once

Leaf calls are budgeted, limited, retried, journalled and resumed like the sub-calls of a session.
Their ids follow the order in which they are given, so a repeated run finds their replies again.
Each strategy decides which leaf calls a question needs (see ``answer_strategies.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

import msgspec

from ramify.clients.base import Client, Sampling
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.limits import BudgetAmount, Limits
from ramify.engine.live_call import LiveCall
from ramify.engine.plain_call import MAX_REPAIRS
from ramify.engine.question import Question
from ramify.engine.recorded_plain_call import ask_plain
from ramify.engine.replayed_plain_call import repeat_plain
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.typed_answers import AnswerSchema
from ramify.errors import ReplayDiverged
from ramify.types.trajectory import CallSite, Stop

_BEGUN_PER_SLOT = 2
"""Leaf calls (model calls on one part of a text) started at once, per request allowed in flight:
one runs, one waits."""


class LeafRequest(msgspec.Struct, frozen=True):
    """A strategy's request to a model: one small question, its token limit and its answer type."""

    label: str
    """Short description of the question, shown to readers of the run: ``label lines 1-120``."""
    prompt: str
    kind: AnswerSchema | None
    """Type of the answer; None for text."""
    max_tokens: int
    """Maximum tokens of the reply, without hidden reasoning."""
    max_repairs: int = MAX_REPAIRS
    """How often the question is asked again after a reply that does not match ``kind``."""


class LeafModelCaller:
    """Asks a model the small questions of a strategy.

    Each question is one recorded plain model call, called a leaf call.
    """

    def __init__(
        self,
        run: SharedRunState,
        root: LiveCall,
        question: Question,
        rest: BudgetAmount | None = None,
    ) -> None:
        """Prepare to ask questions as child calls of ``root``.

        ``rest`` is the remaining budget if session code started the strategy, and None otherwise.
        With ``rest``, ``root`` is recorded only when the first leaf call begins.
        """
        self.question = question
        self.has_begun = rest is None
        """True once ``root`` is recorded."""
        self._run = run
        self._root = root
        self._rest = rest
        self._step = -1

    @property
    def client(self) -> Client:
        return self._run.models.plain

    @property
    def run_limits(self) -> Limits:
        return self._run.setup.limits

    @property
    def is_started_by_session(self) -> bool:
        """True if code in a session started the strategy, and False if it answers the run's
        question."""
        return self._rest is not None

    @property
    def budget_limit(self) -> BudgetAmount:
        """The calls, tokens and dollars that the strategy may use.

        They are capped by any budget that several runs share.
        """
        if self._rest is not None:
            return self._rest
        own = self._run.requests.ledger
        return own.limit if own.shared is None else own.limit.least(own.shared.limit)

    @property
    def reasoning_token_allowance(self) -> int:
        """Maximum number of hidden reasoning tokens in one reply, on top of the request's
        ``max_tokens``."""
        return self._run.requests.lengths.reasoning_token_allowance(self.client)

    async def ask_all(self, leaves: Iterable[LeafRequest], num: int) -> list[CallOutcome]:
        """Ask ``num`` small questions concurrently, and return their outcomes in order.

        A question that fails or exceeds a limit yields an outcome with its error. Raises
        ReplayDiverged if a repeated run differs from its recording.
        """
        self._step += 1
        if num and not self.has_begun:
            self.has_begun = True
            self._run.begin_call(self._root)
            self._run.continue_past_recorded_limit(self._root)
        outcomes: list[CallOutcome] = [CallOutcome(Stop.CANCELLED)] * num
        waiting = iter(enumerate(leaves))
        most = min(num, _BEGUN_PER_SLOT * self.run_limits.max_concurrency)
        await _all_done(self._work(waiting, outcomes) for _ in range(most))
        for outcome in outcomes:
            if isinstance(outcome.failure, ReplayDiverged):
                raise outcome.failure
        return outcomes

    async def _work(
        self, waiting: Iterator[tuple[int, LeafRequest]], outcomes: list[CallOutcome]
    ) -> None:
        for index, leaf in waiting:
            outcomes[index] = await self._ask(leaf, self.client)

    async def ask(self, leaf: LeafRequest) -> CallOutcome:
        """Ask one question separately from ``ask_all``, and return the outcome.

        The model is that of the parent call. Raises ReplayDiverged if a repeated run differs from
        its recording.
        """
        outcome = await self._ask(leaf, self._root.client)
        if isinstance(outcome.failure, ReplayDiverged):
            raise outcome.failure
        return outcome

    async def _ask(self, leaf: LeafRequest, client: Client) -> CallOutcome:
        run, root = self._run, self._root
        where = CallSite(root.id, self._step, 0)
        id, depth = root.assign_child_id(), root.depth + 1
        call = LiveCall(id, "leaf", client, depth, leaf.label, parent=where)
        hidden = run.requests.lengths.reasoning_token_allowance(client)
        sampling = Sampling(max_tokens=leaf.max_tokens + hidden)
        repeated = repeat_plain(run, call, leaf.prompt, leaf.kind, sampling)
        if repeated is not None:
            await asyncio.sleep(0)  # a strategy may repeat a million leaves, and is not alone
            return repeated
        run.begin_call(call)
        outcome = CallOutcome(Stop.CANCELLED, error="cut off")
        try:
            outcome = await ask_plain(
                run,
                call,
                leaf.prompt,
                leaf.kind,
                sampling=sampling,
                max_repairs=leaf.max_repairs,
            )
            # The leaf that got this one's slot is sent first: the model works while this one is
            # recorded and the next one begins.
            await asyncio.sleep(0)
        finally:
            run.end_call(call, outcome)
        return outcome


async def _all_done(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait until all coroutines in ``works`` have finished.

    If one raises, cancel the others, wait for them, and raise its error.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
