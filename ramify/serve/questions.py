"""The questions that a server answers: who may begin one, within which budget, and how each ends.

    ask ──> room? ──> budget of the key held ──> run ──> answer, or left early: cancelled ──> budget settled, counted
It knows nothing of HTTP: a ``RequestRejected`` says which status a refusal has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ramify.clients.base import Sampling
from ramify.engine.limits import DEFAULT_MAX_COST
from ramify.engine.rlm import RLM
from ramify.engine.typed import answer_type
from ramify.errors import ConfigError
from ramify.serve.answer import ServedAnswer, answer_of, failure_of, length_note
from ramify.serve.answer_request import AnswerRequest
from ramify.serve.keys import ApiCaller, ApiKeys, BudgetHold
from ramify.serve.prompt import RunPrompt
from ramify.serve.request_watcher import RequestWatcher
from ramify.serve.server_metrics import ServerMetrics
from ramify.serve.web import RequestRejected


class ServedQuestion:
    """One question that is being answered."""

    def __init__(self, wanted: AnswerRequest, held: BudgetHold) -> None:
        self.wanted, self.held = wanted, held
        self.watch = RequestWatcher()

    async def answer(self) -> ServedAnswer:
        """Wait for it; cancelling this wait cancels the run. Raises Rejected where the run
        failed."""
        running = self.watch.running
        assert running is not None
        try:
            result = await self.watch.result()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RequestRejected(
                "the server ended before the run did", status=503, run=running.id
            ) from None
        except Exception as error:
            raise failure_of(error, str(error) or type(error).__name__, running.id) from error
        if (
            self.held.is_short
            and result.answer is None
            and not result.usage.calls
            and result.stop.is_truncated()
        ):
            raise RequestRejected(
                "what is left of this key's budget is too little for a request: ask whoever runs "
                "the server for more",
                status=429,
                code="insufficient_quota",
                kind="insufficient_quota",
                run=running.id,
            )
        return answer_of(result, self.wanted)


class ServedQuestions:
    """All questions of one server."""

    def __init__(
        self, rlm: RLM, keys: ApiKeys, metrics: ServerMetrics, max_runs: int, sampling: Sampling
    ) -> None:
        self._rlm, self._keys, self._metrics = rlm, keys, metrics
        self._max_runs, self._sampling = max_runs, sampling
        self._present: set[ServedQuestion] = set()
        self._idle = asyncio.Event()
        self.is_ending = False
        self._most_cost: float | None = None
        """Dollars that one run may cost; None where the models have no prices."""

    @property
    def num_present(self) -> int:
        """Questions that are being answered."""
        return len(self._present)

    async def prepare(self) -> int:
        """Models and sandbox, before anybody asks; the smallest window, in tokens. Raises
        ConfigError where a budget cannot be kept."""
        clients = await self._rlm.prepare()
        unpriced = [client.name for client in clients if client.price is None]
        if not unpriced:
            limit = self._rlm.limits.max_cost
            self._most_cost = DEFAULT_MAX_COST if limit is None else limit
        for caller in self._keys.callers.values():
            if unpriced and caller.key.max_cost is not None:
                raise ConfigError(
                    f"key '{caller.name}': max-cost cannot be kept, since {', '.join(unpriced)} "
                    "has no known price: use "
                    "max-tokens, or add it to a price file (RAMIFY_PRICES)"
                )
        return min(client.window for client in clients)

    @asynccontextmanager
    async def ask(
        self, caller: ApiCaller, wanted: AnswerRequest, prompt: RunPrompt
    ) -> AsyncIterator[ServedQuestion]:
        """Begin to answer; cancelled where the block is left early. Raises Rejected."""
        if self.is_ending:
            raise RequestRejected(
                "the server is ending: ask again soon", status=503, retry_after_s=5
            )
        if self.num_present >= self._max_runs:
            raise RequestRejected(
                f"{self.num_present} requests are being answered: come back",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        one = ServedQuestion(wanted, self._held(caller, wanted))
        self._present.add(one)
        try:
            self._keys.save()
            self._start(one, caller, prompt)
            yield one
        finally:
            await one.watch.stop()
            self._present.discard(one)
            self._idle.set()
            self._settle(one, caller)

    def _held(self, caller: ApiCaller, wanted: AnswerRequest) -> BudgetHold:
        tighter = wanted.own.tighter()
        if tighter.max_cost is not None and self._most_cost is None:
            raise RequestRejected(
                "the server's model has no known price", param="ramify.limits.max_cost"
            )
        return caller.hold(tighter.within(self._rlm.limits, self._most_cost))

    def _start(self, one: ServedQuestion, caller: ApiCaller, prompt: RunPrompt) -> None:
        wanted = one.wanted
        question = prompt.question + length_note(wanted.max_tokens)
        given = (question, None) if prompt.context is None else (prompt.context, question)
        try:
            kind = wanted.offer or answer_type(wanted.schema, trusted=False)
        except ConfigError as error:
            raise RequestRejected(str(error), param=wanted.schema_field) from None
        try:
            running = self._rlm.start(
                *given,
                answer_type=kind,
                cite=wanted.own.cite,
                limits=one.held.limits,
                on_event=one.watch.apply,
                sampling=wanted.sampling(self._sampling),
                metadata={"served": {"key": caller.name}},
            )
        except ConfigError as error:
            raise RequestRejected(
                str(error), param="ramify.cite" if wanted.own.cite else None
            ) from None
        one.watch.begin(running)

    def _settle(self, one: ServedQuestion, caller: ApiCaller) -> None:
        running = one.watch.running
        if running is None:
            caller.release(one.held)
        else:
            run = running.recorder.trajectory
            caller.settle(one.held, run.usage, run.cost)
            self._metrics.run(str(run.stop or "error"), run.usage, run.cost, run.seconds)
        self._keys.save()

    # --- the end
    # -----------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float, last_s: float) -> None:
        """Take no more; let runs end for ``grace_s``, then ask them for their last word and wait
        ``last_s``."""
        self.is_ending = True
        if not await self._is_idle_within(grace_s):
            for one in self._present:
                if one.watch.running is not None:
                    one.watch.running.wrap_up()
            await self._is_idle_within(last_s)

    async def close(self) -> None:
        """Cancel what still goes on."""
        self.is_ending = True
        for one in tuple(self._present):
            await one.watch.stop()

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._present:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
