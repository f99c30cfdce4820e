"""Public API of the library: ``RLM``, which answers questions over inputs of any size.

    rlm = RLM("openai:gpt-5-mini")
    result = rlm.completion(huge_text, "Which host failed first?")
    result.response, result.usage, result.cost, result.trajectory

    async with RLM(…) as rlm:
        async for event in rlm.stream(huge_text, "…"): …
        result = await rlm.acompletion(huge_text, "…")

    with rlm.conversation(huge_text) as c:      # one live session, several questions
        c.ask("How many errors?"); c.ask("And warnings?")

Not here: the loop (see ``rlm_loop.py``), the state that a tree of calls shares (see
``run_state.py``) and prompts (see ``scaffold.py``).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
import warnings
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from ramify.clients.base import Client, Sampling
from ramify.clients.pool import ClientPool
from ramify.engine import event_loop_thread
from ramify.engine.branch import BranchSearch, config_of, recorded_search, search_of
from ramify.engine.citations import Citation, CitedAnswer
from ramify.engine.conversation import Conversation
from ramify.engine.limits import Limits
from ramify.engine.models import ModelSpec, RunModels, as_list
from ramify.engine.question import Question, question
from ramify.engine.recorder import EventRecorder, Listener, checked_listener
from ramify.engine.resources import LoopResources, SharedResources
from ramify.engine.run_handle import Result, RunHandle, as_text, checked
from ramify.engine.scaffold import Scaffold, scaffold_of
from ramify.engine.setup import RlmSetup
from ramify.engine.spans import tracing
from ramify.engine.tool_set import Tools, ToolSet
from ramify.errors import ConfigError, ReplayDiverged
from ramify.sandbox.base import SandboxSpec, check_provider
from ramify.sandbox.context import SharedContext
from ramify.store.call_cache import CallCache
from ramify.store.journal import Journal
from ramify.store.recorded_replies import RecordedReplies
from ramify.store.store import Store
from ramify.types.event import AnyEvent, RunStarted
from ramify.types.trajectory import Stop

__all__ = ["RLM", "Result", "RunHandle"]


class RLM:
    """A recursive language model.

    model          ``"provider:model"`` or a client; a list gives one model per depth
    sub_model      model for everything below the root; a list adds models that a session
                   can choose by name
    limits         what one question may use: turns, depth, calls, tokens, dollars, seconds
    scaffold       prompts and conventions: a name or a ``Scaffold``; by default the one that
                   the model was made for
    sandbox        where code runs
    tools          your functions and values, available in the session; functions run in this
                   process, with its permissions
    child_tools    tools of the children; by default ``tools``
    store          where runs are saved; by default they are not
    sampling       temperature and other sampling settings
    branches       number of continuations of the root's first turn; the majority answer wins
    search         another way to branch and to choose an answer: see ``engine/branch.py``
    """

    def __init__(
        self,
        model: ModelSpec | Sequence[ModelSpec],
        *,
        sub_model: ModelSpec | Sequence[ModelSpec] | None = None,
        limits: Limits | None = None,
        scaffold: Scaffold | str | None = None,
        sandbox: SandboxSpec | str | None = None,
        tools: Tools | None = None,
        child_tools: Tools | None = None,
        store: Store | None = None,
        sampling: Sampling | None = None,
        branches: int = 1,
        search: BranchSearch | None = None,
    ) -> None:
        limits = limits or Limits()
        spec = (
            SandboxSpec(provider=sandbox) if isinstance(sandbox, str) else sandbox or SandboxSpec()
        )
        for name, value, kind in (("limits", limits, Limits), ("sandbox", spec, SandboxSpec)):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}: give a ramify.{kind.__name__}(…)"
                )
        if branches < 1 or (branches > 1 and search is not None):
            problem = (
                "a search was given too: give only one of them"
                if search
                else "give 1 for no branching, or more"
            )
            raise ConfigError(f"branches is {branches}: {problem}")
        self._search = search_of(branches if search is None else search)
        check_provider(spec)  # reports an unknown provider before any model is called
        tool_set = ToolSet(tools)
        chosen = scaffold_of(scaffold, model)
        self.store = store
        self._shared = SharedResources(limits.max_concurrency, spec)
        self._is_pinned_in_thread = False
        self._model = model
        self._sub_model = sub_model
        self._setup = RlmSetup(
            self._connect,
            limits,
            chosen,
            spec,
            sampling or Sampling(),
            tool_set,
            tool_set if child_tools is None else ToolSet(child_tools),
            store.blobs if store else None,
            _config(model, sub_model, limits, chosen, spec, sampling, tool_set),
        )

    @property
    def limits(self) -> Limits:
        return self._setup.limits

    @property
    def sandbox(self) -> SandboxSpec:
        return self._setup.sandbox

    async def prepare(self) -> list[Client]:
        """Connect the models and open the sandbox now; returns the clients of the models.

        Use it inside ``async with``, in a service that should fail before the first request
        arrives. Raises ConfigError or SandboxError.
        """
        async with self._shared.use() as resources:
            resources.sandbox()
            return list(self._connect(resources).all)

    @contextlib.asynccontextmanager
    async def pool(self) -> AsyncIterator[ClientPool]:
        """The client pool of this RLM's runs, for other requests that should share its connections
        and rate limits, such as those of judges."""
        async with self._shared.use() as resources:
            self._connect(resources)
            yield resources.pool

    # --- questions --------------------------------------------------------------------------------

    def completion(
        self,
        prompt: Any,
        query: str | None = None,
        *,
        answer_type: Any = None,
        cite: bool = False,
        cache: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """Answer ``query`` over ``prompt``: text, a dict or list of texts, any plain value, or the
        return value of ``load``.

        Without ``query``, ``prompt`` is the question. ``answer_type`` is a type or a JSON schema
        that the answer must match. ``cite`` asks for citations and checks them. ``cache`` reuses
        stored replies to identical requests. ``search`` runs several continuations of a turn and
        chooses one of their answers: give a number (continuations of the first turn, by majority
        vote; 1 for none), ``Branches`` or a ``BranchSearch``. The default is the RLM's own setting.

        Raises ConfigError for invalid input, and the error of the model or sandbox if that
        prevented an answer. Reaching a limit is not an error: see ``Result.stop``.
        """
        return self._in_thread(
            self.acompletion(
                prompt,
                query,
                answer_type=answer_type,
                cite=cite,
                cache=cache,
                search=search,
                on_event=on_event,
            )
        )

    async def acompletion(
        self,
        prompt: Any,
        query: str | None = None,
        *,
        answer_type: Any = None,
        cite: bool = False,
        cache: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """``completion`` on the caller's event loop. Cancelling it cancels the whole tree of
        calls."""
        running = self.start(
            prompt,
            query,
            answer_type=answer_type,
            cite=cite,
            cache=cache,
            search=search,
            on_event=on_event,
        )
        return checked(await running.result())

    async def stream(
        self,
        prompt: Any,
        query: str | None = None,
        *,
        answer_type: Any = None,
        cite: bool = False,
        cache: bool = False,
        search: BranchSearch | int | None = None,
    ) -> AsyncIterator[AnyEvent]:
        """Yield the events of a run as they happen; the last one is ``RunEnded``. Leaving the loop
        early cancels the run."""
        running = self.start(
            prompt, query, answer_type=answer_type, cite=cite, cache=cache, search=search
        )
        try:
            async for event in running.events():
                yield event
            checked(await running.result())
        finally:
            running.cancel()

    def start(
        self,
        prompt: Any,
        query: str | None = None,
        *,
        answer_type: Any = None,
        cite: bool = False,
        cache: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
        metadata: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        direct: bool = True,
    ) -> RunHandle:
        """Start a run in the background. Needs a running event loop.

        The handle's ``result`` is data: it raises nothing for what a model did. ``metadata`` is
        saved with the run's configuration. ``sampling`` and ``limits`` apply to this run only, so
        several attempts at one question can use different seeds; ``max_concurrency`` is the
        exception, because all runs of an RLM share it. With ``direct=False`` the root has a session
        even if the context is short.
        """
        resolved = msgspec.structs.replace(
            question(prompt, query, answer_type, cite), direct=direct
        )
        chosen = self._search if search is None else search_of(search)
        listeners = (*checked_listener(on_event), *tracing())
        journal = self.store.create(self.store.new_id(resolved.text)) if self.store else None
        recorder = EventRecorder(journal, listeners)
        config = {**self._setup.config, **config_of(chosen), **(metadata or {})}
        if not direct:
            config["direct"] = False  # a replayed or resumed run must make the same decision
        setup = msgspec.structs.replace(self._setup, config=config)
        if sampling is not None:
            config["sampling"] = msgspec.to_builtins(sampling)
            setup = msgspec.structs.replace(setup, sampling=sampling)
        if limits is not None:
            config["limits"] = msgspec.to_builtins(limits)
            setup = msgspec.structs.replace(setup, limits=limits)
        return RunHandle(
            setup,
            resolved,
            self._shared.use(),
            id=journal.id if journal else _new_id(),
            recorder=recorder,
            cache=self._cache(cache),
            search=chosen,
            close=functools.partial(_close_journal, self.store, journal),
        )

    async def is_direct(self, prompt: Any, query: str | None = None) -> bool:
        """True if ``start`` would answer with one plain call, without a session. Calls no model."""
        resolved, tools = question(prompt, query, None, False), self._setup.tools
        if self._search is not None:
            return False
        async with self._shared.use() as resources:
            window = self._connect(resources).rlm(0).window
            return resolved.is_direct(
                self._setup.scaffold, window, bool(tools.functions or tools.values)
            )

    def conversation(self, prompt: Any) -> Conversation:
        """Ask several questions in one live session; limits apply to each question.

        Use ``with rlm.conversation(text) as c: c.ask(…)``, or ``async with`` and ``await
        c.aask(…)``.
        """
        return Conversation(self._setup, self._shared, prompt, self.store, self._search)

    # --- resume and replay ------------------------------------------------------------------------

    async def aresume(
        self,
        run: str,
        *,
        answer_type: Any = None,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """Continue a stored run that was cut off or failed.

        Recorded replies are not paid for again. Requests that were in flight are sent again and
        counted as possibly billed. A run that has already ended is answered from the record. Raises
        ReplayDiverged if the program sends a request that differs from the recorded one; the
        journal is left unchanged.
        """
        store = self._need_store("resume")
        recording = RecordedReplies(store.events(run))
        if recording.ended is not None:
            return self._from_record(run)
        return checked(
            await self.restart(
                run, answer_type=answer_type, search=search, on_event=on_event
            ).result()
        )

    def restart(
        self,
        run: str,
        *,
        answer_type: Any = None,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> RunHandle:
        """``start`` for a stored run that was cut off or failed. Raises ConfigError if the run has
        ended."""
        store = self._need_store("resume")
        recording = RecordedReplies(store.events(run))
        if recording.ended is not None:
            raise ConfigError(
                f"run {recording.started.id} has ended ({recording.ended.stop}): ask it as a new "
                "run"
            )
        listeners = (*checked_listener(on_event), *tracing())
        journal = store.reopen(run)
        recorder = EventRecorder(journal, listeners, held=recording.holds, since_s=recording.last_s)
        try:
            self._check_models(recording.started)
            return self._rerun(recording, answer_type, search, recorder, journal.close)
        except BaseException:
            journal.close()
            raise

    async def areplay(
        self,
        run: str,
        *,
        answer_type: Any = None,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """Run the cells of a stored run again with its recorded replies, without calling any model.
        Raises ReplayDiverged if the run sends a request that differs from the recorded one."""
        recording = RecordedReplies(self._need_store("replay").events(run), strict=True)
        recorder = EventRecorder(None, checked_listener(on_event))
        result = await self._rerun(recording, answer_type, search, recorder, _do_nothing).result()
        return checked(result)

    def resume(
        self,
        run: str,
        *,
        answer_type: Any = None,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """``aresume``, blocking."""
        return self._in_thread(
            self.aresume(run, answer_type=answer_type, search=search, on_event=on_event)
        )

    def replay(
        self,
        run: str,
        *,
        answer_type: Any = None,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """``areplay``, blocking."""
        return self._in_thread(
            self.areplay(run, answer_type=answer_type, search=search, on_event=on_event)
        )

    def _rerun(
        self,
        recording: RecordedReplies,
        answer_type: Any,
        search: BranchSearch | int | None,
        recorder: EventRecorder,
        close: Any,
    ) -> RunHandle:
        started = recording.started
        if len(recording.questions) > 1:
            raise ConfigError(
                f"run {started.id} is a conversation of {len(recording.questions)} questions: ask "
                "them in a new one"
            )
        resolved = self._question_of(started, answer_type)
        return RunHandle(
            self._setup,
            resolved,
            self._shared.use(),
            id=started.id,
            recorder=recorder,
            recording=recording,
            search=recorded_search(started.config, self._search)
            if search is None
            else search_of(search),
            close=close,
        )

    def _check_models(self, started: RunStarted) -> None:
        for name in ("model", "sub_model"):
            recorded, current = started.config.get(name), self._setup.config[name]
            if recorded is not None and recorded != current:
                raise ReplayDiverged(
                    f"run {started.id} was started with {name}={', '.join(recorded) or None}, not "
                    f"{', '.join(current) or None}: resume it with that one, or ask as a new run"
                )

    def _question_of(self, started: RunStarted, kind: Any) -> Question:
        config, value = started.config, None
        if started.context is not None:
            blob = self._need_store("resume").blobs.get(started.context.digest)
            value = SharedContext.decode(blob).value
        cite = bool(config.get("cite"))
        kind = kind if kind is not None else None if cite else config.get("answer_schema")
        resolved = (
            question("" if value is None else value, started.question, kind, cite)
            if value is not None
            else None
        )
        resolved = resolved or question(started.question, None, kind, cite)
        direct = config.get("direct") is not False
        return msgspec.structs.replace(resolved, about=config.get("about", ""), direct=direct)

    def _from_record(self, run: str) -> Result:
        trajectory = self._need_store("resume").load(run)
        answer: Any = trajectory.answer
        citations: tuple[Citation, ...] = ()
        if trajectory.metadata.get("cite") and answer is not None:
            cited = msgspec.convert(answer, CitedAnswer[Any])
            answer, citations = cited.answer, cited.citations
        return Result(
            as_text(answer),
            answer,
            trajectory.stop or Stop.ERROR,
            trajectory.usage,
            trajectory.cost,
            trajectory,
            citations,
        )

    def _need_store(self, what: str) -> Store:
        if self.store is None:
            raise ConfigError(
                f"{what} needs the store that holds the run: RLM(…, store=ramify.Store())"
            )
        return self.store

    # --- resources --------------------------------------------------------------------------------

    def _connect(self, resources: LoopResources) -> RunModels:
        pool = resources.pool

        def connect(spec: ModelSpec) -> Client:
            return pool.client(spec) if isinstance(spec, str) else pool.adopt(spec)

        return RunModels(self._model, self._sub_model, connect)

    def _cache(self, is_enabled: bool) -> CallCache | None:
        return CallCache(self._need_store("cache=True")) if is_enabled else None

    def _in_thread(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._is_pinned_in_thread:
            try:
                event_loop_thread.run(self._pin())
            except BaseException:
                work.close()
                raise
            self._is_pinned_in_thread = True
        return event_loop_thread.run(work)

    async def _pin(self) -> None:
        self._shared.pin()

    def close(self) -> None:
        """Release what the synchronous API keeps open between completions. Idempotent."""
        if self._is_pinned_in_thread:
            self._is_pinned_in_thread = False
            event_loop_thread.run(self._shared.unpin())

    def __enter__(self) -> RLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> RLM:
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
        if getattr(self, "_is_pinned_in_thread", False):
            with contextlib.suppress(Exception):
                self._is_pinned_in_thread = False
                event_loop_thread.leave(self._shared.unpin())
                warnings.warn(
                    "an RLM was not closed: use `with RLM(…) as rlm`, or rlm.close()",
                    ResourceWarning,
                    stacklevel=2,
                )


def _config(
    model: ModelSpec | Sequence[ModelSpec],
    sub_model: ModelSpec | Sequence[ModelSpec] | None,
    limits: Limits,
    chosen: Scaffold,
    spec: SandboxSpec,
    sampling: Sampling | None,
    tools: ToolSet,
) -> dict[str, Any]:
    names = [spec if isinstance(spec, str) else spec.name for spec in as_list(model)]
    subs = [spec if isinstance(spec, str) else spec.name for spec in as_list(sub_model or ())]
    config = {
        "model": names,
        "sub_model": subs,
        "limits": limits,
        "scaffold": chosen,
        "sandbox": spec,
        "sampling": sampling or Sampling(),
        **({"mcp": tools.servers} if tools.servers else {}),
    }
    # Decode what the journal will contain, so that the config is what its readers will see.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return plain


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _close_journal(store: Store | None, journal: Journal | None) -> None:
    """Close ``journal`` and delete it if it has no event: that run failed before it started, so
    there is nothing to list or resume."""
    if store is not None and journal is not None:
        journal.close()
        if journal.path.stat().st_size == 0:
            store.remove(journal.path)


def _do_nothing() -> None:
    pass
