"""Define conversations, in which a user asks several questions in one live Python session.

Variables, imports and the history persist between questions. Each question is a separate call in
one trajectory (``0``, ``1``, …) that continues the previous one, or its chosen branch. Limits apply
to each question; the clock is stopped between questions.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ramify.engine import event_loop_thread
from ramify.engine.event_recorder import EventRecorder, as_listeners, tracing
from ramify.engine.question import RunKeywordOptions, RunOptions, make_question, to_session_value
from ramify.engine.resources import RefCountedLoopResources, RlmSetup, reply_cache
from ramify.engine.run_handle import RunHandle
from ramify.engine.run_result import Result, raise_if_failed, suspend_if_loop_blocked
from ramify.engine.ways_to_answer import UserConversationState
from ramify.errors import ConfigError
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.store.base import RunStore


class UserConversation:
    """A conversation in which the user asks several questions in one live session.

    Open it in a ``with`` block to call ``ask``, or in an ``async with`` block to call ``aask``.
    """

    def __init__(
        self,
        setup: RlmSetup,
        shared: RefCountedLoopResources,
        store: RunStore | None,
        prompt: Any,
        options: RunOptions,
        *,
        resume: Callable[..., Result],
    ) -> None:
        """Prepare a conversation about ``prompt``.

        ``options`` are the defaults for all questions. ``resume`` continues the stored run of a
        conversation that was closed.
        """
        self._setup = setup
        self._shared = shared
        self._store = store
        self._prompt = to_session_value(prompt)  # an open file can be read once
        self._options = options
        self._resume = resume
        self._state: UserConversationState | None = None
        self._lock = asyncio.Lock()
        """Held while a question is answered, because the questions share one session."""

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory of all questions asked so far in this conversation."""
        return self._require_open().recorder.trajectory

    def ask(
        self, query: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Ask the next question and return its result.

        This method blocks; ``aask`` is the async version. The options and errors are those of
        ``RLM.completion``.
        """
        with suspend_if_loop_blocked(self._resume):
            return event_loop_thread.run(self.aask(query, options, **changes))

    async def aask(
        self, query: str, options: RunOptions | None = None, **changes: Unpack[RunKeywordOptions]
    ) -> Result:
        """Ask the next question on the caller's event loop and return its result.

        Concurrent questions are answered one after the other. The options and errors are those of
        ``RLM.completion``.
        """
        chosen = self._options.updated(options, changes)
        async with self._lock:
            return await self._answer(query, chosen)

    async def _answer(self, query: str, options: RunOptions) -> Result:
        state = self._require_open()
        parsed = make_question(self._prompt, query, options.answer_type, options.cite)
        parsed = msgspec.structs.replace(parsed, mode=options.mode)
        for listener in as_listeners(options.on_event):
            state.recorder.add_listener(listener)
        try:
            running = RunHandle(
                self._setup.for_run(options).with_question_instructions(parsed),
                parsed,
                self._shared,
                state.recorder,
                conversation=state,
                cache=reply_cache(self._store, options.cache),
            )
            return raise_if_failed(await running, functools.partial(self._resume, options=options))
        finally:
            if options.on_event is not None:
                state.recorder.remove_listener(options.on_event)

    async def __aenter__(self) -> UserConversation:
        import secrets

        store = self._store
        self._shared.pin()
        journal = None if store is None else store.create(store.new_id("conversation"))
        recorder = EventRecorder(
            journal.id if journal else secrets.token_hex(8),
            journal,
            tracing(),
            on_close=journal.close if journal else None,
        )
        self._state = UserConversationState(recorder)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        state, self._state = self._require_open(), None
        try:
            await state.close()
        finally:
            state.recorder.close()
            await self._shared.unpin()

    def __enter__(self) -> UserConversation:
        return event_loop_thread.run(self.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        event_loop_thread.run(self.__aexit__(kind, error, at))

    def _require_open(self) -> UserConversationState:
        if self._state is None:
            raise ConfigError(
                "the conversation is not open: use `with rlm.conversation(context) as c: c.ask(…)`"
            )
        return self._state
