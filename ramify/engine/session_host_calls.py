"""Answer the function calls that session code makes to its host.

These are questions to models, child calls with a separate Python session, and tool calls.

    llm_query_batched([p, q]) ─> CellHostCallHandler ─> two concurrent `lm` calls ─> ["…", "…"]
    rlm_query("…", part)      ─> CellHostCallHandler ─> a child with its session  ─> its answer

If a sub-call fails, the session raises ``SubcallError`` with all results once the rest of the batch
has ended. A reply that was truncated at its limit counts as failed, and its text is in
``SubcallError.partial``. The reply to a plain call is checked by ``plain_call.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client
from ramify.engine import observation_messages
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.leaf_calls import LeafModelCaller
from ramify.engine.limits import BudgetAmount
from ramify.engine.live_call import LiveCall
from ramify.engine.observation_messages import count_context_chars, plain_prompt
from ramify.engine.prompt_text import CHARS_PER_TOKEN
from ramify.engine.question import Question
from ramify.engine.recorded_plain_call import ask_plain
from ramify.engine.replayed_plain_call import repeat_plain
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.typed_answers import AnswerSchema, to_answer_schema
from ramify.errors import (
    ConfigError,
    EventLoopBlockedError,
    HostCallError,
    LimitReached,
    ModelError,
    RamifyError,
    ReplayDiverged,
    ReplyFiltered,
    ReplyTruncatedError,
    SandboxError,
    StoreError,
)
from ramify.sandbox.base import SharedContextValue
from ramify.types.event import ToolAnswered
from ramify.types.picture import InvalidPictureError, Picture
from ramify.types.trajectory import CallSite, Stop

RunChild = Callable[[LiveCall], Awaitable[CallOutcome]]
"""Function that runs a child call with a separate session from start to end."""
MAX_QUESTION_CHARS = 20_000
"""A prompt longer than this, given to a child without a context, becomes the child's context."""
MAX_PROMPTS = 10_000
"""Maximum number of prompts in one batch."""
_MOST_CHARS_PER_TOKEN = 5
"""Generous estimate of characters per token, for refusing prompts that cannot fit the context
window."""


class CellHostCallHandler:
    """Serves the host calls of one cell, a piece of code that a model runs in its Python session.

    It answers the calls that the code makes to models, child calls and tools.
    """

    def __init__(
        self,
        run: SharedRunState,
        call: LiveCall,
        turn: int,
        cell: int,
        run_child: RunChild,
        closed_by: Stop | None = None,
    ) -> None:
        """Create the handler of host calls for a cell that ``call`` runs in the given turn.

        If the run has already reached a limit, pass it as ``closed_by``. The cell can then no
        longer call a model.
        """
        self._run_child = run_child
        self._closed_by = closed_by
        self._run = run
        self._call = call
        self._where = CallSite(call.id, turn, cell)
        self._num_tool_calls = 0

    async def handle_host_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Answer one function call that the cell's code makes to the host.

        Raises HostCallError, which is raised in the cell, if there is no such function or its
        arguments are wrong.
        """
        functions: dict[str, Callable[..., Awaitable[Any]]] = {
            "llm_query_batched": self._llm_query_batched,
            "rlm_query_batched": self._rlm_query_batched,
            "budget": self._budget,
            "history": self._history,
            "tool": self._call_tool,
        }
        if name not in functions:
            raise HostCallError("NameError", f"the host has no function '{name[:100]}'")
        try:
            # A session may forge any arguments.
            inspect.signature(functions[name]).bind(*args, **kwargs)
        except TypeError as error:
            raise HostCallError("TypeError", f"{name}: {error}") from error
        return await functions[name](*args, **kwargs)

    # --- plain calls ------------------------------------------------------------------------------

    async def _llm_query_batched(
        self,
        prompts: list[str],
        model: str | None = None,
        schema: Any = None,
        images: list[Any] | None = None,
    ) -> list[Any]:
        with _arguments_of("llm_query_batched"):
            _check_texts(prompts)
            client = self._client(model, self._run.models.plain)
            given = self._pictures(images, len(prompts), client)
            self._check_room(len(prompts))
        # Checking a large schema takes a second, so it runs in a thread.
        kind = None if schema is None else await asyncio.to_thread(_schema_check, schema)
        calls = [self._sub_call("lm", client, prompt) for prompt in prompts]
        pictures = dict(zip((call.id for call in calls), given, strict=True))
        # The calls that a resumed run repeats come first, and need no task.
        repeated: list[CallOutcome] = []
        for call in calls:
            outcome = self._repeat_plain_call(call, call.question, kind, pictures[call.id])
            if outcome is None:
                break
            repeated.append(outcome)
        return await self._run_all(
            calls[len(repeated) :],
            lambda call: self._run_plain_call(call, call.question, kind, pictures[call.id]),
            before=repeated,
        )

    def _pictures(
        self, images: Any, num_prompts: int, client: Client
    ) -> Sequence[tuple[Picture, ...]]:
        """Return the pictures that session code attached to each prompt of a batch.

        Raises HostCallError if the model cannot read pictures, before anything is sent.
        """
        if images is None:
            return [()] * num_prompts
        if not isinstance(images, list):
            raise HostCallError(
                "TypeError", f"images must be a list or None, not {type(images).__name__}"
            )
        if len(images) != num_prompts:
            raise HostCallError(
                "ValueError",
                f"{num_prompts} prompts but {len(images)} lists of images; give one list for each "
                "prompt",
            )
        pictures = self._run.pictures
        if any(images) and self._is_blind(client):
            why = self._run.models.pictures_unsupported_message(client)
            data = _all_failed(num_prompts, why, "error")
            raise HostCallError("SubcallError", why, data)
        return [pictures.resolve_images(each, f"images[{i}]") for i, each in enumerate(images)]

    def _is_blind(self, client: Client) -> bool:
        """Return True if pictures must be withheld because the client's model cannot see them.

        In a repeated run, the record decides instead of the model, so that the cell repeats the
        calls that it made before.
        """
        recording = self._run.recording
        if recording is not None and recording.cell(*msgspec.structs.astuple(self._where)):
            return not recording.was_call_made_at(self._call.peek_child_id(), self._where)
        return self._run.models.can_read_pictures(client) is False

    async def _run_plain_call(
        self,
        call: LiveCall,
        prompt: str,
        kind: AnswerSchema | None,
        pictures: tuple[Picture, ...] = (),
    ) -> CallOutcome:
        repeated = self._repeat_plain_call(call, prompt, kind, pictures)
        if repeated is not None:
            return repeated
        self._run.begin_call(call)
        outcome = CallOutcome(Stop.CANCELLED, error="cut off")
        try:
            if why := self._does_not_fit(call, prompt):
                outcome = CallOutcome(Stop.ERROR, error=why)
            else:
                outcome = await ask_plain(self._run, call, prompt, kind, pictures=pictures)
        finally:
            self._run.end_call(call, outcome)
        return outcome

    def _repeat_plain_call(
        self, call: LiveCall, prompt: str, kind: AnswerSchema | None, pictures: tuple[Picture, ...]
    ) -> CallOutcome | None:
        return None if pictures else repeat_plain(self._run, call, prompt, kind)

    def _does_not_fit(self, call: LiveCall, prompt: str) -> str:
        """Return why a prompt is too long to be sent, or an empty string if it may be sent.

        A prompt that certainly exceeds the model's window is refused here, because some servers
        truncate it silently and charge for all of it.
        """
        run, window = self._run, call.client.window
        is_recorded = run.recording is not None and run.recording.request(call.id, 0) is not None
        if len(prompt) <= _MOST_CHARS_PER_TOKEN * window or is_recorded:
            return ""
        most = CHARS_PER_TOKEN * (window - min(window // 2, run.requests.sampling.max_tokens))
        return (
            f"the prompt has {len(prompt):,} characters, and "
            f"{run.models.model_description(call.client).alias} reads about {most:,} at once; "
            "cut it into parts"
        )

    # --- children ---------------------------------------------------------------------------------

    async def _rlm_query_batched(
        self, prompts: list[str], contexts: list[Any] | None = None, model: str | None = None
    ) -> list[Any]:
        depth = self._call.depth + 1
        deep = depth <= self._run.setup.limits.max_depth
        with _arguments_of("rlm_query_batched"):
            _check_texts(prompts)
            client = self._client(
                model, self._run.models.client_at_depth(depth) if deep else self._run.models.plain
            )
            self._check_room(len(prompts))
            given = contexts if contexts is not None else [None] * len(prompts)
            if not isinstance(given, list):
                raise HostCallError(
                    "TypeError", f"contexts must be a list or None, not {type(given).__name__}"
                )
            if len(given) != len(prompts):
                raise HostCallError(
                    "ValueError", f"{len(prompts)} prompts but {len(given)} contexts"
                )
            pairs = [
                self._question_and_context(prompt, value)
                for prompt, value in zip(prompts, given, strict=True)
            ]
        kind = "rlm" if deep else "lm"
        calls = [self._sub_call(kind, client, question, context) for question, context in pairs]
        for context in {
            id(context): context for _, context in pairs if context is not None
        }.values():
            if context is not self._call.context:
                await self._run.store_child_context(context)
        if not deep:
            return await self._run_all(calls, self._too_deep)
        slots = asyncio.Semaphore(self._run.setup.limits.max_children)
        return await self._run_all(calls, self._run_child, slots)

    def _question_and_context(
        self, prompt: str, value: Any
    ) -> tuple[str, SharedContextValue | None]:
        if value is not None:
            own = self._call.context
            try:
                has_files = own is not None and own.files
                return prompt, SharedContextValue(
                    own.resolve_text_references(value) if own and has_files else value
                )
            except (LookupError, SandboxError):  # a text that this session does not have
                raise HostCallError(
                    "ValueError", "contexts: a text in a file that is not in `context`"
                ) from None
        if len(prompt) > MAX_QUESTION_CHARS:
            return (
                f"{prompt[:500]} […] (this task is long: all of it is in `context`)",
                SharedContextValue(prompt),
            )
        return prompt, self._call.context

    async def _too_deep(self, call: LiveCall) -> CallOutcome:
        """Answer a child call at the depth limit with one plain model call instead of a session.

        Its prompt contains both the question and the context.
        """
        value = None if call.context is None else call.context.value
        max_chars = 3 * (call.client.window - self._run.requests.sampling.max_tokens)
        num_chars = count_context_chars(value)
        # A file-backed text may be larger than memory.
        prompt = plain_prompt(call.question, value) if num_chars <= max_chars else ""
        if (num_chars := max(num_chars, len(prompt))) > max_chars:
            return self._not_asked(
                call,
                f"the depth limit of {self._run.setup.limits.max_depth} is reached, so this "
                f"rlm_query is one plain call, and {num_chars:,} characters do not fit it "
                f"(about {max_chars:,} do); cut the context into parts",
            )
        try:
            pictures = self._context_pictures(call)
        except HostCallError as error:
            return self._not_asked(call, str(error))
        return await self._run_plain_call(call, prompt, None, pictures)

    def _context_pictures(self, call: LiveCall) -> tuple[Picture, ...]:
        """Return the pictures in the context of ``call``.

        Raises HostCallError if the call's model cannot read pictures.
        """
        run = self._run
        if call.context is None or not run.pictures.has_any:
            return ()
        pictures = run.pictures.context_pictures(call.context.value)
        if pictures and run.models.can_read_pictures(call.client) is False:
            raise HostCallError("ValueError", run.models.pictures_unsupported_message(call.client))
        return pictures

    def _not_asked(self, call: LiveCall, why: str) -> CallOutcome:
        """Record a call that failed before a request was sent, and return its outcome.

        ``why`` is the reason.
        """
        self._run.begin_call(call)
        outcome = CallOutcome(Stop.ERROR, error=why)
        self._run.end_call(call, outcome)
        return outcome

    # --- history and tools ------------------------------------------------------------------------

    async def _history(self, seen: int) -> list[dict[str, str]]:
        if type(seen) is not int:
            raise HostCallError(
                "TypeError", f"history: seen must be an int, not {type(seen).__name__}"
            )
        return [
            {"role": message.role, "content": message.content}
            for message in self._call.messages[seen:]
        ]

    async def _call_tool(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(name, str):
            raise HostCallError(
                "TypeError", f"the name of a tool must be a str, not {type(name).__name__}"
            )
        tools = self._run.tools_at(self._call.depth)
        if hasattr(tool := tools.functions.get(name), "strategy"):
            return await self._by_strategy(name, tool, args, kwargs)
        return await self._call_recorded(name, args, kwargs, tools.call)

    async def _by_strategy(
        self, name: str, tool: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Answer a cell's function call by running a strategy.

        A strategy asks models many small questions. They are recorded as children of a call that
        represents the strategy. This call has no turns, and is recorded only when the first
        question is asked.
        """
        run = self._run
        with _arguments_of(name):
            strategy = _create_strategy(tool, args, kwargs)
        # Its id is taken before anything is awaited: several threads of a cell may ask at once.
        id = self._call.assign_child_id() if strategy.may_call_model else self._call.peek_child_id()
        depth = self._call.depth + 1
        call = LiveCall(id, "strategy", run.models.plain, depth, strategy.title, parent=self._where)
        context = None if self._call.context is None else self._call.context.value
        question = Question(strategy.question or self._call.question, context)
        calls = LeafModelCaller(run, call, question, self._rest_for(call))
        outcome = CallOutcome(Stop.CANCELLED, error="cut off")
        try:
            outcome = await _run_strategy(strategy, calls)
        finally:
            if calls.has_begun:
                run.end_call(call, outcome)
        if isinstance(outcome.failure, ReplayDiverged | HostCallError):
            raise outcome.failure
        if outcome.stop is not Stop.FINAL:
            why = _prefix_with_name(strategy.title, outcome.error or str(outcome.stop))
            kind = "limit" if outcome.stop.is_truncated() else failure_kind(outcome)
            failures = {"failures": {0: why}, "kinds": {0: kind}}
            raise HostCallError("SubcallError", why, {"results": [outcome.answer], **failures})
        return {
            "answer": outcome.answer,
            "note": outcome.error or "",
            "has_asked": calls.has_begun,
            "is_parts": strategy.is_parts_list,
        }

    def _rest_for(self, call: LiveCall) -> BudgetAmount:
        """Return the calls, tokens and dollars left for a strategy that this cell starts.

        A strategy is a series of model calls. In a replayed cell, a recorded strategy gets the
        run's full limit, because its replies come from the record. Any other strategy in that cell
        gets nothing.
        """
        recording, ledger = self._run.recording, self._run.requests.ledger
        if recording is not None and recording.was_call_made_at(call.id, self._where):
            return ledger.limit
        is_repeated = recording is not None and recording.cell(
            *msgspec.structs.astuple(self._where)
        )
        if self._closed_by is not None or is_repeated:
            return BudgetAmount()
        left = ledger.limit.minus(ledger.spent).minus(ledger.outstanding).minus(ledger.held)
        return left._replace(calls=ledger.calls_left())

    async def _budget(self) -> dict[str, int | float]:
        """Return how much of each of the call's limits is left.

        The numbers are recorded like the result of a tool, because a repeated cell must get the
        same ones.
        """

        async def left(*_: Any) -> dict[str, int | float]:
            return self._run.remaining_budget(self._call)

        answer: dict[str, int | float] = await self._call_recorded("budget", (), {}, left)
        return answer

    async def _call_recorded(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]],
    ) -> Any:
        """Call a tool for session code, and record the result.

        If the run is being repeated, return the recorded result instead.
        """
        import hashlib

        ordinal, self._num_tool_calls = self._num_tool_calls, self._num_tool_calls + 1
        with _arguments_of(name):
            arguments = repr((name, args, sorted(kwargs.items()))).encode()
            digest = hashlib.sha256(arguments).hexdigest()[:32]
        where = (self._where.call, self._where.turn, self._where.cell, ordinal)
        run = self._run
        if run.recording is not None:
            recorded = run.recording.recorded_tool_result(*where, digest)
            if recorded is not None:
                return self._tool_outcome(
                    where, name, digest, recorded.result, recorded.error, recorded.seconds
                )
        began = run.recorder.elapsed_s()
        try:
            result = run.pictures.replace_tool_pictures(await call(name, args, kwargs))
            packed, error = SharedContextValue(result).to_jsonable(), None
        except HostCallError as failure:
            packed, error = None, f"{failure.kind}: {failure}"
        except InvalidPictureError as failure:
            packed, error = None, f"ValueError: {name} returned a picture that {failure}"
        except SandboxError as failure:  # the tool returned a value that no session can hold
            packed, error = None, f"TypeError: {name}: {failure}"
        return self._tool_outcome(
            where, name, digest, packed, error, round(run.recorder.elapsed_s() - began, 6)
        )

    def _tool_outcome(
        self,
        where: tuple[str, int, int, int],
        name: str,
        arguments_hash: str,
        packed: Any,
        error: str | None,
        seconds: float,
    ) -> Any:
        call, turn, cell, ordinal = where
        self._run.recorder.emit(
            ToolAnswered(
                at_s=self._run.recorder.elapsed_s(),
                call=call,
                turn=turn,
                cell=cell,
                ordinal=ordinal,
                name=name,
                arguments_hash=arguments_hash,
                result=packed,
                error=error,
                seconds=seconds,
            )
        )
        if error is not None:
            kind, _, text = error.partition(": ")
            raise HostCallError(kind, text)
        return SharedContextValue.from_jsonable(packed)

    def _sub_call(
        self, kind: Any, client: Client, question: str, context: SharedContextValue | None = None
    ) -> LiveCall:
        depth = self._call.depth + 1
        return LiveCall(
            self._call.assign_child_id(),
            kind,
            client,
            depth,
            question,
            parent=self._where,
            context=context,
        )

    def _client(self, model: str | None, default: Client) -> Client:
        if model is None:
            return default
        if not isinstance(model, str):
            raise HostCallError(
                "TypeError",
                f"model must be the name of a model or None, not {type(model).__name__}",
            )
        client = self._run.models.find_by_name(model)
        if client is None:
            known = ", ".join(sorted(client.name for client in self._run.models.all))
            raise HostCallError(
                "SubcallError", observation_messages.NO_MODEL.format(name=model[:200], known=known)
            )
        return client

    def _check_room(self, num: int) -> None:
        """Raise HostCallError if fewer than ``num`` calls are left within the run's limit.

        A repeated cell may make exactly the calls that it made before.
        """
        recording, limit = self._run.recording, self._run.requests.ledger.limit.calls
        left = self._run.requests.ledger.calls_left()
        if recording is not None and recording.cell(*msgspec.structs.astuple(self._where)):
            left = num if recording.was_call_made_at(self._call.peek_child_id(), self._where) else 0
        if self._closed_by is not None:
            why = f"the run's limit is reached ({self._closed_by}): no more calls can be made"
        elif num > max(left, 1):
            why = (
                f"{num} calls, but {left} of the run's {limit} are left: none was made; ask for "
                f"{left} at most"
            )
        else:
            return
        raise HostCallError("SubcallError", why, _all_failed(num, why, "limit"))

    async def _run_all(
        self,
        calls: list[LiveCall],
        run: Callable[[LiveCall], Awaitable[CallOutcome]],
        slots: contextlib.AbstractAsyncContextManager[Any] | None = None,
        before: Sequence[CallOutcome] = (),
    ) -> list[Any]:
        """Run a batch of calls concurrently and return their answers in order.

        If any call fails, raise SubcallError with the answers that did arrive.

        ``slots`` limits how many of the calls run at the same time. ``before`` holds the outcomes
        of earlier calls of the batch, which precede the new ones.
        """
        new = await asyncio.gather(*(_run_catching(run, call, slots) for call in calls))
        outcomes = [*before, *new]
        failures = {
            index: outcome.error
            for index, outcome in enumerate(outcomes)
            if outcome.error is not None
        }
        # A divergence from the recording ends the run: it is not an error that a cell may catch.
        fatal = next((o.failure for o in outcomes if isinstance(o.failure, ReplayDiverged)), None)
        if fatal is not None:
            raise fatal
        results = [
            None if index in failures else outcome.answer for index, outcome in enumerate(outcomes)
        ]
        if failures:
            first = next(iter(failures.values()))
            message = (
                first
                if len(outcomes) == 1
                else f"{len(failures)} of {len(outcomes)} sub-calls failed; the first: {first}"
            )
            kinds = {index: failure_kind(outcomes[index]) for index in failures}
            data: dict[str, Any] = {"results": results, "failures": failures, "kinds": kinds}
            partial = {i: text for i, o in enumerate(outcomes) if (text := _partial_answer(o))}
            if partial:
                data["partial"] = partial
                message = f"{message}; what arrived is in .partial of this error"
            raise HostCallError("SubcallError", str(message), data)
        return results


def _create_strategy(tool: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Create the strategy that answers a session's call of ``tool``.

    A strategy is a series of small model calls. Raises HostCallError if the tool rejects the
    arguments.
    """
    try:
        return tool.strategy(*args, **kwargs)
    except ConfigError as error:
        raise HostCallError("ValueError", str(error)) from error


async def _run_strategy(strategy: Any, calls: LeafModelCaller) -> CallOutcome:
    """Run a strategy that session code asked for, and return its outcome.

    If the strategy cannot use the arguments that the code passed, the outcome's failure is the
    error to raise in the cell.
    """
    try:
        outcome: CallOutcome = await strategy(calls)
        return outcome
    except ReplayDiverged as error:
        return CallOutcome(Stop.ERROR, error=str(error), failure=error)
    except ConfigError as error:
        mistake = HostCallError("ValueError", _prefix_with_name(strategy.title, str(error)))
        return CallOutcome(Stop.ERROR, error=str(mistake), failure=mistake)
    except RamifyError as error:
        if isinstance(error, StoreError | EventLoopBlockedError):
            raise
        return CallOutcome(Stop.ERROR, error=str(error), failure=error)
    except Exception as error:  # noqa: BLE001 -- values of a session can fail in arbitrary ways
        text = f"{strategy.title}: the value cannot be used ({type(error).__name__}: {error})"
        mistake = HostCallError("TypeError", text[:1000])
        return CallOutcome(Stop.ERROR, error=str(mistake), failure=mistake)


def _prefix_with_name(title: str, text: str) -> str:
    return text if text.startswith(title) else f"{title}: {text}"


def _all_failed(num: int, why: str, kind: str) -> dict[str, Any]:
    """Return the data of a SubcallError for a batch of ``num`` calls of which none was made."""
    numbers = range(num)
    failures, kinds = dict.fromkeys(numbers, why), dict.fromkeys(numbers, kind)
    return {"results": [None] * num, "failures": failures, "kinds": kinds}


def _partial_answer(outcome: CallOutcome) -> str:
    """Return the incomplete answer of a failed sub-call.

    It is the text of a truncated reply, or the text of the call's last message.
    """
    return (
        outcome.failure.text
        if isinstance(outcome.failure, ReplyTruncatedError)
        else outcome.partial
    )


def failure_kind(outcome: CallOutcome) -> str:
    """Return the kind of a sub-call's failure, such as ``"length"``, for ``SubcallError.kinds``.

    Another kind is ``"refusal"``.
    """
    match outcome.failure:
        case ReplyTruncatedError():
            return "length"
        case ReplyFiltered(is_refusal=is_refusal):
            return "refusal" if is_refusal else "content_filter"
        case LimitReached():
            return "limit"
        case ModelError(transient=True):
            return "unavailable"
        case _:
            return "error"


async def _run_catching(
    run: Callable[[LiveCall], Awaitable[CallOutcome]],
    call: LiveCall,
    slots: contextlib.AbstractAsyncContextManager[Any] | None,
) -> CallOutcome:
    """Run one call of a batch, and convert any failure to an outcome.

    A failure is returned as an outcome instead of being raised, so that the other calls continue.
    """
    try:
        async with slots or contextlib.nullcontext():
            return await run(call)
    except (LimitReached, ModelError, SandboxError, ReplayDiverged) as error:
        return CallOutcome(Stop.ERROR, error=str(error), failure=error)


def _check_texts(prompts: Any) -> None:
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise HostCallError("TypeError", "prompts must be a list of str")
    if len(prompts) > MAX_PROMPTS:
        raise HostCallError(
            "ValueError", f"{len(prompts):,} prompts at once: give at most {MAX_PROMPTS:,}"
        )


@contextlib.contextmanager
def _arguments_of(name: str) -> Iterator[None]:
    """Raise errors about the arguments of host function ``name`` in the session code that called
    it.

    Session code chose the arguments, so they must not make the run itself fail.
    """
    try:
        yield
    except (SandboxError, TypeError) as error:  # SandboxError: a context that no session can hold
        raise HostCallError("TypeError", f"{name}: {error}") from error
    except (ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise HostCallError("ValueError", f"{name}: {type(error).__name__}: {error}") from error


def _schema_check(schema: Any) -> AnswerSchema:
    """Convert the JSON schema that session code passed to a checker of answers.

    Raises HostCallError if the schema, which is untrusted, cannot be used.
    """
    if not isinstance(schema, dict):
        raise HostCallError(
            "TypeError",
            f"schema must be a dict (a JSON schema) or None, not {type(schema).__name__}",
        )
    try:
        kind = to_answer_schema(schema, trusted=False)
        msgspec.json.encode(schema)  # as the request will encode it
    except ConfigError as error:
        raise HostCallError("ValueError", str(error)) from error
    except Exception as error:  # a schema can fail in arbitrary ways, which is the cell's error
        raise HostCallError(
            "ValueError", f"schema: it cannot be used ({type(error).__name__}: {error})"
        ) from error
    return kind
