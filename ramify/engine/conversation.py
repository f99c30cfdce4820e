"""Several questions in one live session.

Variables, imports and the history persist between questions. Each question is a separate call in
one trajectory (``0``, ``1``, …) that continues the previous one, or its chosen branch. Limits apply
to each question; the clock is stopped between questions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from ramify.engine import event_loop_thread
from ramify.engine.branch import BranchSearch, config_of, search_of
from ramify.engine.question import question
from ramify.engine.recorder import EventRecorder, Listener, checked_listener
from ramify.engine.resources import SharedResources
from ramify.engine.run_handle import ConversationState, Result, RunHandle, checked
from ramify.engine.setup import RlmSetup
from ramify.engine.spans import tracing
from ramify.errors import ConfigError
from ramify.store.store import Store
from ramify.types.trajectory import Trajectory


class Conversation:
    """A conversation. Open it with ``with`` (and ``ask``) or with ``async with`` (and ``aask``)."""

    def __init__(
        self,
        setup: RlmSetup,
        shared: SharedResources,
        prompt: Any,
        store: Store | None,
        search: BranchSearch | None = None,
    ) -> None:
        self._setup = setup
        self._shared = shared
        self._prompt = prompt
        self._store = store
        self._search = search
        self._state: ConversationState | None = None
        self._id = ""
        self._close_journal: Callable[[], None] | None = None
        self._lock = asyncio.Lock()
        """Held while a question is answered, because there is only one session."""

    @property
    def trajectory(self) -> Trajectory:
        """Record of all questions so far."""
        return self._opened().recorder.trajectory

    def ask(
        self,
        query: str,
        *,
        answer_type: Any = None,
        cite: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """Ask the next question. Raises the same errors as ``RLM.completion``."""
        return event_loop_thread.run(
            self.aask(query, answer_type=answer_type, cite=cite, search=search, on_event=on_event)
        )

    async def aask(
        self,
        query: str,
        *,
        answer_type: Any = None,
        cite: bool = False,
        search: BranchSearch | int | None = None,
        on_event: Listener | None = None,
    ) -> Result:
        """``ask`` on the caller's event loop. Concurrent questions are answered one after the
        other."""
        chosen = self._search if search is None else search_of(search)
        async with self._lock:
            return await self._answer(query, answer_type, cite, chosen, on_event)

    async def _answer(
        self,
        query: str,
        answer_type: Any,
        cite: bool,
        search: BranchSearch | None,
        on_event: Listener | None,
    ) -> Result:
        state = self._opened()
        parsed = question(self._prompt, query, answer_type, cite)
        for listener in checked_listener(on_event):
            state.recorder.listen(listener)
        try:
            setup = msgspec.structs.replace(
                self._setup, config={**self._setup.config, **config_of(search)}
            )
            running = RunHandle(
                setup,
                parsed,
                self._shared.use(),
                id=self._id,
                recorder=state.recorder,
                conversation=state,
                search=search,
            )
            return checked(await running.result())
        finally:
            if on_event is not None:
                state.recorder.ignore(on_event)

    async def __aenter__(self) -> Conversation:
        self._shared.pin()
        journal = self._store.create(self._store.new_id("conversation")) if self._store else None
        self._id = journal.id if journal else secrets.token_hex(8)
        self._close_journal = journal.close if journal else None
        self._state = ConversationState(EventRecorder(journal, tracing()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        state, self._state = self._opened(), None
        try:
            await state.close()
        finally:
            if self._close_journal is not None:
                self._close_journal()
            await self._shared.unpin()

    def __enter__(self) -> Conversation:
        return event_loop_thread.run(self.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        event_loop_thread.run(self.__aexit__(kind, error, at))

    def _opened(self) -> ConversationState:
        if self._state is None:
            raise ConfigError(
                "the conversation is not open: use `with rlm.conversation(context) as c: c.ask(…)`"
            )
        return self._state
