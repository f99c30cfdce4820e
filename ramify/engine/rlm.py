"""The public API of the library: the class ``RLM``, which answers questions over inputs of any
size.

    rlm = RLM("openai:gpt-5-mini")
    result = rlm.completion(huge_text, "Which host failed first?")
    result.response, result.usage, result.cost, result.trajectory

    async with RLM(…) as rlm:
        async for event in rlm.stream(huge_text, "…"): …
        result = await rlm.acompletion(huge_text, "…")

    with rlm.conversation(huge_text) as c:      # one live session, several questions
        c.ask("How many errors?"); c.ask("And warnings?")

The loop of a call is in ``rlm_call.py``, the state that a tree of calls shares in
``shared_run_state.py``, and the prompts in ``prompt_scaffold.py``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ramify.clients.base import Client, Sampling
from ramify.engine import event_loop_thread, rerun
from ramify.engine.answer_strategies import recorded_strategy
from ramify.engine.branch_search import parse_search
from ramify.engine.event_recorder import EventRecorder, as_listeners, tracing
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.prompt_scaffold import Scaffold, scaffold_of, trained_policy_settings
from ramify.engine.prompt_text import parse_prompt_examples
from ramify.engine.question import (
    ModelSpec,
    RlmKeywordOptions,
    RunKeywordOptions,
    RunOptions,
    make_question,
    read_if_file,
)
from ramify.engine.resources import (
    DepthOptions,
    RefCountedLoopResources,
    RlmSetup,
    as_models,
    new_run_id,
    reply_cache,
    require_store,
)
from ramify.engine.run_result import Result, raise_if_failed, suspend_if_loop_blocked
from ramify.engine.tool_set import Tools, ToolSet
from ramify.errors import ConfigError
from ramify.sandbox.base import SandboxSpec, check_provider_exists, provider_spec

# What only a run needs is imported when the first one starts: half of this module's import time
# otherwise, and the first session is started meanwhile.
if TYPE_CHECKING:
    from ramify.clients.rate_limited_requests import RateLimitedClientPool
    from ramify.engine.calls_outside_runs import DirectModelCaller
    from ramify.engine.prompt_preview import FirstRequestPreview
    from ramify.engine.run_fork import RunForkCostEstimate, RunForkOptions
    from ramify.engine.run_handle import RunHandle
    from ramify.engine.user_conversation import UserConversation
    from ramify.store.base import RunStore
    from ramify.store.recorded_replies import RunEventIndex
    from ramify.types.event import AnyEvent

__all__ = ["RLM", "Result", "RunHandle"]


class RLM:
    """A recursive language model, which answers questions about inputs of any size.

    It lets a model write code that examines the input and calls further models.

    model          ``"provider:model"``, a ``Model`` or a client; a list gives one per depth
    scaffold       prompts and conventions: a name or a ``Scaffold``; by default the one that
                   the model was made for
    sandbox        where code runs
    tools          your functions and values, available in the session; functions run in this
                   process, with its permissions
    child_tools    tools of the children; by default ``tools``
    store          where runs are kept: a ``Store`` or ``MemoryStore``; by default nowhere
    depths         turns, scaffold and tools by depth (``DepthOptions``), if they differ
    branches       number of continuations of the root's first turn; the majority answer wins
    options        defaults of all questions, also as keywords: ``sub_model``, ``limits``,
                   ``sampling``, ``search`` and the other fields of ``RunOptions``
    """

    def __init__(
        self,
        model: ModelSpec | Sequence[ModelSpec],
        *,
        scaffold: Scaffold | str | None = None,
        sandbox: SandboxSpec | str | None = None,
        tools: Tools | None = None,
        child_tools: Tools | None = None,
        store: RunStore | None = None,
        branches: int = 1,
        depths: Sequence[DepthOptions] = (),
        options: RunOptions | None = None,
        **defaults: Unpack[RlmKeywordOptions],
    ) -> None:
        options = RunOptions().updated(options, defaults, RLM.__init__.__kwdefaults__ or ())
        limits = options.limits or Limits(**trained_policy_settings(model).limits)
        given_spec = SandboxSpec(sandbox) if isinstance(sandbox, str) else sandbox or SandboxSpec()
        _check_type("sandbox", given_spec, SandboxSpec, "SandboxSpec")
        if store is not None:
            from ramify.store.base import RunStore

            _check_type("store", store, RunStore, "Store")
        if not isinstance(branches, int):
            raise ConfigError(f"branches is a {type(branches).__name__}: give a number")
        if branches < 1 or (branches > 1 and options.search is not None):
            problem = (
                "a search was given too: give only one of them"
                if options.search is not None
                else "give 1 for no branching, or more"
            )
            raise ConfigError(f"branches is {branches}: {problem}")
        given = options.search if options.search is not None or branches == 1 else branches
        search = None if given is None else parse_search(given)
        check_provider_exists(given_spec)  # reports an unknown provider before any model is called
        spec = provider_spec(given_spec)
        tool_set = ToolSet(tools)
        self.store = store
        self._shared = RefCountedLoopResources(limits.max_concurrency, spec)
        setup = RlmSetup(
            as_models(model),
            () if options.sub_model is None else as_models(options.sub_model),
            limits,
            scaffold_of(scaffold, model),
            spec,
            options.sampling or Sampling(),
            tool_set,
            tool_set if child_tools is None else ToolSet(child_tools),
            None if store is None else store.blobs,
            scaffold is not None,
            search,
            tuple(depths),
            options.instructions,
            parse_prompt_examples(options.examples),
        )
        self._setup = msgspec.structs.replace(setup, config=setup.as_plain_data())
        self._options = msgspec.structs.replace(
            options,
            sub_model=None,
            limits=None,
            sampling=None,
            search=None,
            instructions="",
            examples=(),
        )
        """Default question options that are not part of ``setup``."""
        self._loop = event_loop_thread.SyncLoopResources(self._shared.pin, self._shared.unpin)

    @property
    def limits(self) -> Limits:
        return self._setup.limits

    @property
    def sandbox(self) -> SandboxSpec:
        return self._setup.sandbox

    async def prepare(self) -> list[Client]:
        """Connect to the models and open the sandbox now, and return the models' clients.

        Use it inside ``async with`` when a service starts, so that an invalid configuration is
        reported before the first request arrives. Raises ConfigError or SandboxError.
        """
        async with self._shared.use() as resources:
            resources.sandbox()
            return list((await self._setup.connect_models(resources)).all)

    @contextlib.asynccontextmanager
    async def pool(self) -> AsyncIterator[RateLimitedClientPool]:
        """During an ``async with`` block, provide the client pool that all runs of this RLM share.

        Other code that calls models, such as judges, can use it to share connections and rate
        limits.
        """
        async with self._shared.use() as resources:
            await self._setup.connect_models(resources)
            yield resources.pool

    @contextlib.asynccontextmanager
    async def direct_calls(
        self,
        shared: Limits | BudgetLedger,
        options: RunOptions | None = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> AsyncIterator[DirectModelCaller]:
        """During an ``async with`` block, provide plain model calls outside any run.

        It is meant for code that asks many small questions. ``shared`` limits the calls, tokens and
        dollars of all questions together. The limits of this RLM apply to each question.
        """
        from ramify.engine.calls_outside_runs import DirectModelCaller
        from ramify.engine.model_requests import check_prices_known

        chosen = self._options.updated(options, changes)
        async with self._shared.use() as resources:
            setup = self._setup.for_run(chosen)
            models = await setup.connect_models(resources)
            if isinstance(shared, Limits):
                check_prices_known(shared, models.all)
                is_priced = any(client.price is not None for client in models.all)
                shared = BudgetLedger(shared, priced=is_priced, owner="map")
            yield DirectModelCaller(setup, models, shared, chosen.mode)

    # --- questions --------------------------------------------------------------------------------

    def completion(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> Result:
        """Answer the question ``query`` about ``prompt``, and return the result.

        Without ``query``, ``prompt`` itself is the question. The prompt may be text, a dict or list
        of texts, any plain value, a DataFrame or another table, an array, a dataclass, a path, an
        open file, or the return value of ``load``.

        Options are given as keywords (``answer_type=int, cite=True``), as a ``RunOptions``, or
        both. Raises ConfigError for invalid input, and the error of the model or sandbox if that
        prevented an answer. Reaching a limit is not an error: see ``Result.stop``. Raises
        RunSuspendedError if the run is stored and a person can remove the cause.
        """
        again = self._resume_function(options, changes)
        return self._in_thread(self.acompletion(prompt, query, options, **changes), again)

    async def acompletion(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> Result:
        """Answer ``query`` about ``prompt`` like ``completion``, but on the caller's event loop.

        Cancelling this coroutine cancels all calls of the run.
        """
        again = self._resume_function(options, changes)
        prompt = await read_if_file(prompt)
        return raise_if_failed(await self.start(prompt, query, options, **changes), again)

    async def stream(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> AsyncIterator[AnyEvent]:
        """Start a run that answers a question, and yield its events as they happen.

        The last event is ``RunEnded``. If the caller stops iterating early, the run is cancelled.
        """
        running = self.start(await read_if_file(prompt), query, options, **changes)
        try:
            async for event in running.events():
                yield event
            raise_if_failed(await running, self._resume_function(options, changes))
        finally:
            running.cancel()

    def start(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> RunHandle:
        """Start a run in the background, and return a handle to it.

        Requires a running event loop.

        If the run fails, the result of the handle contains the error. Nothing is raised, unlike in
        ``completion``.
        """
        from ramify.engine.run_handle import RunHandle

        options = self._options.updated(options, changes)
        parsed = make_question(prompt, query, options.answer_type, options.cite)
        resolved = parsed.with_run_options(options)
        setup = self._setup.for_run(options).with_question_instructions(resolved)
        cache = reply_cache(self.store, options.cache)  # first: it may raise, and holds no journal
        recorder = self._recorder(resolved.text, options)
        return RunHandle(setup, resolved, self._shared, recorder, cache=cache)

    def _recorder(self, question: str, options: RunOptions) -> EventRecorder:
        """Create the event recorder of a new run.

        If there is a store, the recorder also writes the run's journal.
        """
        listeners = (*as_listeners(options.on_event), *tracing())
        if self.store is None:
            return EventRecorder(new_run_id(), None, listeners)
        journal = self.store.create(self.store.new_id(question))
        finish = functools.partial(self.store.finish, journal)
        return EventRecorder(journal.id, journal, listeners, on_close=finish)

    async def aprompt(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        *,
        depth: int = 0,
        **changes: Unpack[RunKeywordOptions],
    ) -> FirstRequestPreview:
        """Return the first request that ``completion`` would send for the call at ``depth``.

        Depth 0 is the root call, and a greater depth means a child call. Nothing is sent or stored
        and no API key is needed, but a session may be started. Raises the same ConfigError as
        ``completion``.
        """
        from ramify.engine.prompt_preview import preview

        options = self._options.updated(options, changes)
        prompt = await read_if_file(prompt)
        parsed = make_question(prompt, query, options.answer_type, options.cite)
        resolved = parsed.with_run_options(options)
        return await preview(
            self._setup.for_run(options).with_question_instructions(resolved), resolved, depth
        )

    def prompt(
        self,
        prompt: Any,
        query: str | None = None,
        options: RunOptions | None = None,
        *,
        depth: int = 0,
        **changes: Unpack[RunKeywordOptions],
    ) -> FirstRequestPreview:
        """Return the first request that ``completion`` would send, without sending it.

        This method blocks; ``aprompt`` is the async version.
        """
        return event_loop_thread.run(self.aprompt(prompt, query, options, depth=depth, **changes))

    async def is_direct(self, prompt: Any, query: str | None = None) -> bool:
        """Return True if ``start`` would answer with one plain model call, without a session.

        No model is called.
        """
        from ramify.engine.ways_to_answer import way_to_answer

        resolved = make_question(prompt, query, None, False)
        async with self._shared.use() as resources:
            models = await self._setup.connect_models(resources)
            return way_to_answer(self._setup, resolved, models, None) == "plain call"

    def conversation(
        self, prompt: Any, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> UserConversation:
        """Start a conversation that asks several questions in one live Python session.

        Limits apply to each question.

        Use ``with rlm.conversation(text) as c: c.ask(…)``, or ``async with`` and ``await
        c.aask(…)``. The options given here are the defaults for its questions.
        """
        from ramify.engine.user_conversation import UserConversation

        chosen = self._options.updated(options, changes)
        return UserConversation(
            self._setup, self._shared, self.store, prompt, chosen, resume=self.resume
        )

    # --- resume and replay ------------------------------------------------------------------------

    async def aresume(
        self, run: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Continue a stored run that was killed, suspended, or ended by a limit or a failure, and
        return its result.

        In a conversation, the last question is continued.

        Recorded replies are not paid for again. Requests that were in flight are sent again and
        counted as possibly billed. A run that has ended is answered from the record, unless a limit
        ended it and ``limits`` are higher now. Raises ReplayDiverged, which names each difference,
        if the settings differ from the recorded ones, or if the program sends a request that
        differs from the recorded one; the journal is left unchanged. ``model`` and ``sub_model``
        may differ if they are given here: the change is noted in the journal. ``cite``, ``cache``,
        ``metadata``, ``direct`` and ``retry_empty`` are taken from the record.
        """
        chosen = rerun.rerun_options(
            self._options, options, changes
        )  # reports wrong ones even if it has ended
        recording = self._recording(run, "resume")
        limits = self._setup.for_run(chosen).limits
        if recording.ended is not None and not rerun.is_limit_raised(recording, limits):
            store = require_store(self.store, "resume")
            return rerun.recorded_result(store, run, recording.ended, chosen.answer_type)
        again = self._resume_function(options, changes)
        return raise_if_failed(await self._restart(run, recording, chosen), again)

    def recorded(self, run: str) -> Result | None:
        """Return the result of a stored run that has ended.

        Return None if the run has not ended and can be resumed.
        """
        ended = self._recording(run, "resume").ended
        store = require_store(self.store, "resume")
        return rerun.recorded_result(store, run, ended) if ended is not None else None

    def restart(
        self,
        run: str,
        options: RunOptions | None = None,
        *,
        prompt: Any = None,
        **changes: Unpack[RunKeywordOptions],
    ) -> RunHandle:
        """Continue a stored run in the background, and return a handle to it.

        Requires a running event loop.

        ``prompt`` provides the run's tools again and prepares its sessions; the context itself
        comes from the record. Raises ConfigError if the run has ended.
        """
        options = rerun.rerun_options(self._options, options, changes)
        return self._restart(run, self._recording(run, "resume"), options, prompt)

    def _restart(
        self, run: str, recording: RunEventIndex, options: RunOptions, prompt: Any = None
    ) -> RunHandle:
        setup = rerun.rerun_setup(self._setup, recording, options)
        started = recording.questions[-1]
        if recording.ended is not None:
            if not rerun.is_limit_raised(recording, setup.limits):
                remedy = rerun.limit_hint(recording) or "ask it as a new run"
                raise ConfigError(f"run {started.id} has ended ({recording.ended.stop}): {remedy}")
            recording.continue_past_limit()
        else:
            recording.discard_unanswered_request()
        changed = rerun.check_settings_match_recording(started, setup, options)
        recording.has_other_limits = True
        listeners = (*as_listeners(options.on_event), *tracing())
        journal = require_store(self.store, "resume").reopen(run)
        recorder = EventRecorder(
            started.id,
            journal,
            listeners,
            held=recording.is_event_suppressed,
            since_s=recording.last_s,
            on_close=journal.close,
        )
        if changed:
            recorder.warn(
                "the settings differ from those of the recorded run, which was started with "
                f"{'; '.join(changed)}"
            )
        try:
            return self._rerun(recording, setup, options, recorder, prompt)
        except BaseException:
            journal.close()
            raise

    async def areplay(
        self, run: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Run the code of a stored run again with its recorded replies, and return the result.

        No model is called. Raises ReplayDiverged if the run sends a request that differs from the
        recorded one.
        """
        options = rerun.rerun_options(self._options, options, changes)
        recording = self._recording(run, "replay", strict=True)
        setup = rerun.rerun_setup(self._setup, recording, options)
        rerun.check_models_match_recording(recording.started, setup)
        recording.has_other_limits = bool(recording.limits)
        recorder = EventRecorder(recording.started.id, None, as_listeners(options.on_event))
        return raise_if_failed(await self._rerun(recording, setup, options, recorder), self.resume)

    def start_fork(
        self,
        run: str,
        turn: int,
        options: RunOptions | None = None,
        **changes: Unpack[RunForkOptions],
    ) -> RunHandle:
        """Start a fork of a stored run, which repeats the run up to a turn and then diverges.

        ``turn`` counts from 0, in the root call or in the call that the option ``call`` names.
        Everything before that turn is taken from the record and costs nothing. The same holds for
        calls that had already begun in parallel with the forked call.

        The option ``code`` replaces the reply of the turn. Without it, the model is asked again;
        the option ``prompt`` then replaces the text of the last message, or with a list, of the
        last few messages. The new run's ``metadata["forked"]`` names its origin. Raises
        ConfigError if there is no such turn, and ReplayDiverged if the settings differ from the
        recorded ones.
        """
        from ramify.engine.run_fork import fork_point

        store = require_store(self.store, "fork")
        point = fork_point(store.events(run), turn, changes)
        recording, started = point.recording, point.recording.started
        options = rerun.rerun_options(self._options, options, changes)
        setup = self._setup.for_run(msgspec.structs.replace(options, metadata=point.run_metadata()))
        setup = setup.with_recorded_instructions(started.config)
        changed = rerun.check_settings_match_recording(started, setup, options)
        recording.has_other_limits = True
        recorder = self._recorder(started.question, options)
        if changed:
            recorder.warn(
                "the settings differ from those of the forked run, which was started with "
                f"{'; '.join(changed)}"
            )
        try:
            return self._rerun(recording, setup, options, recorder)
        except BaseException:
            recorder.close()
            raise

    async def estimate_fork(
        self,
        run: str,
        turn: int,
        options: RunOptions | None = None,
        **changes: Unpack[RunForkOptions],
    ) -> RunForkCostEstimate:
        """Estimate the cost of a fork without sending anything.

        The arguments are those of ``start_fork``. Raises ConfigError if the turn does not exist, or
        if the edited prompt exceeds the model's window or the budget.
        """
        from ramify.engine.run_fork import fork_point

        point = fork_point(require_store(self.store, "fork").events(run), turn, changes)
        chosen = rerun.rerun_options(self._options, options, changes)
        setup = self._setup.for_run(chosen)
        rerun.check_settings_match_recording(point.recording.started, setup, chosen)
        async with self._shared.use() as resources:
            limits, clients = setup.limits, (await setup.connect_models(resources)).all
            return point.estimate(limits, clients, limits.max_reply_tokens)

    async def afork(
        self,
        run: str,
        turn: int,
        options: RunOptions | None = None,
        **changes: Unpack[RunForkOptions],
    ) -> Result:
        """Fork a stored run at a turn and return the result of the new run.

        The new run repeats the stored one up to that turn, and then continues differently. The
        options are those of ``start_fork``. Raises ConfigError, before anything is sent, if the
        edited prompt exceeds the model's window or the budget.
        """
        await self.estimate_fork(run, turn, options, **changes)
        return raise_if_failed(await self.start_fork(run, turn, options, **changes), self.resume)

    def resume(
        self, run: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Continue a stored run that was killed, suspended, or ended by a limit or a failure, and
        return its result.

        This method blocks; ``aresume`` is the async version and explains the options.
        """
        again = self._resume_function(options, changes)
        return self._in_thread(self.aresume(run, options, **changes), again)

    def replay(
        self, run: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Run the code of a stored run again with its recorded replies, without calling any model.

        This method blocks; ``areplay`` is the async version. Raises ReplayDiverged if the run sends
        a request that differs from the recorded one.
        """
        return self._in_thread(self.areplay(run, options, **changes))

    def fork(
        self,
        run: str,
        turn: int,
        options: RunOptions | None = None,
        **changes: Unpack[RunForkOptions],
    ) -> Result:
        """Fork a stored run at a turn, and return the result of the new run.

        This method blocks; ``afork`` is the async version. The options are those of ``start_fork``.
        """
        return self._in_thread(self.afork(run, turn, options, **changes))

    def _recording(self, run: str, what: str, strict: bool = False) -> RunEventIndex:
        from ramify.store.recorded_replies import RunEventIndex

        return RunEventIndex(require_store(self.store, what).events(run), strict=strict)

    def _rerun(
        self,
        recording: RunEventIndex,
        setup: RlmSetup,
        options: RunOptions,
        recorder: EventRecorder,
        prompt: Any = None,
    ) -> RunHandle:
        """Start a rerun of all questions of a recorded run, and return the last one's handle."""
        from ramify.engine.run_handle import RunHandle
        from ramify.engine.ways_to_answer import UserConversationState

        *before, started = recording.questions
        given = {*setup.tools.functions, *setup.tools.values}
        tools = rerun.tools_of_sources(started, given) if prompt is None else {}
        last = rerun.rebuild_question(self.store, started, options.answer_type, prompt, tools)
        strategy = recorded_strategy(started.config.get("strategy"), options.strategy)
        last = msgspec.structs.replace(last, strategy=strategy, chosen_mode=recording.chosen_mode)
        state = UserConversationState(recorder) if rerun.is_conversation(recording) else None
        return RunHandle(
            setup,
            last,
            self._shared,
            recorder,
            conversation=state,
            recording=recording,
            earlier=[
                rerun.rebuild_question(self.store, each, None, of_sources=tools) for each in before
            ],
        )

    # --- resources --------------------------------------------------------------------------------

    def _in_thread(
        self, work: Coroutine[Any, Any, Result], again: Callable[[str], Result] | None = None
    ) -> Result:
        with suspend_if_loop_blocked(again or self.resume):
            return self._loop.run(work)

    def _resume_function(
        self, options: RunOptions | None, changes: RunKeywordOptions
    ) -> Callable[[str], Result]:
        """Return a function that resumes a suspended run with the same options.

        Its argument is the id of the run.
        """
        return functools.partial(self.resume, options=self._options.updated(options, changes))

    def _prepare(self) -> None:
        """Start the first session in the background if the scaffold always uses one."""
        if self._setup.scaffold.direct_chars == 0:
            self._shared.prestart_sandbox()

    def close(self) -> None:
        """Release the resources that the synchronous API keeps open between completions.

        Calling this method again has no effect.
        """
        self._loop.close()

    def __enter__(self) -> RLM:
        self._prepare()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> RLM:
        self._prepare()
        self._shared.pin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._shared.unpin()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._loop.close(waits=False):
                warnings.warn(
                    "an RLM was not closed: use `with RLM(…) as rlm`, or rlm.close()",
                    ResourceWarning,
                    stacklevel=2,
                )


def _check_type(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise ConfigError if an argument of ``RLM`` has the wrong type.

    ``wanted`` is the public name of the expected class, for the error message.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}: give a ramify.{wanted}(…)")
