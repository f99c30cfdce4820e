"""Answer the questions that a server receives.

Each request is admitted, part of its key's budget is reserved, the run is started, and its actual
usage is charged.

    capacity? ──> body ──> hold budget ──> run ──> answer, or cancel if the client leaves
                                                     └──> settle budget, count metrics

Only the model can count the tokens of its final answer. So ``max_tokens`` is stated in the
question, and a longer answer is cut at four characters per token, an estimate that needs no
tokenizer. HTTP is handled by ``recursive_run_server.py``, and the format of a response by
``chat_completions.py`` and ``responses_api.py``. A ``RequestRejected`` carries the HTTP status for
a rejection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import DEFAULT_MAX_COST
from ramify.engine.question import RunOptions
from ramify.engine.rlm import RLM
from ramify.engine.run_handle import RunHandle
from ramify.engine.run_result import Result, why_unanswered
from ramify.engine.typed_answers import to_answer_schema
from ramify.errors import (
    ConfigError,
    ModelError,
    RamifyError,
    ReplayDiverged,
    ReplyFiltered,
    RunInUse,
)
from ramify.http_server.rejections import RequestRejected
from ramify.serve.answer_request import AnswerRequest, ProgressTextCollector
from ramify.serve.api_keys import ApiClientAccount, BudgetHold, ServerApiKeys
from ramify.serve.client_function_tools import ClientToolCalls, RequestedToolCall, new_call_id
from ramify.serve.conversation_to_question import QuestionAndContext
from ramify.serve.server_metrics import ServerMetrics
from ramify.serve.unfinished_runs import UnfinishedRunMarkers
from ramify.types.message import Usage, escape_surrogates
from ramify.types.trajectory import Stop

_CHARS_PER_TOKEN = 4


class ServedAnswer(msgspec.Struct, frozen=True):
    """The answer to one request, independent of the API in which it will be sent."""

    text: str
    finish: Literal["stop", "length", "tool_calls", "content_filter"]
    """Finish reason, such as ``length`` if a limit cut the answer short."""
    usage: Usage
    """Tokens and calls of the whole run, including its recursive calls."""
    about: dict[str, Any]
    """Content of the response's ``ramify`` field."""
    calls: tuple[tuple[str, RequestedToolCall], ...] = ()
    """Id and call of each requested client function. If there are any, the text is empty."""


def max_length_instruction(max_tokens: int | None) -> str:
    """Return a note that tells the model how long its answer may be.

    It is empty if the request has no ``max_tokens``.
    """
    return f"\n\n(The answer may have at most {max_tokens} tokens.)" if max_tokens else ""


def build_served_answer(result: Result, request: AnswerRequest) -> ServedAnswer:
    """Convert a run's result to the answer that the server sends.

    Raises RequestRejected if the run was suspended, or ended without an answer.
    """
    if result.stop is Stop.SUSPENDED:
        raise suspended_run_error(f"suspended: {result.error}", result.run_id)
    if result.stop is Stop.CANCELLED and result.answer is None:
        raise suspended_run_error("the server stopped before the run had an answer", result.run_id)
    is_filtered = isinstance(result.failure, ReplyFiltered) and result.answer is None
    if result.stop is Stop.ERROR and result.answer is None and not is_filtered:
        raise failed_run_error(result.failure, result.error, result.run_id)
    is_words = result.stop is Stop.NO_CODE and result.answer is None
    if is_words and not result.partial:
        failure = result.failure or ModelError(why_unanswered(result))
        raise failed_run_error(failure, str(failure), result.run_id)
    called = result.answer if isinstance(result.answer, ClientToolCalls) else None
    shown = result.partial if is_words else result.response
    text, was_cut = (
        _cut_answer(escape_surrogates(shown), request) if called is None else ("", False)
    )
    is_partial = result.stop.is_truncated() or result.stop is Stop.ERROR or is_words
    about: dict[str, Any] = {
        "run": result.run_id,
        "stop": str(result.stop),
        "cost": result.cost,
        "seconds": result.trajectory.seconds,
        "calls": result.usage.calls,
        "unknown_calls": result.usage.unknown_calls,
        "depth": result.trajectory.depth,
        "error": result.error,
        "cut": was_cut,
    }
    if request.ramify.cite:
        about["citations"] = result.citations
    if called is not None:
        return ServedAnswer(
            "",
            "tool_calls",
            result.usage,
            about,
            tuple((new_call_id(), call) for call in called.tool_calls),
        )
    if is_filtered:
        return ServedAnswer("", "content_filter", result.usage, about)
    return ServedAnswer(text, "length" if is_partial or was_cut else "stop", result.usage, about)


def suspended_run_error(why: str, run: str) -> RequestRejected:
    """Return the error response for a suspended run, which the client can resume."""
    return RequestRejected(
        f"{why}: once the server is back, send the request again with ramify.resume={run!r}, which "
        "pays for no reply twice",
        status=503,
        code="run_suspended",
        run=run,
    )


def failed_run_error(failure: BaseException | None, error: str | None, run: str) -> RequestRejected:
    """Return the error response for a run that failed."""
    text = error or "the run gave no answer"
    if isinstance(failure, ModelError):
        return RequestRejected(
            f"the model failed: {text} (run {run})", status=502, code="model_failed", run=run
        )
    known = isinstance(failure, RamifyError) or failure is None
    return RequestRejected(
        f"{text if known else 'internal error'} (run {run})",
        status=502 if known else 500,
        code="run_failed",
        run=run,
    )


def _cut_answer(text: str, request: AnswerRequest) -> tuple[str, bool]:
    """Cut an answer at the request's first stop sequence and at its maximum length.

    Returns the remaining text, and True if the answer was longer than the maximum length.
    """
    ends = [at for at in (text.find(stop) for stop in request.stops if stop) if at >= 0]
    text = text[: min(ends)] if ends else text
    most = len(text) if request.max_tokens is None else request.max_tokens * _CHARS_PER_TOKEN
    return text[:most], len(text) > most


class ServedQuestion:
    """A question that the server is answering, and the budget reserved for its run."""

    def __init__(self, request: AnswerRequest, hold: BudgetHold) -> None:
        self.request = request
        self.hold = hold
        self.watch = ProgressTextCollector()
        self.paid_tokens = 0
        """Tokens of a continued run that were charged earlier."""
        self.paid_cost = 0.0

    async def answer(self) -> ServedAnswer:
        """Wait for the run to end and return its answer.

        Cancelling this call cancels the run.

        Raises RequestRejected if the run failed.
        """
        running = self.watch.running
        assert running is not None
        try:
            result = await self.watch.result()
        except asyncio.CancelledError:
            # This task's own cancellation is passed on. Otherwise the server has cancelled the run.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise suspended_run_error(
                "the server stopped before the run had an answer", running.id
            ) from None
        except Exception as error:
            raise failed_run_error(error, str(error) or type(error).__name__, running.id) from error
        if (
            self.hold.is_short
            and result.answer is None
            and not result.usage.calls
            and result.stop.is_truncated()
        ):
            raise RequestRejected(
                "the rest of this key's budget is too small for a request: ask the server's "
                "operator for more",
                status=429,
                code="insufficient_quota",
                kind="insufficient_quota",
                run=running.id,
            )
        return build_served_answer(result, self.request)


class ActiveQuestions:
    """The questions that a server is answering at the moment, up to a maximum number."""

    def __init__(
        self,
        rlm: RLM,
        keys: ServerApiKeys,
        metrics: ServerMetrics,
        max_runs: int,
        sampling: Sampling,
    ) -> None:
        self._rlm = rlm
        self._keys = keys
        self._metrics = metrics
        self._max_runs = max_runs
        self._sampling = sampling
        self._active: set[ServedQuestion] = set()
        self._num_admitted = 0
        self.unfinished = UnfinishedRunMarkers(rlm.store)
        self._idle = asyncio.Event()
        self.is_ending = False
        self._most_cost: float | None = None
        """Maximum cost of one run in dollars; None if the price of a model is unknown."""

    @property
    def num_active(self) -> int:
        """The number of requests that the server is answering.

        It includes requests whose body is still arriving.
        """
        return self._num_admitted

    async def prepare_models(self) -> int:
        """Get the models and the sandbox ready before the first question arrives.

        Returns the smallest context window of the models, in tokens.

        Raises ConfigError if a key has a budget in dollars but a model has no known price.
        """
        clients = await self._rlm.prepare()
        unpriced = [client.name for client in clients if client.price is None]
        if not unpriced:
            limit = self._rlm.limits.max_cost
            self._most_cost = DEFAULT_MAX_COST if limit is None else limit
        for caller in self._keys.callers.values():
            if unpriced and caller.key.max_cost is not None:
                raise ConfigError(
                    f"key '{caller.name}': max-cost cannot be enforced, because "
                    f"{', '.join(unpriced)} has no known price: use max-tokens, or add the price "
                    "to a price file (RAMIFY_PRICES)"
                )
        return min(client.window for client in clients)

    @contextmanager
    def admit_request(self, caller: ApiClientAccount) -> Iterator[None]:
        """Admit a caller's request, and count it as in progress until the ``with`` block ends.

        The block begins before the body is read, and ends when the response has been sent.

        Raises RequestRejected if the server is stopping, or if the server or the key has too many
        requests in progress.
        """
        self._refuse_if_ending()
        if self._num_admitted >= self._max_runs:
            raise RequestRejected(
                f"{self._num_admitted} requests are in progress: try again later",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        caller.count_request_start()
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1
            caller.count_request_end()
            self._idle.set()

    def _refuse_if_ending(self) -> None:
        if self.is_ending:
            raise RequestRejected(
                "the server is shutting down: try again later", status=503, retry_after_s=5
            )

    @asynccontextmanager
    async def ask(
        self, caller: ApiClientAccount, request: AnswerRequest, prompt: QuestionAndContext
    ) -> AsyncIterator[ServedQuestion]:
        """Start a run that answers an admitted request.

        Leaving the block early cancels the run.

        Raises RequestRejected if the server is stopping, or the key's budget is spent.
        """
        self._refuse_if_ending()
        served = ServedQuestion(request, self._hold_budget(caller, request))
        self._active.add(served)
        try:
            self._keys.save_spending()
            self._start(served, caller, prompt)
            yield served
        finally:
            await served.watch.cancel_run()
            self._active.discard(served)
            self._settle(served, caller)

    def _hold_budget(self, caller: ApiClientAccount, request: AnswerRequest) -> BudgetHold:
        tighter = request.ramify.limit_overrides()
        if tighter.max_cost is not None and self._most_cost is None:
            raise RequestRejected(
                "the server's model has no known price: max_cost cannot be enforced",
                param="ramify.limits.max_cost",
            )
        return caller.reserve_budget(tighter.apply_to_limits(self._rlm.limits, self._most_cost))

    def _start(
        self, served: ServedQuestion, caller: ApiClientAccount, prompt: QuestionAndContext
    ) -> None:
        request = served.request
        question = prompt.question + max_length_instruction(request.max_tokens)
        context, query = (question, None) if prompt.context is None else (prompt.context, question)
        try:
            kind = request.offer or (
                None if request.schema is None else to_answer_schema(request.schema, trusted=False)
            )
        except ConfigError as error:
            raise RequestRejected(str(error), param=request.schema_field) from None
        options = RunOptions(
            answer_type=kind,
            limits=served.hold.limits,
            on_event=served.watch.add_event,
            sampling=request.merged_sampling(self._sampling),
        )
        try:
            if request.ramify.resume:
                running = self._resume_run(served, caller, options)
            else:
                running = self._rlm.start(
                    context,
                    query,
                    options,
                    cite=request.ramify.cite,
                    metadata={"served": {"key": caller.name}},
                )
        except ConfigError as error:
            raise RequestRejected(
                str(error), param="ramify.cite" if request.ramify.cite else None
            ) from None
        self.unfinished.mark_started(running.id)
        served.watch.begin(running)

    def _resume_run(
        self, served: ServedQuestion, caller: ApiClientAccount, options: RunOptions
    ) -> RunHandle:
        run = served.request.ramify.resume
        recorded = self.unfinished.run_to_continue(run, caller.name)
        served.paid_tokens = recorded.usage.total_tokens
        served.paid_cost = recorded.cost or 0.0
        try:
            return self._rlm.restart(run, options)
        except (ReplayDiverged, RunInUse) as error:
            raise RequestRejected(str(error), status=409, param="ramify.resume") from None

    def _settle(self, served: ServedQuestion, caller: ApiClientAccount) -> None:
        running = served.watch.running
        if running is None:
            caller.release(served.hold)
        else:
            run = running.recorder.trajectory
            is_left = run.answer is None and (self.is_ending or run.stop is Stop.SUSPENDED)
            if not is_left:
                self.unfinished.unmark_run(running.id)
            tokens = run.usage.total_tokens - served.paid_tokens
            caller.settle(served.hold, max(0, tokens), max(0.0, (run.cost or 0) - served.paid_cost))
            self._metrics.count_run(str(run.stop or "error"), run.usage, run.cost, run.seconds)
        self._keys.save_spending()

    # --- shutdown

    async def drain(self, grace_s: float, last_s: float) -> None:
        """Reject new questions and wait until the current ones have been answered.

        Runs get ``grace_s`` seconds to end. Then they are asked to finish with their best answer,
        and get ``last_s`` more seconds.
        """
        self.is_ending = True
        if not await self._is_idle_within(grace_s):
            for served in self._active:
                if served.watch.running is not None:
                    served.watch.running.wrap_up()
            await self._is_idle_within(last_s)

    async def close(self) -> None:
        """Cancel all runs that are in progress."""
        self.is_ending = True
        for served in tuple(self._active):
            await served.watch.cancel_run()

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._num_admitted:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
